"""ImageReader: what one model makes of images: their tokens in a prompt, and their features.

Sizes and tokens are known from a file's header, so limits and caches come before an image is decoded and encoded. The
encoder has threads of its own; at most `images.queued` images wait for them, and tenants take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from headrace.config.images_section import ImagesConfig
from headrace.engine.executors.default_sizes import usable_cores
from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.process.wire import MOST_FRAME
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.images.encoding_queue import EncodingQueue
from headrace.gateway.images.feature_cache import FeatureCache, FeatureKey, Tiles
from headrace.gateway.images.message_images import decode_data_url, template_parts
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.user_text import UserText, join
from headrace.models.vision.image_layout import ImageGrid, ImageTexts
from headrace.models.vision.pixels import measure, read_tiles
from headrace.models.vision.vision_folder import VisionFolder
from headrace.observe import metrics

if TYPE_CHECKING:
    from headrace.engine.executors.image_encoder import ImageEncoder

_MOST_BYTES: Final = MOST_FRAME // 4 * 3  # of one request's features: they travel in one message to the worker


class MeasuredImage(msgspec.Struct, frozen=True):
    data: bytes
    digest: bytes
    grid: ImageGrid


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt. `starts`: the first token of each run of its tokens."""

    image: MeasuredImage
    starts: tuple[int, ...]

    @property
    def tile_tokens(self) -> int:
        return self.image.grid.tile_tokens

    @property
    def tokens(self) -> int:
        return len(self.starts) * self.tile_tokens


