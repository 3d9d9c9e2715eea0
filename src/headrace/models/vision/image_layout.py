"""ImageLayout: how an image becomes tiles and tokens, from preprocessor_config.json. Arithmetic on sizes only.

The layouts of the models are in modules of their own. Knows no pixels.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.formats.json_file import read_json

MAX_EDGE: Final = 1 << 16  # pixels
# Keys that name the class or are read by other parts of transformers.
_OTHERS: Final = frozenset(
    """
    image_processor_type processor_class auto_map do_pad return_row_col_info data_format input_data_format device
    disable_grouping return_tensors do_center_crop crop_size pad_size default_to_square size_divisor
    """.split()
)


class Size(NamedTuple):
    height: int
    width: int


class ImageGrid(NamedTuple):
    """What becomes of an image: it is scaled to `size`, cut into rows and columns of tiles, and scaled to one tile.

    Its tokens are in runs, other tokens between them: one run of `tile_tokens` for each tile, unless `runs` says how
    many there are.
    """

    resized: Size  # first, to the longest edge
    size: Size  # then, to whole tiles; equal to `resized` where the model does not split
    rows: int  # 0: the image is one tile
    columns: int
    tile_tokens: int
    places: tuple[int, int] | None = None  # rows and columns of a tile's tokens, if ropes turn by them
    canvas: Size | None = None  # the scaled image lies in the middle of this, padded with black or cropped
    whole_first: bool = False  # the tile of the whole comes first and is scaled from the file's own pixels
    kept: tuple[int, int] | None = None  # rows and columns of patches of the scaled image that are no padding
    line_runs: int = 0  # runs of tokens, if there are others than one for each tile

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + 1

    @property
    def runs(self) -> int:
        return self.line_runs or self.tiles

    @property
    def tokens(self) -> int:
        return self.runs * self.tile_tokens


class ImageTexts(NamedTuple):
    """Texts of tokens around an image."""

    image: str  # what features take the place of
    mark: str  # what the template writes
    end: str  # comes after an image; empty: the template writes it


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    resample: int  # Pillow's number of the filter
    factor: float  # multiplies pixel values
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def grid(self, size: Size) -> ImageGrid:
        """Return the tiles of an image of this size. RequestError for one that the model cannot take."""
        raise NotImplementedError

    @property
    def most_pixels(self) -> int:
        """The pixels of the largest image that the tower computes; 0 where tiles have one size."""
        return 0

    def within(self, pixels: int) -> ImageLayout:
        """Return a layout that scales larger images down to so many pixels, where the tower computes a whole image."""
        return self

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        """Return the text whose tokens take the mark's place in a prompt."""
        raise NotImplementedError

    def frame(self, texts: ImageTexts) -> tuple[str, str]:
        """Return the texts that come before and after the mark. They are tokenised with the rest of the prompt."""
        return "", texts.end


def read_preprocessor(folder: Path) -> ConfigJson:
    """Return how the model's images are prepared."""
    path = folder / "preprocessor_config.json"
    config: ConfigJson | None = None
    if path.exists():
        config = ConfigJson.read(path)
    elif (path := folder / "processor_config.json").exists():
        values = read_json(path).get("image_processor")
        if isinstance(values, dict):
            config = ConfigJson(cast("dict[str, Any]", values), path=path, prefix="")
    if config is None:
        raise ModelError(
            "The folder has no preprocessor_config.json, which says how images are prepared. Add it to the folder.",
            path=folder,
        )
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        config.refuse(key, "Headrace always does it", unless=(True, None))
    return config


def pixel_values(
    config: ConfigJson, *, resample: int, mean: tuple[float, ...] = (0.5,) * 3, std: tuple[float, ...] = (0.5,) * 3
) -> dict[str, Any]:
    """Return the fields of a layout that say how pixels become numbers; the arguments are defaults."""
    return {
        "resample": config.size("resample", minimum=0, maximum=5, default=resample),
        "factor": config.positive("rescale_factor", maximum=1e3, default=1.0 / 255.0),
        "mean": tuple(config.positives("image_mean", 3)) if config.has("image_mean") else mean,
        "std": tuple(config.positives("image_std", 3)) if config.has("image_std") else std,
    }


def check_preprocessor(config: ConfigJson, ignored: Collection[str] = ()) -> None:
    """Raise ModelError for a key that was not read and may change what the model sees."""
    for prefix, key, value in config.unread():
        known = key in _OTHERS or key in ignored or key.startswith("_")
        if not prefix and not known and value not in (None, False, {}, [], ""):
            raise config.error(key, "Headrace does not know this key, and it may change what the model sees.")
