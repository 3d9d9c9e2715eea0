"""Adapters in the core: the sums are those of merged weights, and no sequence's bits depend on the others' adapters."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest

import headrace._core as _core
from headrace.engine.executors.adapter_table import AdapterFormat, adapter_format
from headrace.models.precision import WeightFormat
from headrace.models.spec import ModelSpec
from tests.core.tiny import ISAS, SPECS, Floats, Share, Tiny, core_tensors, random_tensors, same_bits, spec, text

Site = Literal["qkv", "o", "up", "down"]
TABLES = tuple(tuple(range(first, first + 3)) for first in range(0, 36, 3))


def low_ranks(model: ModelSpec, seed: int, rank: int) -> dict[str, tuple[Floats, Floats]]:
    """Low-rank changes of every product that takes them, by its canonical name: down and up."""
    random = np.random.default_rng(seed)
    found: dict[str, tuple[Floats, Floats]] = {}
    for name, values in random_tensors(model).items():
        if site_of(name) is None:
            continue
        outputs, inputs = values.shape
        down = random.standard_normal((rank, inputs)).astype(np.float32) / np.float32(inputs**0.5)
        found[name] = down, np.float32(0.5) * random.standard_normal((outputs, rank)).astype(np.float32)
    return found


def site_of(name: str) -> tuple[int, Site] | None:
    sites: dict[str, Site] = {"attn.qkv": "qkv", "attn.o": "o", "mlp.gate_up": "up", "mlp.up": "up", "mlp.down": "down"}
    if not name.startswith("layers."):
        return None
    _, layer, rest = name.split(".", 2)
    return (int(layer), sites[rest]) if rest in sites else None


def columns_of(name: str, outputs: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if not name.endswith(".gate_up"):
        return np.arange(outputs, dtype=np.int32)
    place, half = np.arange(outputs) % (outputs // 2), np.arange(outputs) // (outputs // 2)
    return (place // 32 * 64 + half * 32 + place % 32).astype(np.int32)


def adapter_of(
    tiny: Tiny, changes: dict[str, tuple[Floats, Floats]], *, kept: AdapterFormat = "f32", scales: float | None = None
) -> _core.Adapter:
    """`scales`: multiply each product and what is added by such factors around one, as DoRA does."""
    adapter = _core.Adapter(tiny.model, kept)
    for name, (down, up) in changes.items():
        found = site_of(name)
        assert found is not None
        layer, site = found
        columns = columns_of(name, len(up))
        # Parts that end within a panel, with ranks of their own.
        cut = len(up) // 3 + 1
        magnitudes = None
        if scales is not None:
            magnitudes = np.ones(columns.max() + 1 if site != "up" else packed_rows(name, len(up)), dtype=np.float32)
            magnitudes[columns] = factors(len(up), scales)
        parts = [(columns[:cut].copy(), up[:cut].copy()), (columns[cut:].copy(), up[cut:].copy())]
        adapter.add(layer, site, np.concatenate([down, down]), parts, magnitudes)
    return adapter


def packed_rows(name: str, outputs: int) -> int:
    return -(-(outputs // 2) // 32) * 64 if name.endswith(".gate_up") else outputs


def factors(outputs: int, scales: float) -> Floats:
    return (1.0 + scales * np.sin(np.arange(outputs))).astype(np.float32)


def merged(
    model: ModelSpec, changes: dict[str, tuple[Floats, Floats]], *, scales: float | None = None
) -> dict[str, Floats]:
    tensors = dict(random_tensors(model))
    for name, (down, up) in changes.items():
        tensors[name] = tensors[name] + up @ down
        if scales is not None:
            tensors[name] = tensors[name] * factors(len(up), scales)[:, None]
    return tensors


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "name", ["plain", "gated_biases", "layer_norm", "head_norms", "parallel", "latents", "everything", "narrow"]
)
def test_an_adapter_computes_what_merged_weights_do(name: str, isa: str) -> None:
    model = SPECS[name]
    tokens = text(21, model)
    for scales in (None, 0.3):
        changes = low_ranks(model, seed=5, rank=3)
        tiny = Tiny(model, isa=isa)
        adapter = adapter_of(tiny, changes, scales=scales)
        found = tiny.rows(tokens, TABLES[0], adapter=adapter, chunk=20)
        wanted = Tiny(model, isa=isa, tensors=core_tensors(merged(model, changes, scales=scales))).rows(
            tokens, TABLES[0]
        )
        np.testing.assert_allclose(found, wanted, atol=1e-4 * max(1.0, float(np.abs(wanted).max())))
        assert np.abs(tiny.rows(tokens, TABLES[1]) - wanted).max() > 0.01


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), ("int8", 32), ("int4", 32), ("int4", 0)])
def test_a_sequence_has_the_same_bits_whatever_adapters_are_beside_it(
    format: WeightFormat, group: int, isa: str
) -> None:
    model = spec(mlp_bias=True)
    tiny = Tiny(model, format, group, isa=isa, threads=3)
    kept = adapter_format(format)
    adapters = [
        adapter_of(tiny, low_ranks(model, seed=1, rank=2), kept=kept),
        adapter_of(tiny, low_ranks(model, seed=2, rank=9), kept=kept, scales=0.2),
        None,
        adapter_of(tiny, {key: each for key, each in low_ranks(model, seed=3, rank=1).items() if "down" in key}),
    ]
    texts = [text(40, model, seed=seed) for seed in range(len(adapters))]
    alone: list[Floats] = []
    for tokens, adapter in zip(texts, adapters, strict=True):
        fresh = Tiny(model, format, group, isa=isa)
        own = None
        if adapter is not None:  # of the other model, with the same weights
            place = adapters.index(adapter)
            changes = low_ranks(model, seed=place + 1 if place < 2 else 3, rank=(2, 9, 0, 1)[place])
            own = adapter_of(
                fresh,
                changes if place < 2 else {key: each for key, each in changes.items() if "down" in key},
                kept=kept if place < 2 else "f32",
                scales=0.2 if place == 1 else None,
            )
        alone.append(fresh.rows(tokens, TABLES[0], adapter=own))
    pieces: list[list[Floats]] = [[] for _ in texts]
    for begin, end in ((0, 33), (33, 34), (34, 40)):
        order = [2, 0, 3, 1] if begin else [1, 3, 2, 0]
        shares = [Share(texts[i][begin:end], begin, TABLES[i], adapter=adapters[i]) for i in order]
        found = tiny.step(shares)
        for place, i in enumerate(order):
            pieces[i].append(found[place * (end - begin) : (place + 1) * (end - begin)])
    for i, own in enumerate(alone):
        assert same_bits(np.concatenate(pieces[i]), own), i


def test_instruction_sets_of_one_arithmetic_give_the_same_bits() -> None:
    model = SPECS["plain"]
    for kept in get_args(AdapterFormat):
        found: dict[str, Floats] = {}
        for isa in ISAS:
            tiny = Tiny(model, "int8", 32, isa=isa)
            adapter = adapter_of(tiny, low_ranks(model, seed=4, rank=5), kept=kept, scales=0.1)
            rows = tiny.rows(text(20, model), TABLES[0], adapter=adapter)
            if _core.isa_arithmetic(isa) == "portable":
                found[isa] = rows
        first = next(iter(found.values()))
        assert all(same_bits(first, other) for other in found.values())


@pytest.mark.parametrize("isa", ISAS)
def test_int8_keeps_what_an_adapter_computes_and_takes_half_of_the_memory(isa: str) -> None:
    model = SPECS["gated_biases"]
    changes = low_ranks(model, seed=5, rank=6)
    tiny, tokens = Tiny(model, isa=isa), text(21, model)
    exact, halves, bytes = (adapter_of(tiny, changes, kept=kept) for kept in ("f32", "bf16", "int8"))
    wanted, base = tiny.rows(tokens, TABLES[0], adapter=exact), tiny.rows(tokens, TABLES[1])
    for adapter, most in ((halves, 0.01), (bytes, 0.03)):
        found = tiny.rows(tokens, TABLES[2], adapter=adapter)
        assert 0 < np.linalg.norm(found - wanted) < most * np.linalg.norm(wanted - base)
    assert bytes.bytes < 0.65 * halves.bytes
    # One value that is much larger than the others of its rank: int8 would lose those.
    name = "layers.0.attn.o"
    down = changes[name][0].copy()
    down[0] = np.where(np.arange(down.shape[1]) == 3, 40.0, down[0] / 10)
    wide = changes | {name: (down, changes[name][1])}
    exact, found = (
        tiny.rows(tokens, TABLES[i], adapter=adapter_of(tiny, wide, kept=kept)) for i, kept in ((0, "f32"), (1, "int8"))
    )
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact - base)


def test_a_step_that_only_the_base_takes_has_its_bits() -> None:
    model = SPECS["plain"]
    tiny = Tiny(model, "int4", 32)
    tokens = text(30, model)
    before = tiny.rows(tokens, TABLES[0])
    tiny.rows(tokens, TABLES[1], adapter=adapter_of(tiny, low_ranks(model, seed=6, rank=8), kept="int8"))
    assert same_bits(before, tiny.rows(tokens, TABLES[0]))


def test_what_does_not_fit_the_model_is_refused() -> None:
    model = SPECS["plain"]
    tiny, other = Tiny(model), Tiny(model)
    adapter = _core.Adapter(tiny.model, "f32")
    down, up = np.zeros((2, 72), dtype=np.float32), np.zeros((4, 2), dtype=np.float32)
    columns = np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match="unknown product 'qk'"):
        adapter.add(0, "qk", down, [(columns, up)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no product 'qkv' of layer 2"):
        adapter.add(2, "qkv", down, [(columns, up)])
    with pytest.raises(ValueError, match="has 72 inputs, not 71"):
        adapter.add(0, "qkv", down[:, :71].copy(), [(columns, up)])
    with pytest.raises(ValueError, match="has no output 997"):
        adapter.add(0, "qkv", down, [(columns + 997, up)])
    with pytest.raises(ValueError, match="the ranks of all parts"):
        adapter.add(0, "qkv", down, [(columns, up), (columns, up)])
    with pytest.raises(ValueError, match="magnitudes must be"):
        adapter.add(0, "qkv", down, [(columns, up)], np.ones(3, dtype=np.float32))
    adapter.add(0, "qkv", down, [(columns, up)])
    assert adapter.bytes > 0
    with pytest.raises(ValueError, match="changed twice"):
        adapter.add(0, "qkv", down, [(columns, up)])
    with pytest.raises(ValueError, match="belongs to another model"):
        other.rows(text(3, model), TABLES[0], adapter=adapter)
