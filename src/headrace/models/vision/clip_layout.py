"""ClipLayout: images of LLaVA. An image is scaled to one square tile, and cropped, or laid out in the best of several
tilings beside a tile of the whole (LLaVA-NeXT).
"""

from __future__ import annotations

import math
from typing import Final

from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.vision.image_layout import MAX_EDGE, ImageGrid, ImageLayout, ImageTexts, Size, pixel_values

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_FARTHEST: Final = 100  # times that an image may be longer than wide: it is scaled by its shorter side


class ClipLayout(ImageLayout, frozen=True, kw_only=True):
    tile: int  # pixels of a tile's side
    side: int  # patches of a tile's side
    tile_tokens: int
    tilings: tuple[tuple[int, int], ...]  # heights and widths in pixels; empty: an image is one tile

    def grid(self, size: Size) -> ImageGrid:
        if self.tilings:
            return self._tiled(size)
        if max(size) > _FARTHEST * min(size):
            raise RequestError(
                f"The image has {size.width} x {size.height} pixels. Expected a side at most {_FARTHEST} times as long "
                "as the other.",
                parameter="images",
            )
        longer = int(self.tile * max(size) / min(size))
        scaled = Size(longer, self.tile) if size.width <= size.height else Size(self.tile, longer)
        return ImageGrid(scaled, scaled, 0, 0, self.tile_tokens, canvas=Size(self.tile, self.tile))

    def _tiled(self, size: Size) -> ImageGrid:
        canvas = self._best(size)
        across, down = canvas.width / size.width, canvas.height / size.height
        if across < down:
            scaled = Size(min(math.ceil(size.height * across), canvas.height), canvas.width)
        else:
            scaled = Size(canvas.height, min(math.ceil(size.width * down), canvas.width))
        rows, columns = canvas.height // self.tile, canvas.width // self.tile
        kept = _unpadded(size, rows * self.side, columns * self.side)
        tokens = self.tile_tokens + kept[0] * (kept[1] + 1)
        return ImageGrid(scaled, scaled, rows, columns, tokens, canvas=canvas, whole_first=True, kept=kept, line_runs=1)

    def _best(self, size: Size) -> Size:
        """Return the tiling that keeps most pixels of an image, and among those the one with the least padding."""
        best, most, least = self.tilings[0], 0, math.inf
        for height, width in self.tilings:
            scale = min(width / size.width, height / size.height)
            pixels = min(int(size.width * scale) * int(size.height * scale), size.width * size.height)
            wasted = width * height - pixels
            if pixels > most or (pixels == most and wasted < least):
                best, most, least = (height, width), pixels, wasted
        return Size(*best)

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        return texts.image * grid.tile_tokens


def _unpadded(size: Size, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of patches that are not padding."""
    if size.width / size.height > columns / rows:
        padding = (rows - int(round(size.height * (columns / size.width), 7))) // 2
        return max(rows - 2 * padding, 0), columns
    padding = (columns - int(round(size.width * (rows / size.height), 7))) // 2
    return rows, max(columns - 2 * padding, 0)


def read_clip(config: ConfigJson, tower: TowerSpec) -> ClipLayout:
    kind = config.text("image_processor_type", default="CLIPImageProcessor")
    if not tower.tilings:
        config.refuse("do_center_crop", "Headrace crops images to a square", unless=(None, True))
        if kind.startswith("Llava"):
            config.refuse("do_pad", "Headrace crops images to a square instead", unless=(None, False))
    default = 224 if config.has("size") or config.has("crop_size") else tower.image_size
    sides = [("size", "shortest_edge"), ("crop_size", "height"), ("crop_size", "width")]
    for key, leaf in sides:
        # Old files have a number for all sides.
        plain = config.values().get(key)
        edge = plain if isinstance(plain, int) else _edge(config, key, leaf, default)
        if edge != tower.image_size:
            raise config.error(key, f"Expected {leaf} {tower.image_size}, the image_size of config.json, found {edge}.")
    pinpoints = config.values().get("image_grid_pinpoints")
    if pinpoints is not None and pinpoints != [list(each) for each in tower.tilings] and tower.tilings:
        raise config.error("image_grid_pinpoints", "Expected those of config.json.")
    config.has("image_grid_pinpoints")
    return ClipLayout(
        tile=tower.image_size,
        side=tower.side,
        tile_tokens=tower.tile_tokens,
        tilings=tower.tilings,
        **pixel_values(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
    )


def _edge(config: ConfigJson, key: str, leaf: str, default: int) -> int:
    if not config.has(key):
        return default
    sizes = config.sub(key)
    if leaf == "shortest_edge" and not sizes.has(leaf):
        return sizes.size("height", maximum=MAX_EDGE)
    return sizes.size(leaf, maximum=MAX_EDGE)
