"""PatchLayout: images of Qwen-VL. An image keeps about its size and shape, in whole squares of patches."""

from __future__ import annotations

import math
from typing import Final

from msgspec.structs import replace

from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.vision.image_layout import ImageGrid, ImageLayout, ImageTexts, Size, pixel_values

IGNORED = ("min_pixels", "max_pixels", "size")
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)  # of CLIP
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_LEAST: Final = 56 * 56  # pixels
_MOST: Final = 28 * 28 * 1280
_PIXELS: Final = 1 << 26  # the largest bound of pixels that is read
_FARTHEST: Final = 200  # times that an image may be longer than wide


class PatchLayout(ImageLayout, frozen=True, kw_only=True):
    least: int  # pixels of an image
    most: int
    square: int  # pixels of the side of a square that becomes a token

    def grid(self, size: Size) -> ImageGrid:
        if max(size) > _FARTHEST * min(size):
            raise RequestError(
                f"The image has {size.width} x {size.height} pixels. Expected a side at most {_FARTHEST} times as long "
                "as the other.",
                parameter="images",
            )
        scaled = self._scaled(size)
        rows, columns = scaled.height // self.square, scaled.width // self.square
        return ImageGrid(scaled, scaled, 0, 0, rows * columns, (rows, columns))

    def _scaled(self, size: Size) -> Size:
        square = self.square
        height, width = (round(each / square) * square for each in size)
        if height * width > self.most:
            shrink = math.sqrt(size.height * size.width / self.most)
            height, width = (max(square, math.floor(each / shrink / square) * square) for each in size)
        elif height * width < self.least:
            grow = math.sqrt(self.least / (size.height * size.width))
            height, width = (math.ceil(each * grow / square) * square for each in size)
        if height * width > self.most:  # the short side is one square, so the long one must give way
            longest = max(square, self.most // square // square * square)
            height, width = min(height, longest), min(width, longest)
        return Size(height, width)

    @property
    def most_pixels(self) -> int:
        return self.most

    def within(self, pixels: int) -> PatchLayout:
        if pixels >= self.most:
            return self
        most = max(pixels, self.square**2)
        return replace(self, most=most, least=min(self.least, most // 4))  # growing rounds both sides up

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        return texts.image * grid.tile_tokens


def read_patches(config: ConfigJson, tower: TowerSpec) -> PatchLayout:
    least, most = _LEAST, _MOST
    if config.has("size"):
        size = config.sub("size")
        # Some files have other keys there, and the bounds beside it.
        least = size.size(
            "shortest_edge", maximum=_PIXELS, default=size.size("min_pixels", maximum=_PIXELS, default=least)
        )
        most = size.size(
            "longest_edge", maximum=_PIXELS, default=size.size("max_pixels", maximum=_PIXELS, default=most)
        )
    least = config.optional_size("min_pixels", maximum=_PIXELS, default=least) or least
    most = config.optional_size("max_pixels", maximum=_PIXELS, default=most) or most
    for key, expected in (("patch_size", tower.patch_size), ("merge_size", tower.scale), ("temporal_patch_size", 2)):
        config.refuse(key, f"config.json says {expected}", unless=(None, expected))
    square = tower.patch_size * tower.scale
    if least > most or most < square * square:
        raise config.error("max_pixels", f"Expected at least min_pixels ({least}) and a square of {square} pixels.")
    return PatchLayout(least=least, most=most, square=square, **pixel_values(config, resample=3, mean=_MEAN, std=_STD))
