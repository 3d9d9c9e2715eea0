"""TiledLayout: images of Idefics3 and SmolVLM.

An image is scaled to a longest edge, and where the model splits images, to whole tiles; a small copy of all of it comes
last. Each tile becomes the same number of tokens.
"""

from __future__ import annotations

import math
from typing import Final

from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.vision.image_layout import MAX_EDGE, ImageGrid, ImageLayout, ImageTexts, Size, pixel_values

_LARGEST: Final = 4096  # pixels of an edge, whatever the file says
_DEFAULT_TILE: Final = 364
_FAKE: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"


class TiledLayout(ImageLayout, frozen=True, kw_only=True):
    splits: bool
    longest_edge: int  # pixels
    tile: int  # pixels of a tile's side
    tile_tokens: int

    def grid(self, size: Size) -> ImageGrid:
        resized = _below(_longest(size, self.longest_edge))
        tile = Size(self.tile, self.tile)
        if not self.splits:
            return ImageGrid(resized, tile, 0, 0, self.tile_tokens)
        whole = self._whole_tiles(resized)
        if whole.height <= self.tile and whole.width <= self.tile:
            return ImageGrid(resized, whole, 0, 0, self.tile_tokens)
        return ImageGrid(resized, whole, whole.height // self.tile, whole.width // self.tile, self.tile_tokens)

    def _whole_tiles(self, size: Size) -> Size:
        ratio = size.width / size.height
        if size.width >= size.height:
            width = math.ceil(size.width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(size.height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return Size(height, width)

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        tokens = texts.image * self.tile_tokens
        last = f"{_FAKE}{_WHOLE}{tokens}{_FAKE}"
        if not grid.rows:
            return last
        rows = [
            "".join(f"{_FAKE}<row_{row}_col_{column}>{tokens}" for column in range(1, grid.columns + 1)) + "\n"
            for row in range(1, grid.rows + 1)
        ]
        return "".join([*rows, "\n", last])


def _longest(size: Size, longest: int) -> Size:
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return Size(max(height + height % 2, 1), longest)
    width = int(longest * ratio)
    return Size(longest, max(width + width % 2, 1))


def _below(size: Size) -> Size:
    ratio = size.width / size.height
    if size.width >= size.height and size.width > _LARGEST:
        return Size(max(int(_LARGEST / ratio), 1), _LARGEST)
    if size.height > size.width and size.height > _LARGEST:
        return Size(_LARGEST, max(int(_LARGEST * ratio), 1))
    return size


def read_tiled(config: ConfigJson, tower: TowerSpec) -> TiledLayout:
    tile = _edge(config, "max_image_size", _DEFAULT_TILE)
    if tile != tower.image_size:
        raise config.error("max_image_size", f"Expected tiles of image_size ({tower.image_size}), found {tile}.")
    return TiledLayout(
        splits=config.flag("do_image_splitting", default=True),
        longest_edge=_edge(config, "size", 4 * _DEFAULT_TILE),
        tile=tile,
        tile_tokens=tower.tile_tokens,
        **pixel_values(config, resample=1),
    )


def _edge(config: ConfigJson, key: str, default: int) -> int:
    if not config.has(key):
        return default
    return config.sub(key).size("longest_edge", maximum=MAX_EDGE)
