"""The core's forward pass against the float64 reference, feature by feature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from msgspec.structs import replace

import headrace._core as _core
from headrace.models.precision import KvType, WeightFormat
from headrace.models.spec import LayerSpec, ModelSpec
from tests.core.reference import STORED, Doubles, bf16, exact, forward, int8_rows
from tests.core.tiny import (
    ENCODER,
    ENCODERS,
    ISAS,
    ROUNDS_ATTENTION,
    ROUNDS_ROWS,
    SPECS,
    Floats,
    Share,
    Tiny,
    packed_model,
    random_tensors,
    same_bits,
    spec,
    text,
)

LENGTH = 70  # tokens: past every window, past one attention chunk, not whole blocks
BLOCKS = (3, 1, 4, 0, 5)


def off_by(found: Floats, expected: Doubles) -> float:
    """The largest difference, in units of the largest value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_the_references(name: str, isa: str) -> None:
    model = SPECS[name]
    tokens = text(LENGTH, model)
    found = Tiny(model, isa=isa).rows(tokens, BLOCKS)
    assert off_by(found, forward(model, random_tensors(model), tokens)) < 3e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [1, 16, LENGTH, ENCODER.learned_positions])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_of_an_encoder_are_the_references(name: str, length: int, isa: str) -> None:
    model = ENCODERS[name]
    tokens = text(length, model)
    found = Tiny(model, isa=isa).rows(tokens, range(7), hidden=True)
    assert off_by(found, forward(model, random_tensors(model), tokens, hidden=True)) < 3e-6


@pytest.mark.parametrize("name", ENCODERS)
def test_layers_of_an_encoder_take_turns_with_the_memory_of_one(name: str) -> None:
    tiny = Tiny(ENCODERS[name])
    model = tiny.spec
    assert len(model.layers) > 1
    assert tiny.model.kv_layers == model.kv_layers == 1
    assert tiny.kv.bytes_per_block == _core.Kv.block_bytes([(model.kv_heads, model.head_size, model.head_size)], "f32")
    assert Tiny(SPECS["plain"]).model.kv_layers == 2


def test_layers_of_an_encoder_share_no_others_keys() -> None:
    shared = (LayerSpec(), LayerSpec(shares=0))
    Tiny(spec(layers=shared))
    with pytest.raises(ValueError, match="cannot share keys and values"):
        Tiny(spec(layers=shared, causal=False))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_biases_by_distance_are_added_to_the_scores_of_rounded_keys(kv: KvType, isa: str) -> None:
    model = ENCODERS["distances"]
    tokens = text(LENGTH, model)
    twos = isa in ROUNDS_ATTENTION
    found = Tiny(model, kv=kv, isa=isa).rows(tokens, range(7), hidden=True)
    expected = forward(model, random_tensors(model), tokens, stored=STORED[kv], twos=twos, hidden=True)
    assert off_by(found, expected) < 2e-2
    without = forward(model, random_tensors(model) | {"distances": np.zeros((8, 4), np.float32)}, tokens, hidden=True)
    assert off_by(found, without) > 5e-2


def test_tokens_of_a_second_text_have_the_second_type() -> None:
    tokens = text(20, ENCODER)
    tiny = Tiny(ENCODER)
    for second in (-1, 0, 7, 19, 20):
        expected = forward(ENCODER, random_tensors(ENCODER), tokens, hidden=True, second=second)
        assert off_by(tiny.rows(tokens, range(2), hidden=True, second=second), expected) < 3e-6
    plain, pair = (forward(ENCODER, random_tensors(ENCODER), tokens, hidden=True, second=at) for at in (-1, 7))
    assert off_by(plain, pair) > 1e-2
    shares = [Share(tokens, 0, (0, 1)), Share(tokens, 0, (2, 3), second=7)]
    assert off_by(tiny.step(shares, hidden=True), np.concatenate([plain, pair])) < 3e-6


def test_hidden_states_of_a_decoder_are_normed_last_states() -> None:
    model = SPECS["soft_caps"]
    tokens = text(9, model)
    found = Tiny(model).rows(tokens, BLOCKS, hidden=True)
    assert off_by(found, forward(model, random_tensors(model), tokens, hidden=True)) < 3e-6


def test_a_long_sequence_turns_by_the_long_rope() -> None:
    model = SPECS["partial_rope"]
    tokens = text(LENGTH, model)
    tiny = Tiny(model)
    short, long = (forward(model, random_tensors(model), tokens, variant=variant) for variant in (0, 1))
    assert off_by(tiny.rows(tokens, BLOCKS, variant=1), long) < 3e-6
    assert off_by(tiny.rows(tokens, BLOCKS, variant=0), short) < 3e-6
    assert off_by(tiny.rows(tokens, BLOCKS, variant=1), short) > 1e-2
    both = tiny.step([Share(tokens, 0, BLOCKS, 0), Share(tokens, 0, (10, 11, 12, 13, 14), 1)])
    assert off_by(both, np.concatenate([short, long])) < 3e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8", "int4"])
