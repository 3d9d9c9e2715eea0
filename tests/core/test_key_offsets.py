"""Offsets of keys in KV memory: attention stays as it is, and what is rounded is smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace._core as _core
from headrace.models.precision import KvType
from headrace.models.spec import ModelSpec
from tests.core.tiny import ISAS, SPECS, Floats, Tiny, core_tensors, random_tensors, rope, same_bits, spec, text

BLOCKS = list(range(8))
MODEL = spec(qkv_bias=True, head_size=32, ropes=(rope(16),))
LENGTH = 100
COMMON = 24.0  # times what keys differ by


def offset_tensors(model: ModelSpec, size: float) -> tuple[dict[str, Any], dict[str, Floats]]:
    """A model whose keys all have a large part in common, that no rope turns away, and that part as its offsets."""
    random = np.random.default_rng(3)
    tensors = dict(random_tensors(model))
    offsets: dict[str, Floats] = {}
    for place, layer in enumerate(model.layers):
        heads, width = model.head_shape(layer)[:2]
        turning = 2 * len(model.ropes[0].inv_freq)
        common = random.standard_normal((heads, width)).astype(np.float32) * np.float32(size)
        common[:, :turning] = 0.0
        bias = tensors[f"layers.{place}.attn.qkv.bias"].copy()
        bias[model.heads * width : (model.heads + heads) * width] += common.reshape(-1)
        tensors[f"layers.{place}.attn.qkv.bias"] = bias
        offsets[f"layers.{place}.attn.key_offsets"] = common.reshape(-1)
    return core_tensors(tensors), offsets


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["f32", "int8", "int4"])
def test_keys_less_their_common_part_lose_less(kv: KvType, isa: str) -> None:
    plain, offsets = offset_tensors(MODEL, COMMON)
    tokens = text(LENGTH, MODEL)
    exact = Tiny(MODEL, isa=ISAS[0], tensors=plain).rows(tokens, BLOCKS)

    def error(tensors: dict[str, Any]) -> float:
        found = Tiny(MODEL, kv=kv, isa=isa, tensors=tensors).rows(tokens, BLOCKS)
        return float(np.abs(found - exact).mean() / np.abs(exact).mean())

    before, after = error(plain), error(plain | offsets)
    if kv == "f32":
        assert after < 1e-3
    else:
        assert after < before / 2


@pytest.mark.parametrize("isa", ISAS)
def test_offset_keys_are_the_same_bits_in_any_chunks(isa: str) -> None:
    plain, offsets = offset_tensors(MODEL, COMMON)
    tokens = text(LENGTH, MODEL)
    whole = Tiny(MODEL, kv="int4", isa=isa, tensors=plain | offsets, threads=2).rows(tokens, BLOCKS)
    cut = Tiny(MODEL, kv="int4", isa=isa, tensors=plain | offsets).rows(tokens, BLOCKS, chunk=7)
    assert same_bits(whole, cut)
    assert not same_bits(whole, Tiny(MODEL, kv="int4", isa=isa, tensors=plain).rows(tokens, BLOCKS))


def test_keys_are_read_from_f32_memory() -> None:
    plain, offsets = offset_tensors(MODEL, COMMON)
    tokens = text(20, MODEL)
    found: list[Floats] = []
    for tensors in (plain, plain | offsets):
        tiny = Tiny(MODEL, tensors=tensors)
        tiny.rows(tokens, BLOCKS[2:])
        keys = np.empty((2, 16, 2, 32), np.float32)
        for place in range(2):
            tiny.kv.read_keys(1, BLOCKS[2 + place], keys[place])
        found.append(keys.reshape(32, 2, 32)[:20])
    expected = offsets["layers.1.attn.key_offsets"].reshape(2, 32)
    np.testing.assert_allclose(found[0] - found[1], np.broadcast_to(expected, found[0].shape), atol=1e-2)
    kv = _core.Kv([(2, 32, 32)], 4, "f32")
    for layer, block, shape in ((1, 0, (16, 2, 32)), (0, 4, (16, 2, 32)), (0, 0, (16, 1, 32))):
        with pytest.raises(ValueError, match=r"no such layer|no such block|keys are \["):
            kv.read_keys(layer, block, np.empty(shape, np.float32))
    with pytest.raises(ValueError, match="from f32 KV memory"):
        _core.Kv([(2, 32, 32)], 4, "int4").read_keys(0, 0, np.empty((16, 2, 32), np.float32))


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("plain", 47, "has the wrong size"),
        ("soft_caps", None, "a sink or a soft cap"),
        ("sinks", None, "a sink or a soft cap"),
        ("latents", None, "no keys to offset|wrong size"),
    ],
)
def test_offsets_that_would_change_attention_are_refused(name: str, size: int | None, message: str) -> None:
    model = SPECS[name]
    heads, width, _ = model.kv_shapes[0]
    values = np.ones(heads * width if size is None else size, np.float32)
    tensors = core_tensors(random_tensors(model), max_distance=model.max_distance)
    with pytest.raises(ValueError, match=message):
        Tiny(model, tensors=tensors | {"layers.0.attn.key_offsets": values})
