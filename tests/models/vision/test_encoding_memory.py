"""The memory of encoding an image: what the core takes is within the count, and the count is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import headrace._core as _core
from headrace.engine.executors.cpu_executor import choose_isa, memory_of
from headrace.engine.executors.patch_tower import PatchTower
from headrace.engine.executors.square_tower import EncoderSteps
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors
from headrace.models.vision.encoding_memory import encoding_bytes, most_patches
from headrace.models.vision.image_layout import ImageGrid, Size
from headrace.models.vision.image_part_digest import image_part_digest
from headrace.models.vision.patch_layout import PatchLayout
from headrace.models.vision.vision_folder import VisionFolder, image_bytes, open_vision, tower_bytes
from headrace.variant import Variant
from tests.models.vision.test_llava import write_llava
from tests.models.vision.test_qwen_vl import write_qwen

WRITERS: dict[str, Any] = {"pixtral": write_llava, "qwen2.5": write_qwen}


@pytest.fixture(scope="module", params=["pixtral", "qwen2.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param), request.param)


def _tower(vision: VisionFolder, weights: str) -> PatchTower:
    pool, plan = _core.Pool(1), vision.plan(weights)
    tensors = load_tensors(vision.folder, plan, pool, cache=None).tensors
    return PatchTower(vision, pool, tensors, choose_isa(None, None), plan.default)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
def test_what_a_step_takes_is_within_the_count(folder: Path, weights: str) -> None:
    vision = open_vision(folder)
    tower = _tower(vision, weights)
    taken: list[int] = []
    for rows in (512, 4096):
        steps: EncoderSteps = tower._steps(rows)  # pyright: ignore[reportPrivateUsage]
        assert steps.rows == rows
        taken.append(steps.bytes)
        assert taken[-1] < encoding_bytes(vision.tower, rows) + (1 << 20)  # what threads take for themselves
    grown = encoding_bytes(vision.tower, 4096) - encoding_bytes(vision.tower, 512)
    assert 0.5 * grown < taken[1] - taken[0] < grown


def test_one_steps_memory_is_kept_and_a_larger_one_replaces_it(folder: Path) -> None:
    tower = _tower(open_vision(folder), "f32")
    small = tower._steps(16)  # pyright: ignore[reportPrivateUsage]
    assert tower._kept is small  # pyright: ignore[reportPrivateUsage]
    large = tower._steps(8192)  # pyright: ignore[reportPrivateUsage]
    assert large.rows == 8192
    assert tower._kept is None  # pyright: ignore[reportPrivateUsage]


def test_the_largest_image_counts_in_the_memory_of_a_served_model(folder: Path) -> None:
    vision = open_vision(folder)
    sizes = [(side * 37, side * 23) for side in range(1, 60)]
    grids = [vision.layout.grid(Size(*each)) for each in sizes]
    most = most_patches(vision.tower, vision.layout)
    assert 0.5 * most < max(patches(vision, grid) for grid in grids) <= most
    assert most_patches(vision.tower, vision.within(16).layout) == 16

    def need(**options: Any) -> int:
        return memory_of(open_model(folder), Variant(model=str(folder), context=64, **options)).images

    assert need() == tower_bytes(folder) + encoding_bytes(vision.tower, most)
    assert need(image_patches=16) == image_bytes(folder, "auto", 16) < need()


@pytest.mark.parametrize("most", [64, 256, 1 << 30])
def test_larger_images_are_scaled_down_and_smaller_ones_stay(folder: Path, most: int) -> None:
    vision = open_vision(folder)
    bounded = vision.within(most)
    for side in (1, 8, 30, 100, 500, 2000):
        size = Size(side, 2 * side)
        found, published = bounded.layout.grid(size), vision.layout.grid(size)
        assert patches(vision, found) <= most
        # Pixtral's images fit into a square, so a long one may be scaled down further. Qwen's small ones are scaled up.
        if 64 < 2 * patches(vision, published) <= most:
            assert found == published
    changed = most < most_patches(vision.tower, vision.layout)
    assert (image_part_digest(bounded, vision.plan()) != image_part_digest(vision, vision.plan())) == changed


def test_a_bound_above_the_published_one_changes_no_small_image(tmp_path: Path) -> None:
    layout = open_vision(write_qwen(tmp_path, "qwen2.5")).layout
    assert isinstance(layout, PatchLayout)
    layout = replace(layout, least=layout.most // 2)
    assert layout.within(layout.most) == layout


def patches(vision: VisionFolder, grid: ImageGrid) -> int:
    return grid.size.height * grid.size.width // vision.tower.patch_size**2


def test_features_are_the_same_bits_in_a_kept_step_and_in_one_of_their_own(folder: Path) -> None:
    vision = open_vision(folder)
    grid = vision.layout.grid(Size(30, 30))
    tile = np.random.default_rng(1).random((3, *grid.size), dtype=np.float32)
    tower = _tower(vision, "f32")
    alone = tower.encode(tile)
    tower._steps(4096)  # pyright: ignore[reportPrivateUsage]
    assert np.array_equal(tower.encode(tile), alone)
