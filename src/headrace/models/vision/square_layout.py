"""SquareLayout: images of Gemma 3. Whatever its shape, an image is scaled to one square tile."""

from __future__ import annotations

from headrace.models.config_json import ConfigJson
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.vision.image_layout import MAX_EDGE, ImageGrid, ImageLayout, ImageTexts, Size, pixel_values

# Of pan and scan, which is off.
IGNORED = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")


class SquareLayout(ImageLayout, frozen=True, kw_only=True):
    side: int  # pixels
    tile_tokens: int

    def grid(self, size: Size) -> ImageGrid:
        square = Size(self.side, self.side)
        return ImageGrid(square, square, 0, 0, self.tile_tokens)

    def text(self, grid: ImageGrid, texts: ImageTexts) -> str:
        return texts.mark + texts.image * grid.tile_tokens

    def frame(self, texts: ImageTexts) -> tuple[str, str]:
        return "\n\n", f"{texts.end}\n\n"


def read_square(config: ConfigJson, tower: TowerSpec) -> SquareLayout:
    config.refuse("do_pan_and_scan", "Headrace shows the model each image as a whole", unless=(None, False))
    if config.has("size"):
        size = config.sub("size")
        for key in ("height", "width"):
            side = size.size(key, maximum=MAX_EDGE)
            if side != tower.image_size:
                raise config.error("size", f"Expected squares of image_size ({tower.image_size}), found {side}.")
    elif tower.image_size != 224:
        raise config.error("size", f"Expected a height and width of image_size ({tower.image_size}), found none.")
    return SquareLayout(side=tower.image_size, tile_tokens=tower.tile_tokens, **pixel_values(config, resample=2))