class ImageReader:
    def __init__(
        self,
        name: str,
        vision: VisionFolder,
        encoder: ImageEncoder,
        tokenizer: Tokenizer,
        config: ImagesConfig,
    ) -> None:
        self._name = name
        self._tower = vision.tower
        self._layout = vision.layout
        self._encoder = encoder
        self.tokenizer = tokenizer
        self._config = config
        self._cache = FeatureCache(config.cache_bytes, name)
        self._queue: EncodingQueue[Tiles] = EncodingQueue(metrics.images_waiting.labels(name).set)
        self._texts = image_texts(self._tower, tokenizer)
        template = tokenizer.template
        self._takes_parts = template is not None and "type" in template.source

    async def finish(self, timeout: float) -> None:
        """Return when every image that waits is encoded, or after `timeout` seconds."""
        await self._queue.finish(timeout)

    async def close(self) -> None:
        self._queue.close()
        await asyncio.to_thread(self._encoder.close)

    # Shape

    async def measured(self, images: Sequence[dict[str, Any]]) -> list[MeasuredImage]:
        """Return the images' bytes and sizes. ApiError for one that is malformed or out of bounds."""
        most = self._config.count
        if len(images) > most:
            raise invalid_request(f"The messages have {len(images)} images. Expected at most {most}.", "messages")
        return [await self._measured(image["url"]) for image in images]

    async def _measured(self, url: str) -> MeasuredImage:
        config = self._config
        if url.startswith("data:"):
            return await asyncio.to_thread(self._read, partial(decode_data_url, url, config.bytes))
        from headrace.gateway.images.image_fetch import fetch_image  # slow to import

        data = await fetch_image(url, config)
        return await asyncio.to_thread(self._read, lambda: data)

    def _read(self, source: Any) -> MeasuredImage:
        data: bytes = source()
        try:
            grid = self._layout.grid(measure(data, self._config.pixels))
        except HeadraceError as error:
            raise _about_messages(error) from None
        return MeasuredImage(data, hashlib.sha256(data).digest(), grid)

    def template_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as the model's template takes them: with parts, or with the image's token in the text."""
        found: list[dict[str, Any]] = []
        for message in messages:
            plain = {name: value for name, value in message.items() if name != "images"}
            if self._takes_parts and not message.get("tool_calls"):
                plain["content"] = template_parts(message)
            elif message.get("images"):
                raise invalid_request(f"The chat template of '{self._name}' has no place for images.", "messages")
            found.append(plain)
        return found

    def framed(self, text: str) -> str:
        """Return a rendered chat with the texts around its images. A mark in a user's text is none."""
        before, after = self._layout.frame(self._texts)
        if not before and not after:
            return text
        mark = self._texts.mark
        framed = f"{before}{mark}{after}"
        if not isinstance(text, UserText):
            return text.replace(mark, framed)
        spans, at, start = text.spans, 0, 0
        pieces: list[str] = []
        for place, piece in enumerate(text.split(mark)):
            if place:
                end = start + len(mark)
                while at < len(spans) and spans[at][1] <= start:
                    at += 1
                is_forged = at < len(spans) and spans[at][0] < end
                pieces.append(UserText(mark) if is_forged else framed)
                start = end
            pieces.append(piece)
            start += len(piece)
        return join("", pieces)

    def placed(
        self, tokens: Sequence[int], images: Sequence[MeasuredImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the tokens with each image's own in place of its mark, and where they are."""
        mark, shown = self._tower.mark_token, self._tower.image_token
        if tokens.count(mark) != len(images):
            raise invalid_request(
                f"The chat template of '{self._name}' has places for {tokens.count(mark)} of {len(images)} images in "
                "these messages. Put images into messages of the role user.",
                "messages",
            )
        found: list[int] = []
        placed: list[PromptImage] = []
        rest = iter(images)
        for token in tokens:
            if token != mark:
                found.append(token)
                continue
            image = next(rest)
            own = self.tokenizer.encode(self._layout.text(image.grid, self._texts), False)
            marks = [len(found) + place for place, each in enumerate(own) if each == shown]
            size = image.grid.tile_tokens
            if len(marks) != image.grid.tokens:
                raise invalid_request(f"The tokenizer of '{self._name}' does not know the image token.", "messages")
            placed.append(PromptImage(image, tuple(marks[::size])))
            found += own
        return tuple(found), tuple(placed)

    def tokens_of(self, image: MeasuredImage) -> int:
        """Return how many tokens take an image's place, about: those around its runs are counted as three each."""
        return image.grid.runs * (image.grid.tile_tokens + 3)

    # Generate

    async def rows(self, tenant: str, images: Sequence[PromptImage]) -> tuple[ImageRows, ...]:
        """Return the images' features, from the cache or encoded now. ApiError if one cannot be decoded, or if too
        many wait."""
        needed = sum(each.tokens for each in images) * self._tower.width * 4
        if needed > _MOST_BYTES:
            raise invalid_request(
                f"The images' features take {needed} bytes. Expected at most {_MOST_BYTES}. Send fewer or "
                "smaller ones.",
                "messages",
            )
        tiles = await asyncio.gather(*(self._features(tenant, each.image) for each in images))
        # Another image part has other features, also for KV that outlives the server.
        encoder = self._encoder.digest
        return tuple(
            ImageRows(
                start,
                each.tile_tokens,
                hashlib.sha256(each.image.digest + bytes([place & 255, place >> 8]) + encoder).digest(),
                data,
                each.image.grid.places,
            )
            for each, found in zip(images, tiles, strict=True)
            for place, (start, data) in enumerate(zip(each.starts, found, strict=True))
        )

    async def _features(self, tenant: str, image: MeasuredImage) -> Tiles:
        key = FeatureKey(tenant, image.digest)
        found = self._cache.find(key)
        if found is not None:
            return found
        if key not in self._queue and len(self._queue) >= self._config.queued:
            raise ApiError(
                f"{len(self._queue)} images wait to be encoded. Try again later.",
                kind="overloaded_error",
                code="overloaded",
                retry_after=1.0,
            )
        try:
            return await self._queue.encoded(key, partial(self._encoded, key, image))
        except HeadraceError as error:
            raise _about_messages(error) from None

    async def _encoded(self, key: FeatureKey, image: MeasuredImage, is_abandoned: Callable[[], bool]) -> Tiles:
        began = time.monotonic()
        read = partial(read_tiles, image.data, self._layout, self._config.pixels)
        features = await asyncio.wrap_future(self._encoder.submit(read, image.grid, is_abandoned))
        metrics.image_seconds.labels(self._name).observe(time.monotonic() - began)
        tiles = tuple(np.ascontiguousarray(tile, dtype="<f4").tobytes() for tile in features)
        self._cache.keep(key, tiles)
        return tiles


def image_texts(tower: TowerSpec, tokenizer: Tokenizer) -> ImageTexts:
    """Return the texts of the tokens around an image."""

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.decode([token], skip_special_tokens=False)

    return ImageTexts(text(tower.image_token), text(tower.mark_token), text(tower.end_token))


def encoder_threads(config: ImagesConfig) -> int:
    return max(1, usable_cores() // 4) if config.threads is None else config.threads


def _about_messages(error: HeadraceError) -> ApiError:
    found = as_api_error(error)
    found.parameter = "messages"
    return found
