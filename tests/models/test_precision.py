"""Parsing of precisions, and the plan that assigns one to every tensor."""

from __future__ import annotations

import pytest

from headrace.errors import RequestError
from headrace.models.precision import Precision, parse_kv_type, parse_plan, parse_precision


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", Precision("f32")),
        ("bf16", Precision("bf16")),
        ("fp8", Precision("fp8")),
        ("fp8-g128", Precision("fp8", 128)),
        ("fp8-channel", Precision("fp8")),
        ("int8", Precision("int8", 128, rotated=True)),
        ("int4", Precision("int4", 32, rotated=True)),
        ("int4-g128", Precision("int4", 128, rotated=True)),
        ("int3", Precision("int3", 32, rotated=True)),
        ("int2-g64-a16", Precision("int2", 64, float_rows=True, rotated=True)),
        ("int8-channel", Precision("int8", 0, rotated=True)),
        ("int8-plain", Precision("int8", 128)),
        ("int4-g64-plain", Precision("int4", 64)),
        ("int8-a16", Precision("int8", 128, float_rows=True, rotated=True)),
        ("int4-g64-a16-plain", Precision("int4", 64, float_rows=True)),
    ],
)
def test_a_precision_is_read_from_its_spelling(text: str, expected: Precision) -> None:
    assert parse_precision(text) == expected


@pytest.mark.parametrize(
    "name",
    [
        "f32",
        "bf16",
        "fp8",
        "fp8-g32",
        "int8-g64",
        "int4-g32",
        "int4-channel",
        "int8-g128-a16",
        "int4-g32-a16-plain",
        "int3-g32",
        "int2-g64",
    ],
)
def test_a_precision_is_spelled_as_it_is_read(name: str) -> None:
    assert parse_precision(name).name == name


@pytest.mark.parametrize(
    "text",
    [
        "int5",
        "",
        "int4-g48",
        "int4-",
        "bf16-g32",
        "INT4",
        "int4-g-32",
        "int4-g٣٢",
        "bf16-a16",
        "fp8-a16",
        "fp8-plain",
        "fp8e5m2",
        "int8-plain-a16",
        "-a16",
    ],
)
def test_a_misspelt_precision_is_rejected_with_the_valid_ones(text: str) -> None:
    with pytest.raises(RequestError):
        parse_precision(text)


def test_bits_count_the_share_of_the_scale() -> None:
    assert parse_precision("int4-g32").bits == 4.375  # 8 bits of 32 for a multiple, 16 of 128 for a scale
    assert parse_precision("int4-g64").bits == 4.25
    assert parse_precision("int3").bits == 3.375
    assert parse_precision("int2-g128").bits == 2.125
    assert parse_precision("int8-channel").bits == 8
    assert parse_precision("bf16").bits == 16
    assert parse_precision("fp8").bits == 8
    assert parse_precision("fp8-g128").bits == 8.25
    assert Precision("int4", 32, stored=True, offsets=True).bits == 5


def test_the_group_flag_does_not_override_a_spelled_group() -> None:
    assert parse_plan("int4", group="128").default == Precision("int4", 128, rotated=True)
    assert parse_plan("int4-g64", group="128").default == Precision("int4", 64, rotated=True)
    assert parse_plan("int4", group="channel").default == Precision("int4", 0, rotated=True)


@pytest.mark.parametrize(("weights", "group"), [("bf16", "64"), ("int4", "48"), ("int8", 0)])
def test_a_group_that_cannot_be_is_refused(weights: str, group: str | int) -> None:
    with pytest.raises(RequestError) as caught:
        parse_plan(weights, group=group)
    assert caught.value.parameter == "group"


def test_embedding_and_head_stay_at_eight_bits_by_default() -> None:
    plan = parse_plan("int4")
    assert plan.precision("embed").format == "int8"
    assert plan.precision("head").format == "int8"
    assert plan.precision("layers.0.attn.qkv").format == "int4"
    assert plan.precision("head").float_rows is False
    assert parse_plan("int4-a16").precision("head").float_rows
    assert parse_plan("int4", keep=["head=int4"]).precision("head").format == "int4"
    assert parse_plan("bf16").precision("head").format == "bf16"
    assert parse_plan("int3").precision("head") == parse_plan("int2").precision("embed") == plan.precision("head")


def test_the_last_pattern_that_matches_wins() -> None:
    plan = parse_plan("int4", keep=["layers.*=int8", "layers.*.attn.o=bf16", "layers.1.attn.o=f32"])
    assert plan.precision("layers.0.mlp.down").format == "int8"
    assert plan.precision("layers.0.attn.o").format == "bf16"
    assert plan.precision("layers.1.attn.o").format == "f32"


def test_a_tied_embedding_answers_to_both_names() -> None:
    plan = parse_plan("int4", keep={"head": "bf16"})
    assert plan.precision("embed", tied=True).format == "bf16"
    assert plan.precision("embed", tied=False).format == "int8"


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    plan = parse_plan("int4", keep=["layers.*.atn.o=bf16"])
    with pytest.raises(RequestError, match=r"atn\.o") as caught:
        plan.check_patterns(["layers.0.attn.o"])
    assert caught.value.parameter == "keep"


@pytest.mark.parametrize("entry", ["bf16", "=bf16", "layers.*", "head=int5"])
def test_a_wrong_keep_entry_is_refused(entry: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_plan("int4", keep=[entry])
    assert caught.value.parameter == "keep"


def test_kv_types_are_checked() -> None:
    assert [parse_kv_type(name) for name in ("int8", "fp8", "int4")] == ["int8", "fp8", "int4"]
    with pytest.raises(RequestError, match=r"int3.*f32, bf16, int8, fp8 or int4"):
        parse_kv_type("int3")


def test_an_embedders_int8_has_closer_scales() -> None:
    assert parse_plan("int8", embedder=True).default == Precision("int8", 32, rotated=True)
    assert parse_plan("int4", embedder=True).precision("embed") == Precision("int8", 32, rotated=True)
    assert parse_plan("int4").precision("embed") == Precision("int8", 128, rotated=True)
    assert parse_plan("int8", group=128, embedder=True).default == Precision("int8", 128, rotated=True)
    assert parse_plan("int8-g64", embedder=True).default == Precision("int8", 64, rotated=True)
    assert parse_plan("bf16", keep=["embed=int8"], embedder=True).precision("embed") == Precision(
        "int8", 32, rotated=True
    )
