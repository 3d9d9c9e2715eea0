"""The section [images]: bounds of images in requests, their encoder and the cache of their features."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.config.value_types import Count, Seconds, Section, Text


class ImagesConfig(Section, frozen=True):
    count: Count = 16  # images per request
    bytes: Count = 6 * 1024 * 1024  # 6 MiB, one image's file; request bodies are bounded by server.body_bytes
    pixels: Count = 40_000_000  # one image
    # Hosts whose https and http URLs are fetched, as "host" or "host:port". Empty: images come in the request alone
    hosts: tuple[Text, ...] = ()
    fetch_s: Seconds = 5.0  # seconds to fetch one image; redirects are never followed
    # Threads that encode images, at a low priority, in the server's process; default: a quarter of the cores
    threads: Annotated[int, Meta(ge=1, le=512)] | None = None
    queued: Count = 64  # images of one model that are encoded or wait for it; further ones are rejected with 503
    cache_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024  # 256 MiB of features, of each model and process