@pytest.mark.parametrize(
    "name", ["plain", "window", "head_norms", "narrow", "mixed_heads", "latents_of_64", "expanded_latents"]
)
def test_keys_and_values_are_rounded_once_and_to_the_nearest(name: str, kv: KvType, isa: str) -> None:
    model = SPECS[name]
    tokens = text(LENGTH, model)
    found = Tiny(model, kv=kv, isa=isa).rows(tokens, BLOCKS)
    tensors = random_tensors(model)
    twos = isa in ROUNDS_ATTENTION
    rounded = off_by(found, forward(model, tensors, tokens, stored=STORED[kv], twos=twos))
    unrounded = off_by(found, forward(model, tensors, tokens))
    # A key that lies almost between two steps may fall to the other side, and does so more often where queries and
    # weights are rounded too: to codes, or to bf16, of which a weight keeps no more digits than keys of bf16.
    assert rounded < (max(2e-3, unrounded / 6) if twos or kv in {"int8", "int4"} else 2e-3)
    assert rounded < unrounded / (2 if twos and kv == "bf16" else 3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("size", [512, 528])
def test_the_largest_heads_fit_into_sums_of_integers(size: int, kv: KvType, isa: str) -> None:
    narrow = SPECS["narrow"]  # of one layer: its keys depend on no attention, so that none falls to another step
    inv_freq = tuple(1e-4 ** (pair / (size // 2)) for pair in range(size // 2))
    rope = replace(narrow.ropes[0], inv_freq=inv_freq)
    model = replace(narrow, hidden_size=64, vocab_size=77, head_size=size, attention_scale=size**-0.5, ropes=(rope,))
    tokens = text(LENGTH, model)
    found = Tiny(model, kv=kv, isa=isa).rows(tokens, BLOCKS)
    twos = isa in ROUNDS_ATTENTION
    expected = forward(model, random_tensors(model), tokens, stored=STORED[kv], twos=twos)
    assert off_by(found, expected) < (2e-3 if twos else 5e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("format", "group"),
    [("bf16", 0), ("int8", 32), ("int8", 128), ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 0)],
)
@pytest.mark.parametrize("name", ["plain", "soft_caps", "gated_biases", "experts", "plain_experts", "latents_of_64"])
def test_rounded_weights_give_what_the_unpacked_weights_give(
    name: str, format: WeightFormat, group: int, isa: str
) -> None:
    model = SPECS[name]
    tokens = text(20, model)
    found = Tiny(model, format, group, isa=isa).rows(tokens, BLOCKS)
    rounds = isa in ROUNDS_ROWS
    read = int8_rows(format, group) if format != "bf16" else bf16 if rounds else exact
    expected = forward(model, unpacked_tensors(model, format, group), tokens, read=read)
    if format == "bf16" and not rounds:
        assert off_by(found, expected) < 3e-6
    else:
        # A value that lies almost between two steps of a row may fall to the other side, and all rows after see it.
        errors = np.sqrt(((found - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
        assert errors.min() < 1e-6
        assert np.median(errors) < 5e-3


def unpacked_tensors(model: ModelSpec, format: WeightFormat, group: int) -> Mapping[str, Floats]:
    plain = dict(random_tensors(model))
    for name, tensor in packed_model(model, format, group).items():
        if not isinstance(tensor, _core.Packed):
            continue
        values = tensor.unpack()
        if name.endswith(".gate_up"):
            inner = len(plain[name]) // 2
            panels = values.reshape(-1, 2, 32, values.shape[1])
            values = np.concatenate([panels[:, half].reshape(-1, values.shape[1])[:inner] for half in range(2)])
        plain[name] = values
    return plain


@pytest.mark.parametrize("name", SPECS)
def test_instruction_sets_agree(name: str) -> None:
    model = SPECS[name]
    tokens = text(LENGTH, model)
    found = [Tiny(model, "int8", 32, isa=isa).rows(tokens, BLOCKS) for isa in ISAS]
    for other in found[1:]:
        assert off_by(other, found[0].astype(np.float64)) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["window", "head_norms", "soft_caps", "latents_of_64"])
def test_long_sequences_are_the_references_and_the_same_bits_when_decoded(name: str, isa: str) -> None:
    """Past three chunks of attention, where rows side by side begin to leave whole chunks behind their windows."""
    model = SPECS[name]
    tokens = text(215, model)
    tiny = Tiny(model, isa=isa)
    found = tiny.rows(tokens, range(14))
    assert off_by(found, forward(model, random_tensors(model), tokens)) < 1e-5
    decoded = tiny.rows(tokens, range(14), computed=190, chunk=1)
    assert same_bits(decoded, found[190:])
    assert same_bits(tiny.rows(tokens, range(14), computed=50, chunk=37), found[50:])
