"""Fetches images from hosts that the configuration allows, within bounds of bytes and time. Follows no redirect."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp

from headrace.config.images_section import ImagesConfig
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.images.message_images import too_many_bytes

_PARAMETER = "messages"


async def fetch_image(url: str, config: ImagesConfig) -> bytes:
    """Return the bytes of an image. ApiError for a host that is not allowed, and for what does not come in bounds."""
    shown = _allowed(url, config.hosts)
    timeout = aiohttp.ClientTimeout(total=config.fetch_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(url, allow_redirects=False, headers={"accept": "image/*"}) as response,
        ):
            if 300 <= response.status < 400:
                raise invalid_request(f"The image at {shown} is a redirect, which is not followed.", _PARAMETER)
            if response.status != 200:
                raise invalid_request(f"The image at {shown} was answered with status {response.status}.", _PARAMETER)
            if (response.content_length or 0) > config.bytes:
                raise too_many_bytes(config.bytes)
            data = bytearray()
            async for piece in response.content.iter_chunked(64 * 1024):
                data += piece
                if len(data) > config.bytes:
                    raise too_many_bytes(config.bytes)
    except TimeoutError:
        raise invalid_request(
            f"The image at {shown} did not come within {config.fetch_s:g} s (images.fetch_s).", _PARAMETER
        ) from None
    except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, ValueError):
        raise invalid_request(f"The image at {shown} cannot be fetched.", _PARAMETER) from None
    if not data:
        raise invalid_request(f"The image at {shown} is empty.", _PARAMETER)
    return bytes(data)


def _allowed(url: str, hosts: tuple[str, ...]) -> str:
    """Return the URL's host for messages."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise invalid_request("An image's URL is malformed.", _PARAMETER) from None
    named = host if port is None else f"{host}:{port}"
    if "@" in parts.netloc or not host:
        raise invalid_request("An image's URL must have a host and no user name.", _PARAMETER)
    if not any(allowed.lower() in (host, named) for allowed in hosts):
        raise _not_allowed(named, hosts)
    return named


def _not_allowed(host: str, hosts: tuple[str, ...]) -> ApiError:
    which = f"Allowed hosts: {', '.join(hosts)}." if hosts else "This server fetches no images (images.hosts is empty)."
    return invalid_request(
        f"The image's host '{host[:100]}' is not allowed. {which} Send the image as a base64 data URL.", _PARAMETER
    )
