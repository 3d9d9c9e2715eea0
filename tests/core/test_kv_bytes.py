"""The bytes of a KV block, out and in: what one memory gave, another takes, and a sequence goes on from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace._core as _core
from tests.core.tiny import SPECS, Tiny, same_bits, text
from tests.core.wrong_arrays import REFUSED, frozen

SHAPES = [(2, 24, 24), (1, 40, 16), (2, 24, 24)]  # of each layer its heads, and the dims of keys and values
KV_TYPES: list[Any] = ["f32", "bf16", "int8", "fp8", "int4"]


def memory(blocks: int = 4, type: Any = "bf16") -> _core.Kv:
    return _core.Kv(SHAPES, blocks, type)


def block_bytes(kv: _core.Kv, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    out = np.empty(kv.bytes_per_block, np.uint8)
    kv.read_block(block, out)
    return out


@pytest.mark.parametrize("type", KV_TYPES)
def test_what_is_written_is_read_and_nothing_else_changes(type: Any) -> None:
    kv = memory(type=type)
    written = np.random.default_rng(1).integers(0, 256, kv.bytes_per_block, np.uint8)
    kv.write_block(2, written)
    for block in range(4):
        assert (block_bytes(kv, block) == (written if block == 2 else 0)).all()
    kv.copy_block(2, 0)
    assert (block_bytes(kv, 0) == written).all()


@pytest.mark.parametrize("type", KV_TYPES)
@pytest.mark.parametrize("name", ["everything", "mixed_heads", "latents_of_64"])
def test_a_sequence_goes_on_from_blocks_of_another_memory_with_the_same_bits(type: Any, name: str) -> None:
    model = SPECS[name]
    tokens = text(50, model)
    first, second = Tiny(model, kv=type), Tiny(model, kv=type)
    alone = first.rows(tokens, (0, 1, 2, 3))
    for source, target in [(0, 7), (1, 3)]:
        second.kv.write_block(target, block_bytes(first.kv, source))
    assert same_bits(second.rows(tokens, (7, 3, 9, 1), computed=32), alone[32:])


@pytest.mark.parametrize(("type", "size"), [("f32", 2304), ("bf16", 1152), ("int8", 580), ("fp8", 580), ("int4", 292)])
def test_values_that_are_in_keys_take_no_memory(type: Any, size: int) -> None:
    assert _core.Kv.block_bytes([(1, 576, 512)], type, values_in_keys=True) == 16 * size
    with pytest.raises(ValueError, match="wider than keys"):
        _core.Kv.block_bytes([(1, 16, 32)], type, values_in_keys=True)


def test_read_only_bytes_of_any_address_are_taken() -> None:
    kv = memory()
    data = bytes(range(256)) * (kv.bytes_per_block // 256 + 1)
    odd = np.frombuffer(data, np.uint8)[1 : kv.bytes_per_block + 1]
    kv.write_block(0, odd)
    assert (block_bytes(kv, 0) == odd).all()


@pytest.mark.parametrize("block", [-1, 4, 2**62, 2**70, 1.5, None])
def test_a_block_that_does_not_exist_is_refused(block: Any) -> None:
    kv = memory()
    data = np.zeros(kv.bytes_per_block, np.uint8)
    with pytest.raises(REFUSED):
        kv.read_block(block, data)
    with pytest.raises(REFUSED):
        kv.write_block(block, data)


def test_wrong_arrays_are_refused() -> None:
    kv = memory()
    size = kv.bytes_per_block
    good = np.zeros(size, np.uint8)
    wrong: list[Any] = [
        np.zeros(size - 1, np.uint8),
        np.zeros(size + 1, np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(size // 4, np.float32),
        np.zeros(size, np.int8),
        np.zeros(2 * size, np.uint8)[::2],
        np.zeros((size, 1), np.uint8),
        None,
        "bytes",
    ]
    for array in wrong:
        with pytest.raises(REFUSED):
            kv.read_block(0, array)
        with pytest.raises(REFUSED):
            kv.write_block(0, array)
    with pytest.raises(REFUSED):
        kv.read_block(0, frozen(good))
    assert not block_bytes(kv, 0).any()
