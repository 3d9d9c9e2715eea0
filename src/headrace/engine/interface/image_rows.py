"""ImageRows: the features of an image in a request, and what the prefix cache knows their tokens by.

Also where image tokens are for ropes and masks. Encoding an image is not done here: features come ready from the
gateway. Does not know blocks or pixels.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.errors import RequestError

_POSITIVE: Final = 2**63 - 1


class AbandonedError(Exception):
    """No client waits for the image any more, so the rest of its tiles are not encoded."""


class ImageRows(msgspec.Struct, frozen=True, weakref=True):
    """Features of an image, or of a part of one, that take the place of prompt tokens' embeddings.

    In a model whose ropes turn by places, `grid` lays the tokens out in rows and columns.
    """

    start: int  # first prompt token
    count: int  # of tokens
    digest: bytes  # of the image and the part: the same digest means the same features
    data: bytes  # f32, little-endian, [count, feature size]
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, which are then their places

    @property
    def end(self) -> int:
        return self.start + self.count


def image_token_ids(digest: bytes, count: int) -> list[int]:
    """Return negative numbers that stand for an image's tokens. Each holds 63 other bits of the digest, so different
    images share no KV, and the same image does."""
    bits = array("q", hashlib.shake_256(digest).digest(8 * count))
    return [-1 - (each & _POSITIVE) for each in bits]


def check_images(images: Sequence[ImageRows], prompt_tokens: int, feature_size: int) -> None:
    """Raise RequestError for images that do not fit the prompt or the model."""
    end = 0
    for image in images:
        if image.count < 1 or image.start < end or image.start + image.count > prompt_tokens:
            raise RequestError("The tokens of an image are outside the prompt or overlap.", parameter="images")
        end = image.start + image.count
        grid = image.grid
        if grid is not None and (min(grid) < 1 or grid[0] * grid[1] != image.count):
            raise RequestError(f"An image of {image.count} tokens has another grid: {image.grid}.", parameter="images")
        if len(image.data) != image.count * feature_size * 4:
            raise RequestError(
                f"An image of {image.count} tokens has {len(image.data)} bytes of features. Expected "
                f"{image.count * feature_size * 4}.",
                parameter="images",
            )


def whole_image_cut(images: Sequence[ImageRows], computed: int, end: int) -> tuple[int, int]:
    """Return the last place at or before `end`, and the first one at or after it, where a chunk of a prompt may end
    without cutting an image apart."""
    for image in images:
        if image.start < end < image.end:
            return max(image.start, computed), image.end
    return end, end
