"""Models, weights and KV memory that the core refuses, each with a reason."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

import headrace._core as _core
from headrace.engine.executors.cpu_executor import describe
from headrace.models.packing import aligned_bytes
from tests.core.tiny import ISAS, SPECS, CoreTensors, Tiny, packed, packed_model, same_bits, text
from tests.core.wrong_arrays import REFUSED, floats, frozen, off_by_one_byte

MODEL = SPECS["everything"]
POOL = _core.Pool(1)


def bound(description: dict[str, Any], tensors: CoreTensors | None = None, **changes: Any) -> _core.Model:
    facts: dict[str, Any] = {"pool": POOL, "max_rows": 8, "isa": ISAS[0]} | changes
    return _core.Model(description, dict(packed_model(MODEL)) if tensors is None else tensors, **facts)


@pytest.mark.parametrize("key", describe(MODEL))
def test_a_description_that_lacks_something_is_refused(key: str) -> None:
    description = describe(MODEL)
    del description[key]
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        bound(description)


@pytest.mark.parametrize("value", [None, "many", [1], {"a": 1}, object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("key", describe(MODEL))
def test_a_description_of_the_wrong_types_is_refused(key: str, value: object) -> None:
    if (key in {"ropes", "layers"} and value == []) or (key == "recurrent" and value is None):
        return
    with pytest.raises(REFUSED, match=f"{key}|unknown|lacks 'kind'"):
        bound(describe(MODEL) | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, number) for key in ("vocab", "hidden", "heads", "kv_heads", "head_size") for number in (0, -1, 2**62)),
        *((key, number) for key in ("inner", "expert_inner") for number in (-1, 2**40, 2**62, 10_000_000_000)),
        ("vocab", 76),
        ("hidden", 64),
        ("heads", 3),
        ("kv_heads", 3),
        ("head_size", 23),
        ("expert_inner", 64),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 5),
        ("top_k", 2**62),
        ("norm", "batch"),
        ("qk_norm", "tail"),
        ("activation", "tanh"),
        ("layers", []),
        ("layers", [{"window": 0, "rope": 1, "experts": 0}, {"window": 0, "rope": 0, "experts": 4}]),
        ("layers", [{"window": -1, "rope": 0, "experts": 0}, {"window": 0, "rope": 0, "experts": 4}]),
        ("layers", [{"window": 0, "rope": 0, "experts": 0}, {"window": 0, "rope": 0, "experts": 5}]),
        ("layers", [{"window": 0, "rope": 0, "experts": 0}, {"window": 0, "rope": 0}]),
        ("layers", [{"window": 0, "rope": 0, "experts": 0}, {"window": "0", "rope": 0, "experts": 4}]),
        ("layers", [{"window": 0, "rope": 0, "experts": 0}, None]),
        ("ropes", []),
        ("ropes", [None]),
        ("ropes", [{"inv_freq": [1.0], "long_inv_freq": [1.0], "scale": 1.0}]),
        ("ropes", [{"inv_freq": [1.0] * 13, "long_inv_freq": [1.0], "scale": 1.0, "long_scale": 1.0}]),
        ("ropes", [{"inv_freq": [1.0], "long_inv_freq": [1.0] * 13, "scale": 1.0, "long_scale": 1.0}]),
        ("ropes", [{"inv_freq": ["a"], "long_inv_freq": [1.0], "scale": 1.0, "long_scale": 1.0}]),
    ],
    ids=repr,
)
def test_a_description_that_does_not_fit_is_refused(key: str, value: object) -> None:
    if (key, value) == ("heads", 3):
        value = 5  # not a multiple of the two KV heads
    with pytest.raises(REFUSED):
        bound(describe(MODEL) | {key: value})


def test_a_model_all_of_experts_needs_no_dense_size_and_takes_no_wild_one() -> None:
    only = describe(SPECS["experts"])
    only["layers"] = only["layers"][:1]
    tensors = dict(packed_model(SPECS["experts"]))
    bound(only | {"inner": 0}, tensors)
    for inner in (-1, 2**40, 2**62):
        with pytest.raises(ValueError, match="inner"):
            bound(only | {"inner": inner}, tensors)
    dense = describe(SPECS["plain"])
    for inner in (-1, 2**40, 2**62):
        with pytest.raises(ValueError, match="inner"):
            bound(dense | {"expert_inner": inner}, dict(packed_model(SPECS["plain"])))


@pytest.mark.parametrize(
    "name",
    [name for name, tensor in packed_model(MODEL).items() if isinstance(tensor, _core.Packed) and name != "head"],
)
def test_a_missing_or_misshapen_product_is_refused_by_name(name: str) -> None:
    tensors = dict(packed_model(MODEL))
    whole = tensors.pop(name)
    assert isinstance(whole, _core.Packed)
    with pytest.raises(ValueError, match=re.escape(name)):
        bound(describe(MODEL), tensors)
    values = whole.unpack()
    shown = name.split(".experts.")[0].replace(".gate_up", "").replace(".down", "")
    for wrong in (values[1:], values[:, 1:], np.concatenate([values, values])):
        tensors[name] = packed(np.ascontiguousarray(wrong))
        with pytest.raises(ValueError, match=re.escape(shown)):
            bound(describe(MODEL), tensors)
    tensors[name] = values.reshape(-1)
    with pytest.raises(ValueError, match=re.escape(name)):
        bound(describe(MODEL), tensors)


@pytest.mark.parametrize(
    "name", [n for n, tensor in packed_model(MODEL).items() if not isinstance(tensor, _core.Packed)]
)
def test_a_vector_of_the_wrong_size_or_type_is_refused_by_name(name: str) -> None:
    good = packed_model(MODEL)[name]
    assert isinstance(good, np.ndarray)
    for wrong in (
        good[1:],
        np.tile(good, 2),
        good.astype(np.float64),
        good[None],
        np.tile(good, 2)[::2],
        packed(good[None]),
        None,
    ):
        with pytest.raises(REFUSED, match=re.escape(name)):
            bound(describe(MODEL), packed_model(MODEL) | {name: wrong})  # pyright: ignore[reportArgumentType]


def test_models_are_refused_in_sizes_and_on_machines_that_are_not_there() -> None:
    for max_rows in (0, -1, 65537, 2**40):
        with pytest.raises(REFUSED, match="max_rows"):
            bound(describe(MODEL), max_rows=max_rows)
    with pytest.raises(ValueError, match="instruction set 'sse9'"):
        bound(describe(MODEL), isa="sse9")
    for wrong in ({"pool": None}, {"max_rows": "8"}, {"isa": 3}):
        with pytest.raises(TypeError):
            bound(describe(MODEL), **wrong)


def test_a_model_keeps_its_weights_alive() -> None:
    tokens = text(20, MODEL)
    tensors = dict(packed_model.__wrapped__(MODEL))
    tiny = Tiny(MODEL, tensors=tensors)
    before = tiny.rows(tokens, (0, 1))
    tensors.clear()
    gc.collect()
    other = np.ones(1 << 20, np.float32)  # takes the memory that the weights would have given back
    assert same_bits(tiny.rows(tokens, (0, 1)), before)
    assert other.sum() == 1 << 20


def test_wrong_products_are_refused() -> None:
    weights = packed(floats(40, 20))
    good: dict[str, Any] = {
        "weights": weights,
        "rows": floats(3, 20),
        "out": floats(3, 40),
        "pool": POOL,
        "isa": ISAS[0],
    }
    _core.multiply(**good)
    for wrong in (
        {"rows": floats(3, 21)},
        {"rows": floats(4, 20)},
        {"rows": floats(60)},
        {"rows": floats(3, 20).astype(np.float64)},
        {"rows": floats(3, 40)[:, ::2]},
        {"rows": off_by_one_byte(floats(3, 20))},
        {"out": floats(3, 41)},
        {"out": floats(3, 40).astype(np.float64)},
        {"out": np.asfortranarray(floats(3, 40))},
        {"out": frozen(floats(3, 40))},
        {"out": off_by_one_byte(floats(3, 40))},
        {"weights": None},
        {"pool": None},
        {"isa": "none"},
    ):
        with pytest.raises(REFUSED):
            _core.multiply(**(good | wrong))


def test_wrong_packings_are_refused() -> None:
    source = floats(40, 70)
    out = aligned_bytes(_core.packed_bytes("int8", 40, 70, 64))
    good: dict[str, Any] = {
        "source": source,
        "source_type": "f32",
        "format": "int8",
        "group": 64,
        "out": out,
        "pool": POOL,
    }
    _core.pack(**good)
    unaligned = np.zeros(len(out) + 65, np.uint8)
    start = -unaligned.ctypes.data % 64 + 1
    for wrong in (
        {"source": source[0]},
        {"source": source[None]},
        {"source": source[:0]},
        {"source": source[:, :0]},
        {"source": source[:-10]},
        {"source": source.astype(np.float64)},
        {"source": np.asfortranarray(source)},
        {"source": off_by_one_byte(source)},
        {"source": source.tolist()},
        {"source_type": "bf16"},
        {"source_type": "f64"},
        {"format": "int5"},
        {"group": 48},
        {"group": -64},
        {"group": 2**40},
        {"group": 6.5},
        {"out": out[:-1]},
        {"out": unaligned[start : start + len(out)]},
        {"out": frozen(out)},
        {"out": out.view(np.int8)},
        {"out": np.zeros(2 * len(out), np.uint8)[::2]},
        {"pool": None},
        {"multiples": True},
    ):
        with pytest.raises(REFUSED):
            _core.pack(**(good | wrong))
    with pytest.raises(ValueError, match="does not hold f16"):
        _core.find_nonfinite(source, "f16", POOL)
    with pytest.raises(ValueError, match="does not hold f32"):
        _core.find_nonfinite(source.astype(np.float64), "f32", POOL)


def test_wrong_codes_are_refused() -> None:
    out = aligned_bytes(_core.packed_bytes("int4", 40, 70, 32, True))
    good: dict[str, Any] = {
        "codes": np.zeros((40, 70), np.uint8),
        "scales": floats(40, 3),
        "zeros": np.zeros((40, 3), np.int16),
        "format": "int4",
        "group": 32,
        "out": out,
    }
    _core.pack_codes(**good)
    for wrong in (
        {"codes": np.full((40, 70), 16, np.uint8)},
        {"codes": np.zeros((40, 70), np.int8)},
        {"codes": np.zeros((41, 70), np.uint8)},
        {"codes": np.zeros((40, 140), np.uint8)[:, ::2]},
        {"scales": floats(40, 2)},
        {"scales": floats(39, 3)},
        {"scales": floats(40, 3).astype(np.float16)},
        {"scales": np.full((40, 3), np.nan, np.float32)},
        {"scales": np.full((40, 3), np.inf, np.float32)},
        {"zeros": np.zeros((40, 2), np.int16)},
        {"zeros": np.zeros((40, 3), np.int32)},
        {"zeros": np.zeros((40, 6), np.int16)[:, ::2]},
        {"zeros": np.full((40, 3), 16, np.int16)},
        {"zeros": np.full((40, 3), -1, np.int16)},
        {"zeros": "none"},
        {"zeros": None},  # the size is another one then
        {"format": "bf16"},
        {"out": out[64:]},
        {"out": frozen(out)},
    ):
        with pytest.raises(REFUSED):
            _core.pack_codes(**(good | wrong))


def test_wrong_packed_data_is_refused() -> None:
    data = aligned_bytes(_core.packed_bytes("int8", 40, 70, 64))
    unaligned = np.zeros(len(data) + 65, np.uint8)
    start = -unaligned.ctypes.data % 64 + 1
    good: dict[str, Any] = {
        "format": "int8",
        "outputs": 40,
        "inputs": 70,
        "group": 64,
        "gain": 1.0,
        "data": data,
    }
    _core.Packed(**good)
    for wrong in (
        {"format": "int5"},
        {"outputs": 65},
        {"outputs": 0},
        {"outputs": 2**40},
        {"inputs": 200},
        {"inputs": -1},
        {"group": 33},
        {"gain": "one"},
        {"gain": float("nan")},
        {"gain": float("inf")},
        {"data": data[:-1]},
        {"data": data.view(np.int8)},
        {"data": unaligned[start : start + len(data)]},
        {"data": None},
        {"asymmetric": True},
        {"multiples": True},
    ):
        with pytest.raises(REFUSED):
            _core.Packed(**(good | wrong))


def test_wrong_kv_memory_is_refused() -> None:
    good = (1, 8, 8)
    for shapes, blocks in (
        ([], 1),
        ([(0, 8, 8)], 1),
        ([(1, 0, 8)], 1),
        ([(1, 8, 0)], 1),
        ([(1, 8, -1)], 1),
        ([good], 0),
        ([good], -1),
        ([good, (1, 1025, 8)], 1),
        ([good, (1, 8, 1025)], 1),
        ([good, (5000, 8, 8)], 1),
        ([good] * 5000, 1),
    ):
        with pytest.raises(ValueError, match="KV"):
            _core.Kv(shapes, blocks, "f32")
    with pytest.raises(ValueError, match="out of range"):
        _core.Kv([(8, 128, 128)] * 80, 2**50, "f32")
    for shapes in ([(1, 8)], [(1, 8, 2**70)], [(1, 8, 8.5)], [None], 3, None):
        with pytest.raises(TypeError):
            _core.Kv(shapes, 1, "f32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown KV type"):
        _core.Kv([good], 1, "f16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown KV type"):
        _core.Kv.block_bytes([good], "")  # pyright: ignore[reportArgumentType]
    kv = _core.Kv([(3, 20, 20)] * 2, 4, "int8")
    for source, target in ((0, 4), (4, 0), (-1, 0), (0, -1), (2**40, 0)):
        with pytest.raises(ValueError, match="no such block"):
            kv.copy_block(source, target)
    with pytest.raises(TypeError):
        kv.copy_block(2**70, 0)


def test_kv_memory_is_as_large_as_its_layout_says() -> None:
    shapes = [(2, 20, 20)] * 3
    assert _core.Kv.block_bytes(shapes, "f32") == 3 * 2 * 16 * 2 * 32 * 4
    assert _core.Kv.block_bytes(shapes, "bf16") == 3 * 2 * 16 * 2 * 32 * 2
    assert _core.Kv.block_bytes(shapes, "int8") == 3 * 2 * (16 * 2 * 32 + 16 * 2 * 2)
    for size in (64, 128):  # what int8 is for
        one = [(1, size, size)]
        assert _core.Kv.block_bytes(one, "bf16") >= 1.9 * _core.Kv.block_bytes(one, "int8")
    mixed = [(2, 20, 20), (1, 40, 16), (3, 16, 40)]
    assert _core.Kv.block_bytes(mixed, "f32") == 16 * 4 * (2 * (32 + 32) + (48 + 16) + 3 * (16 + 48))
    for type in ("bf16", "int8", "fp8", "int4"):
        assert _core.Kv.block_bytes(mixed, type) == sum(_core.Kv.block_bytes([shape], type) for shape in mixed)
    kv = _core.Kv(mixed, 5, "int8")
    assert kv.blocks == 5
    assert kv.bytes_per_block == _core.Kv.block_bytes(mixed, "int8")
