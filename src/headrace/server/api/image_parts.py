"""Reads images of all dialects into messages, in the form of `gateway/images/message_images.py`. Decodes none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from headrace.gateway.api_errors import invalid_request
from headrace.gateway.images.message_images import MARK, check_mark, check_url

_DETAILS: Final = ("auto", "low", "high", "original")
_MEDIA: Final = re.compile(r"image/[a-zA-Z0-9.+-]{1,40}")
_MAGIC: Final = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}


class MessageContent:
    """A message's content in the making: texts in lines of their own, images where they are among them."""

    def __init__(self) -> None:
        self._text = ""
        self._after_text = False
        self._wheres: list[tuple[str, str]] = []  # texts and where they are
        self.images: list[dict[str, Any]] = []

    def add_text(self, text: str, where: str) -> None:
        self._wheres.append((text, where))
        self._text += f"\n{text}" if self._after_text else text
        self._after_text = True

    def add_image(self, image: dict[str, Any]) -> None:
        self.images.append(image)
        self._text += MARK
        self._after_text = False

    def fields(self, role: str, where: str) -> dict[str, Any]:
        """Return the message's `content`, and `images` if it has any. ApiError for images of another role's."""
        if not self.images:
            return {"content": self._text}
        if role != "user":
            raise invalid_request(f"'{where}' has an image. Only messages of the role user can have images.", where)
        for text, place in self._wheres:
            check_mark(text, place)
        return {"content": self._text, "images": self.images}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` and `images` of two messages that become one. A text without images has no marks of any."""
    texts = [str(each.get("content") or "") for each in (first, second)]
    images = [*(first.get("images") or ()), *(second.get("images") or ())]
    if images:
        for each, text in zip((first, second), texts, strict=True):
            if not each.get("images"):
                check_mark(text, "messages")
    content = "\n".join(text for text in texts if text)
    return {"content": content, "images": images} if images else {"content": content}


def chat_image(given: object, where: str) -> dict[str, Any]:
    """Read an `image_url` part: an object with `url` and `detail`, or the URL alone."""
    if isinstance(given, str):
        return {"url": check_url(given, where)}
    if not isinstance(given, dict):
        raise invalid_request(f"'{where}' must be an object with 'url'.", where)
    values = cast("dict[str, Any]", given)
    unknown = sorted(set(values) - {"url", "detail", "format"})
    if unknown:
        raise invalid_request(f"Unknown field '{where}.{unknown[0][:100]}'. Expected url and detail.", where)
    return {"url": check_url(values.get("url"), f"{where}.url"), **_detail(values.get("detail"), where)}


def responses_image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read an `input_image` part of the Responses API."""
    if part.get("file_id") is not None:
        raise invalid_request(f"'{where}.file_id' is not supported. Send the image in 'image_url'.", f"{where}.file_id")
    unknown = sorted(set(part) - {"type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"})
    if unknown:
        raise invalid_request(f"Unknown field '{where}.{unknown[0][:100]}'. Expected image_url and detail.", where)
    url = check_url(part.get("image_url"), f"{where}.image_url")
    return {"url": url, **_detail(part.get("detail"), where)}


def _detail(given: object, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if given not in _DETAILS:
        raise invalid_request(f"'{where}.detail' must be one of {', '.join(_DETAILS)}.", f"{where}.detail")
    return {"detail": given}


def anthropic_image(source: object, where: str) -> dict[str, Any]:
    """Read the source of an `image` block: base64 or url."""
    values = cast("dict[str, Any]", source) if isinstance(source, dict) else {}
    match values.get("type"):
        case "base64":
            media, data = values.get("media_type"), values.get("data")
            if not isinstance(media, str) or not _MEDIA.fullmatch(media) or not isinstance(data, str):
                raise invalid_request(f"'{where}.source' must have media_type (image/png, ...) and data.", where)
            return {"url": f"data:{media};base64,{data}"}
        case "url":
            return {"url": check_url(values.get("url"), f"{where}.source.url")}
        case other:
            raise invalid_request(
                f"'{where}.source' is of type '{str(other)[:100]}'. Expected base64 or url.", f"{where}.source.type"
            )


def ollama_image(given: object, where: str) -> dict[str, Any]:
    """Read an image of Ollama's dialect: base64 alone."""
    if not isinstance(given, str) or not given:
        raise invalid_request(f"'{where}' must be the base64 of an image's file.", where)
    if given.startswith("data:"):
        return {"url": check_url(given, where)}
    kind = next((kind for magic, kind in _MAGIC.items() if given.startswith(magic)), "image/png")
    return {"url": f"data:{kind};base64,{given}"}
