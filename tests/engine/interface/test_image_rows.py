"""Images in a request: what does not fit the prompt or the model is rejected."""

from __future__ import annotations

import pytest

from headrace.engine.interface.image_rows import ImageRows, check_images
from headrace.errors import RequestError

HIDDEN = 4


def image(start: int = 2, count: int = 6, grid: tuple[int, int] | None = None) -> ImageRows:
    return ImageRows(start, count, b"digest", bytes(4 * HIDDEN * count), grid)


@pytest.mark.parametrize("grid", [None, (2, 3), (6, 1), (1, 6)])
def test_images_that_fit_are_accepted(grid: tuple[int, int] | None) -> None:
    check_images([image(grid=grid), image(start=8)], 14, HIDDEN)


@pytest.mark.parametrize("grid", [(-2, -3), (0, 6), (6, 0), (2, 4), (-1, 6)])
def test_a_grid_has_as_many_places_as_tokens(grid: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="An image of 6 tokens has another grid"):
        check_images([image(grid=grid)], 14, HIDDEN)


@pytest.mark.parametrize("images", [[image(start=9)], [image(), image(start=7)], [image(count=0)], [image(start=-1)]])
def test_images_are_inside_the_prompt_and_apart(images: list[ImageRows]) -> None:
    with pytest.raises(RequestError, match="outside the prompt or overlap"):
        check_images(images, 14, HIDDEN)
