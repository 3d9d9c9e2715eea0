"""LineLayout: images of Pixtral. An image keeps its shape; its tokens stand in rows, with a token after each row."""

from __future__ import annotations

import math

from msgspec.structs import replace

from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.formats.json_file import read_json
from headrace.models.vision.clip_layout import CLIP_MEAN, CLIP_STD
from headrace.models.vision.image_layout import MAX_EDGE, ImageGrid, ImageLayout, ImageTexts, Size, pixel_values

_MOST: int = 1024  # pixels of the longest edge, if the file does not say


class LineLayout(ImageLayout, frozen=True, kw_only=True):
    longest_edge: int  # pixels
    square: int  # pixels of the side of a square that becomes a token
    line_end: str
    image_end: str

    def grid(self, size: Size) -> ImageGrid:
        height, width = size
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = max(math.floor(height / ratio), 1), max(math.floor(width / ratio), 1)
        rows, columns = ((each - 1) // self.square + 1 for each in (height, width))
        scaled = Size(rows * self.square, columns * self.square)
        return ImageGrid(scaled, scaled, 0, 0, columns, line_runs=rows)

    @property
    def most_pixels(self) -> int:
        return (-(-self.longest_edge // self.square) * self.square) ** 2

    def within(self, pixels: int) -> LineLayout:
        edge = max(math.isqrt(pixels) // self.square, 1) * self.square
        return replace(self, longest_edge=min(self.longest_edge, edge))

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        line = texts.image * grid.tile_tokens
        return self.line_end.join([line] * grid.runs) + self.image_end


def read_lines(config: ConfigJson, tower: TowerSpec) -> LineLayout:
    longest = _MOST
    if config.has("size"):
        size = config.sub("size")
        if size.has("longest_edge"):
            longest = size.size("longest_edge", maximum=MAX_EDGE)
        else:
            longest = size.size("height", maximum=MAX_EDGE)
            size.refuse("width", "images must fit into a square", unless=(longest,))
    if config.has("patch_size"):
        expected = (tower.patch_size, tower.patch_size * tower.scale)
        if isinstance(config.values()["patch_size"], dict):
            for side in ("height", "width"):
                config.sub("patch_size").refuse(side, f"config.json says {tower.patch_size}", unless=expected)
        else:
            config.refuse("patch_size", f"config.json says {tower.patch_size}", unless=expected)
    path = config.folder / "processor_config.json"
    texts = ConfigJson(read_json(path), path=path) if path.exists() else ConfigJson({}, path=path)
    texts.refuse("spatial_merge_size", f"config.json says {tower.scale}", unless=(None, tower.scale))
    return LineLayout(
        longest_edge=longest,
        square=tower.patch_size * tower.scale,
        line_end=texts.text("image_break_token", default="[IMG_BREAK]"),
        image_end=texts.text("image_end_token", default="[IMG_END]"),
        **pixel_values(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
    )
