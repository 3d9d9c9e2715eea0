"""Turns the bytes of an image into normalised tiles, as the model's own image processor does.

Needs Pillow (`pip install headrace[vision]`). Bounds come first: the header says how many pixels there are before any
is decoded. Does not know models.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, RequestError
from headrace.models.vision.image_layout import ImageLayout, Size

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION: Final = 0x0112  # the EXIF tag
_TURNED: Final = (5, 6, 7, 8)  # its values that exchange width and height


def require_pillow() -> None:
    """Raise HeadraceError if Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise HeadraceError(
            "Reading images needs Pillow, which is not installed. Install it with: pip install 'headrace[vision]'"
        )


def measure(data: bytes, max_pixels: int) -> Size:
    """Return an image's size as it is shown. RequestError for one that is malformed, too large or of another format."""
    with _opened(data, max_pixels) as image:
        return _shown_size(image)


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images: the bound is ours
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large("more pixels than Pillow opens", max_pixels) from None
    except Exception:  # Pillow raises many types for a malformed file
        raise RequestError(
            f"The image is malformed or of an unknown format. Send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
            parameter="images",
        ) from None
    if image.width * image.height > max_pixels:
        raise _too_large(f"{image.width} x {image.height} pixels", max_pixels)
    if not image.width or not image.height:
        raise RequestError("The image has no pixels.", parameter="images")
    return image


def _too_large(found: str, most: int) -> RequestError:
    return RequestError(
        f"The image has {found}. Expected at most {most} (images.pixels). Send a smaller one.", parameter="images"
    )


def _shown_size(image: Image.Image) -> Size:
    try:
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    except Exception:  # damaged metadata
        turned = False
    return Size(image.width, image.height) if turned else Size(image.height, image.width)


def read_tiles(data: bytes, layout: ImageLayout, max_pixels: int) -> NDArray[np.float32]:
    """Return an image's tiles, [tiles, channels, height, width]. RequestError for an image that cannot be decoded."""
    from PIL import Image, ImageOps

    with _opened(data, max_pixels) as image:
        grid = layout.grid(_shown_size(image))
        try:
            shown: Any = ImageOps.exif_transpose(image)
            pixels: Image.Image = shown.convert("RGB")
        except Exception:  # a truncated or damaged file
            raise RequestError("The image cannot be decoded: its file is damaged or cut.", parameter="images") from None
    filter = Image.Resampling(layout.resample)
    resized = _scaled(_scaled(pixels, grid.resized, filter), grid.size, filter)
    shown = np.asarray(resized) if grid.canvas is None else _centred(np.asarray(resized), grid.canvas)
    if not grid.rows:
        return normalised(shown[None], layout)
    height, width = shown.shape[0] // grid.rows, shown.shape[1] // grid.columns
    tiles = [
        shown[row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(grid.rows)
        for column in range(grid.columns)
    ]
    whole = np.asarray(_scaled(pixels if grid.whole_first else resized, Size(height, width), filter))
    return normalised(np.stack([whole, *tiles] if grid.whole_first else [*tiles, whole]), layout)


def _centred(pixels: NDArray[np.uint8], canvas: Size) -> NDArray[np.uint8]:
    """Return the pixels in the middle of a canvas: cropped where it is smaller, black around where it is larger."""
    found = np.zeros((*canvas, 3), dtype=np.uint8)
    inner: list[tuple[slice, slice]] = []
    for size, room in zip(pixels.shape[:2], canvas, strict=True):
        length = min(size, room)
        first, start = max((size - room) // 2, 0), max((room - size) // 2, 0)
        inner.append((slice(first, first + length), slice(start, start + length)))
    (rows, to_rows), (columns, to_columns) = inner
    found[to_rows, to_columns] = pixels[rows, columns]
    return found


def _scaled(image: Image.Image, size: Size, filter: Any) -> Image.Image:
    return image.resize((size.width, size.height), resample=filter)


def normalised(tiles: NDArray[np.uint8], layout: ImageLayout) -> NDArray[np.float32]:
    """Return pixel values as the model takes them, channels first."""
    values = (tiles.astype(np.float64) * layout.factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32) for each in (layout.mean, layout.std))
    return np.ascontiguousarray(((values - mean) / std).transpose(0, 3, 1, 2), dtype=np.float32)
