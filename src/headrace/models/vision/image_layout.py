"""ImageLayout: how an image becomes tiles and tokens, from preprocessor_config.json. Arithmetic on sizes only.

An image is scaled to a longest edge, and where the model splits images, to whole tiles; a small copy of all of it comes
last. Each tile becomes the same number of tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.formats.json_file import read_json

_LARGEST: Final = 4096  # pixels of an edge, whatever the file says
_DEFAULT_TILE: Final = 364
# Keys that name the class or are read by other parts of transformers.
_OTHERS: Final = frozenset(
    """
    image_processor_type processor_class auto_map do_pad return_row_col_info data_format input_data_format device
    disable_grouping return_tensors do_center_crop crop_size pad_size default_to_square size_divisor
    """.split()
)
_FAKE: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"


class Size(NamedTuple):
    height: int
    width: int


class TileGrid(NamedTuple):
    """What becomes of an image: it is scaled to `size`, cut into rows and columns of tiles, and scaled to one tile."""

    resized: Size  # first, to the longest edge
    size: Size  # then, to whole tiles; equal to `resized` where the model does not split
    rows: int  # 0: the image is one tile
    columns: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + 1


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    splits: bool
    longest_edge: int  # pixels
    tile: int  # pixels of a tile's side
    tile_tokens: int
    resample: int  # Pillow's number of the filter
    factor: float  # multiplies pixel values
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def grid(self, size: Size) -> TileGrid:
        """Return the tiles of an image of this size."""
        resized = _below(_longest(size, self.longest_edge))
        if not self.splits:
            return TileGrid(resized, Size(self.tile, self.tile), 0, 0)
        whole = self._whole_tiles(resized)
        if whole.height <= self.tile and whole.width <= self.tile:
            return TileGrid(resized, whole, 0, 0)
        return TileGrid(resized, whole, whole.height // self.tile, whole.width // self.tile)

    def _whole_tiles(self, size: Size) -> Size:
        ratio = size.width / size.height
        if size.width >= size.height:
            width = math.ceil(size.width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(size.height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return Size(height, width)

    def text(self, grid: TileGrid, image: str) -> str:
        """Return the text that stands for an image in a prompt. `image`: the text of the image token."""
        tokens = image * self.tile_tokens
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


def read_layout(folder: Path, tower: TowerSpec) -> ImageLayout:
    """Read how the model's images are prepared. ModelError for a preparation that Headrace does not do exactly."""
    config = _preprocessor(folder)
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        config.refuse(key, "Headrace always does it", unless=(True, None))
    tile = _edge(config, "max_image_size", _DEFAULT_TILE)
    if tile != tower.image_size:
        raise config.error("max_image_size", f"Expected tiles of image_size ({tower.image_size}), found {tile}.")
    layout = ImageLayout(
        splits=config.flag("do_image_splitting", default=True),
        longest_edge=_edge(config, "size", 4 * _DEFAULT_TILE),
        tile=tile,
        tile_tokens=tower.tile_tokens,
        resample=config.size("resample", minimum=0, maximum=5, default=1),
        factor=config.positive("rescale_factor", maximum=1e3, default=1.0 / 255.0),
        mean=_three(config, "image_mean"),
        std=_three(config, "image_std"),
    )
    for prefix, key, value in config.unread():
        if not prefix and key not in _OTHERS and not key.startswith("_") and value not in (None, False, {}, [], ""):
            raise config.error(key, "Headrace does not know this key, and it may change what the model sees.")
    return layout


def _preprocessor(folder: Path) -> ConfigJson:
    path = folder / "preprocessor_config.json"
    if path.exists():
        return ConfigJson.read(path)
    path = folder / "processor_config.json"
    if path.exists():
        values = read_json(path).get("image_processor")
        if isinstance(values, dict):
            return ConfigJson(cast("dict[str, Any]", values), path=path, prefix="")
    raise ModelError(
        "The folder has no preprocessor_config.json, which says how images are prepared. Add it to the folder.",
        path=folder,
    )


def _edge(config: ConfigJson, key: str, default: int) -> int:
    if not config.has(key):
        return default
    return config.sub(key).size("longest_edge", maximum=1 << 16)


def _three(config: ConfigJson, key: str) -> tuple[float, float, float]:
    if not config.has(key):
        return (0.5, 0.5, 0.5)
    found = config.positives(key, 3)
    return (found[0], found[1], found[2])
