"""Images in messages: how a message carries them between the dialects, the templates and the upstreams.

A message's content stays a text. A mark in it stands for each image, and `images` lists them in order, each with its
`url` (a data URL, or one to fetch). Texts in such a message cannot hold the mark themselves. Decodes no image.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.gateway.api_errors import ApiError, invalid_request

MARK: Final = "\ufffc"  # Unicode's own for an object in a text
_DATA: Final = re.compile(r"data:([a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+)?(;[a-zA-Z0-9=._-]+)*;base64,", re.ASCII)
_SHOWN: Final = 60  # characters of a URL in errors


def images_of(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the images of all messages, in order."""
    return [image for message in messages or () for image in message.get("images") or ()]


def check_url(url: object, where: str) -> str:
    """Return a URL whose scheme can be read: data, https or http."""
    if not isinstance(url, str) or not url:
        raise invalid_request(f"'{where}' has no URL. Expected a base64 data URL or an https URL.", where)
    if url.startswith("data:"):
        if _DATA.match(url) is None:
            raise invalid_request(f"'{where}' is not a base64 data URL: expected data:image/png;base64,...", where)
    elif not url.startswith(("https://", "http://")):
        raise invalid_request(
            f"'{where}' is '{url[:_SHOWN]}'. Expected a base64 data URL (data:image/png;base64,...) or an https URL.",
            where,
        )
    return url


def check_mark(text: str, where: str) -> str:
    """Return a text of a message with images."""
    if MARK in text:
        raise invalid_request(f"'{where}' has U+FFFC, which stands for an image. Remove it.", where)
    return text


def decode_data_url(url: str, most: int) -> bytes:
    """Return the bytes of a data URL. ApiError for one that is malformed or longer than `most` bytes."""
    start = url.index(",") + 1
    if (len(url) - start) * 3 // 4 - 2 > most:
        raise too_many_bytes(most)
    try:
        data = base64.b64decode(url[start:], validate=True)
    except (binascii.Error, ValueError):
        raise invalid_request("An image is not valid base64.", "messages") from None
    if len(data) > most:
        raise too_many_bytes(most)
    if not data:
        raise invalid_request("An image is empty.", "messages")
    return data


def too_many_bytes(most: int) -> ApiError:
    return invalid_request(f"An image is larger than {most} bytes (images.bytes). Send a smaller one.", "messages")


def template_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message's content as parts, as chat templates of models with images take it."""
    parts: list[dict[str, Any]] = []
    texts = str(message.get("content") or "").split(MARK) if message.get("images") else [message.get("content") or ""]
    for place, text in enumerate(texts):
        if place:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]


def upstream_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message's content as parts of the OpenAI API, with the images as they came."""
    images = iter(message["images"])
    return [
        {"type": "image_url", "image_url": dict(next(images))} if part["type"] == "image" else part
        for part in template_parts(message)
        if part["type"] == "image" or part["text"]
    ]
