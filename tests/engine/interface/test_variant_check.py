"""A variant's options: what no model could serve is refused, and surfaces reach the scheduler's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.engine.interface.variant_check import check_variant
from headrace.errors import RequestError
from headrace.surfaces import SURFACES, Surface, SurfaceOptions, surfaces_with
from headrace.variant import Variant
from tests.support.tiny_engine import open_tiny


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"weights": "int5"}, "weights"),
        ({"kv": "f8"}, "kv"),
        ({"keep": ["x"]}, "keep"),
        ({"group": 64}, "group"),
        ({"speculation": "magic"}, "speculation"),
        ({"speculation": "model"}, "draft_model"),
        ({"draft_model": "draft"}, "draft_model"),
        ({"draft_weights": "int5"}, "draft_weights"),
        ({"image_weights": "int4"}, "image_weights"),
        ({"image_patches": 0}, "image_patches"),
        ({"speculation": "self"}, "skip_layers"),
        ({"skip_layers": [1]}, "skip_layers"),
        ({"speculation": "heads"}, "draft_heads"),
        ({"draft_heads": "heads"}, "draft_heads"),
        ({"threads": 0}, "threads"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_sequences": 5000}, "max_sequences"),
        ({"surfaces": {"phone": {}}}, "surfaces"),
    ],
)
def test_what_cannot_be_served_names_its_option(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_variant(Variant.of("mini", **options))
    assert raised.value.parameter == parameter


@pytest.mark.parametrize("given", [{"ttft": 0}, {"weight": 1001}, {"itl": "soon"}, {"stretch": 2}])
def test_numbers_of_a_surface_have_bounds(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Variant.of("mini", surfaces={"chat": given})


def test_what_differs_of_a_surface_leaves_the_rest() -> None:
    surfaces = surfaces_with({"voice": SurfaceOptions(ttft=0.25, patience=1.0)})
    assert surfaces["voice"] == Surface(ttft=0.25, itl=0.06, stretch=1.5, weight=2.0, patience=1.0)
    assert {name: surface for name, surface in surfaces.items() if name != "voice"} == {
        name: surface for name, surface in SURFACES.items() if name != "voice"
    }


def test_surfaces_cross_to_the_worker_and_are_no_part_of_the_name() -> None:
    variant = Variant.of("mini", surfaces={"chat": SurfaceOptions(itl=0.2)})
    assert msgspec.json.decode(msgspec.json.encode(variant), type=Variant) == variant
    assert variant.name == Variant.of("mini").name


def test_the_scheduler_goes_by_the_variants_surfaces(tiny_folder: Path) -> None:
    opened = open_tiny(tiny_folder, surfaces={"chat": {"ttft": 0.5, "weight": 4}})
    chat = opened.engine.scheduler.policy.surfaces["chat"]
    assert (chat.ttft, chat.weight, chat.itl) == (0.5, 4.0, SURFACES["chat"].itl)
