"""Files of pinned prefixes: what was saved hits after a restart, and a wrong, damaged or hostile file is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.prefix_file import (
    KvIdentity,
    LoadedPrefixes,
    OtherKvError,
    PrefixFileError,
    kv_identity,
    load_pinned,
    save_pinned,
)
from headrace.models.formats.pack_file import PackWriter
from headrace.models.precision import parse_plan
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec
from tests.support.models.pack_files import change_footer

SIZE = 16
BLOCK_BYTES = 96
IDENTITY = KvIdentity(
    model="0123",
    weights="int8",
    kv="bf16",
    arithmetic="portable",
    release="1",
    layout="1.1",
    block_tokens=SIZE,
    block_bytes=96,
)
Bytes = NDArray[np.uint8]


class Memory:
    """KV of blocks, as an executor has it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.writes = 0

    def read(self, block: int) -> Bytes:
        return self.blocks[block].copy()

    def write(self, block: int, data: Bytes) -> None:
        self.blocks[block] = data
        self.writes += 1

    def compute(self, block: int, tokens: list[int]) -> None:
        seed = hashlib.sha256(repr(tokens).encode()).digest()
        self.blocks[block] = np.frombuffer(seed * 3, np.uint8)


def text(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def run(blocks: BlockManager, memory: Memory, tokens: list[int], salt: str, variant: int = 0) -> None:
    table = blocks.acquire(blocks.match(tokens, salt, variant=variant), len(tokens))
    assert table is not None
    blocks.take_copies()
    for place in range(table.cached_tokens // SIZE, len(tokens) // SIZE):
        memory.compute(table.blocks[place], tokens[: (place + 1) * SIZE])
    blocks.release(table, tokens, len(tokens))


def saved(path: Path) -> Path:
    """Three pinned prefixes: two share their first two blocks, the third is only half computed."""
    blocks, memory = BlockManager(40), Memory(40)
    blocks.declare_public(text(32))
    blocks.pin(text(48), "a")
    blocks.pin([*text(32), *text(16, 500)], "b", variant=0)
    blocks.pin(text(64, 900), "a", variant=1)
    run(blocks, memory, text(50), "a")
    run(blocks, memory, [*text(32), *text(20, 500)], "b")
    run(blocks, memory, text(40, 900), "a", variant=1)
    assert save_pinned(path, IDENTITY, blocks, memory.read) == 6 * SIZE
    return path


def test_what_was_saved_hits_after_a_restart(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40), Memory(40)
    blocks.declare_public(text(32))
    assert load_pinned(path, IDENTITY, blocks, memory.write) == LoadedPrefixes(3, 6 * SIZE, ())
    blocks.check()
    assert memory.writes == 6
    assert blocks.match(text(60), "a").cached_tokens == 48
    assert blocks.match([*text(32), *text(20, 500)], "b").cached_tokens == 48
    assert blocks.match(text(60), "b").cached_tokens == 32
    assert blocks.match(text(60, 900), "a", variant=1).cached_tokens == 32
    assert blocks.match(text(60, 900), "a").cached_tokens == 0
    assert blocks.stats().pinned == 6
    expected = Memory(1)
    for prefix in blocks.pinned():
        for place, block in enumerate(prefix.blocks):
            expected.compute(0, list(prefix.tokens[: (place + 1) * SIZE]))
            assert memory.blocks[block].tolist() == expected.blocks[0].tolist()


def test_what_was_not_computed_yet_stays_pinned_for_when_it_is(tmp_path: Path) -> None:
    blocks, memory = BlockManager(40), Memory(40)
    load_pinned(saved(tmp_path / "prefixes"), IDENTITY, blocks, memory.write)
    assert blocks.pin(text(64, 900), "a", variant=1) == 32
    run(blocks, memory, text(70, 900), "a", variant=1)
    assert blocks.pin(text(64, 900), "a", variant=1) == 64


def test_a_loaded_file_saves_to_the_same_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40), Memory(40)
    blocks.declare_public(text(32))
    load_pinned(path, IDENTITY, blocks, memory.write)
    save_pinned(tmp_path / "again", IDENTITY, blocks, memory.read)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40), Memory(40)
    blocks.declare_public(text(32))
    run(blocks, memory, text(40), "c")
    before = memory.blocks.copy()
    assert load_pinned(path, IDENTITY, blocks, memory.write) == LoadedPrefixes(3, 4 * SIZE, ())
    assert load_pinned(path, IDENTITY, blocks, memory.write) == LoadedPrefixes(3, 0, ())
    assert memory.writes == 4
    used = [block for prefix in blocks.pinned() for block in prefix.blocks[:2]]
    assert (memory.blocks[used[0]] == before[used[0]]).all()


def test_prefixes_that_do_not_fit_are_left_out_and_the_rest_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40, most_pinned=6), Memory(40)
    loaded = load_pinned(path, IDENTITY, blocks, memory.write)
    assert (loaded.prefixes, loaded.tokens) == (2, 6 * SIZE)
    assert "the bounds are" in loaded.left_out[0]
    full = BlockManager(6, most_pinned=100)
    table = full.acquire(full.match([1], ""), 3 * SIZE)
    assert table is not None
    loaded = load_pinned(path, IDENTITY, full, Memory(6).write)
    assert loaded.prefixes == 1
    assert loaded.left_out == ("no memory for a prefix of 48 tokens", "no memory for a prefix of 32 tokens")
    full.check()


def test_a_failing_write_leaves_only_what_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40), Memory(40)

    def failing(block: int, data: Bytes) -> None:
        if memory.writes == 1:
            raise OSError("gone")
        memory.write(block, data)

    with pytest.raises(OSError, match="gone"):
        load_pinned(path, IDENTITY, blocks, failing)
    blocks.check()
    assert blocks.match(text(60), "a").cached_tokens == 16


def test_a_file_appears_whole_or_not_at_all_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "prefixes")
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["prefixes"]
    before = path.read_bytes()
    blocks, memory = BlockManager(40), Memory(40)
    load_pinned(path, IDENTITY, blocks, memory.write)

    def failing(block: int) -> Bytes:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        save_pinned(path, IDENTITY, blocks, failing)
    with pytest.raises(ValueError, match="a block has 5 bytes"):
        save_pinned(path, IDENTITY, blocks, lambda block: np.zeros(5, np.uint8))
    assert os.listdir(tmp_path) == ["prefixes"]
    assert path.read_bytes() == before


def test_a_file_without_prefixes_is_a_file(tmp_path: Path) -> None:
    assert save_pinned(tmp_path / "p", IDENTITY, BlockManager(4), Memory(4).read) == 0
    assert load_pinned(tmp_path / "p", IDENTITY, BlockManager(4), Memory(4).write) == LoadedPrefixes(0, 0, ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "4567"),
        ("weights", "int4"),
        ("kv", "int8"),
        ("arithmetic", "amx"),
        ("release", "2"),
        ("layout", "2.1"),
        ("block_tokens", 32),
        ("block_bytes", 128),
    ],
)
def test_what_another_engine_saved_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = saved(tmp_path / "prefixes")
    blocks, memory = BlockManager(40), Memory(40)
    here = msgspec.structs.replace(IDENTITY, **{field: value})
    with pytest.raises(OtherKvError, match=f"{field} is {getattr(IDENTITY, field)}, here {value}") as caught:
        load_pinned(path, here, blocks, memory.write)
    assert caught.value.path == path
    assert blocks.pinned() == []


def refused(path: Path, match: str = ".") -> None:
    blocks, memory = BlockManager(40), Memory(40)
    with pytest.raises(PrefixFileError, match=match):
        load_pinned(path, IDENTITY, blocks, memory.write)
    assert memory.writes == 0
    assert blocks.pinned() == []
    assert blocks.stats().free == 40


def test_files_that_were_never_any_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "Cannot open")
    refused(tmp_path, "not a regular file")
    for content in (b"", b"prefixes", bytes(5000)):
        (tmp_path / "other").write_bytes(content)
        refused(tmp_path / "other")
    with PackWriter(tmp_path / "weights", {"layout": 1, "model": "x"}) as writer:
        writer.add("embed", {"kind": "vector"}, np.zeros(64, np.uint8))
    refused(tmp_path / "weights", "not a file of pinned prefixes")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = saved(tmp_path / "prefixes").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        refused(tmp_path / "cut")


def test_every_flipped_bit_of_what_is_read_is_refused(tmp_path: Path) -> None:
    content = bytearray(saved(tmp_path / "prefixes").read_bytes())
    padding = 0
    for position in range(0, len(content), 3):
        content[position] ^= 1 << position % 8
        (tmp_path / "flipped").write_bytes(content)
        blocks, memory = BlockManager(40), Memory(40)
        try:
            load_pinned(tmp_path / "flipped", IDENTITY, blocks, memory.write)
            padding += 1
        except PrefixFileError:
            assert memory.writes == 0
        content[position] ^= 1 << position % 8
    assert padding <= 6 * 32 // 3 + 6  # each block of 96 bytes is followed by 32 that nobody reads


def put(value: object, *where: str | int) -> Callable[[dict[str, Any]], None]:
    def change(footer: dict[str, Any]) -> None:
        at: Any = footer
        for step in where[:-1]:
            at = at[step]
        if value is None:
            del at[where[-1]]
        else:
            at[where[-1]] = value

    return change


def prefixes(*where: str | int) -> tuple[str | int, ...]:
    return ("meta", "prefixes", *where)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put("weights", "meta", "kind"), "not a file of pinned prefixes"),
        (put(None, "meta", "kind"), "not a file of pinned prefixes"),
        (put(2, "meta", "version"), "version 2, expected 1"),
        (put("x" * 500, "meta", "version"), "version x{40},"),
        (put(None, "meta", "identity"), "wrong header"),
        (put(7, "meta", "identity", "model"), "wrong header"),
        (put(1, "meta", "identity", "more"), "wrong header"),
        (put(1, "meta", "more"), "wrong header"),
        (put("x", *prefixes()), "wrong header"),
        (put([{}] * 300, *prefixes()), "wrong header"),
        (put(7, *prefixes(0, "salt")), "wrong header"),
        (put("s" * 2000, *prefixes(0, "salt")), "wrong header"),
        (put(-1, *prefixes(0, "variant")), "wrong header"),
        (put(2**31, *prefixes(0, "variant")), "wrong header"),
        (put("0", *prefixes(0, "tokens", 0)), "wrong header"),
        (put(-1, *prefixes(0, "tokens", 0)), "wrong header"),
        (put(2**31, *prefixes(0, "tokens", 0)), "wrong header"),
        (put(2**70, *prefixes(0, "tokens", 0)), "wrong header"),
        (put(1.5, *prefixes(0, "tokens", 0)), "wrong header"),
        (put(-1, *prefixes(0, "blocks", 0)), "wrong header"),
        (put([], *prefixes(0, "tokens")), "prefix 0 has 0 tokens"),
        (put(text(47), *prefixes(0, "tokens")), "prefix 0 has 47 tokens"),
        (put(text(32), *prefixes(0, "tokens")), "prefix 0 has 32 tokens and 3 blocks"),
        (put(6, *prefixes(0, "blocks", 2)), "prefix 0 has block 6 where"),
        (put(2**62, *prefixes(0, "blocks", 2)), "prefix 0 has block 4611686018427387904 where"),
        (put([0, 1, 1], *prefixes(0, "blocks")), "prefix 0 has block 1 where"),
        (put([0, 0, 0], *prefixes(0, "blocks")), "prefix 0 has block 0 where"),
        (put([0, 2, 3], *prefixes(1, "blocks")), "prefix 1 has block 2 where"),
        (put([1, 0], *prefixes(1, "blocks")), "prefix 1 has block 1 where"),
        (put(99, *prefixes(1, "tokens", 20)), "prefix 1 has block 1 where"),
        (put(1, *prefixes(1, "variant")), "prefix 1 has block 0 where"),
        (put([4], *prefixes(2, "blocks")), "belong to no prefix"),
        (put("1", "entries", 0, "name"), "twice"),
        (put("one", "entries", 1, "name"), "block 1 is named 'one'"),
        (put({}, "entries", 1, "meta"), "block 1 has a wrong description"),
        (put({"sha256": 1}, "entries", 1, "meta"), "block 1 has a wrong description"),
        (put({"sha256": "0" * 64}, "entries", 1, "meta"), "corrupt: block 1"),
        (put({"sha256": "ä"}, "entries", 1, "meta"), "corrupt: block 1"),
        (put(95, "entries", 1, "size"), "block 1 has 95 bytes, expected 96"),
        (put(0, "entries", 1, "offset"), "at byte 0"),
    ],
)
def test_lies_are_refused_before_anything_is_touched(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    refused(change_footer(saved(tmp_path / "lie"), change), match)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
PLACES = [
    ("meta", "prefixes"),
    ("meta", "identity"),
    ("meta", "version"),
    ("entries", 0, "meta"),
    *(("meta", "prefixes", 1, key) for key in ("salt", "variant", "tokens", "blocks")),
    ("meta", "prefixes", 0),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=JSON)
def test_whatever_a_header_holds_only_one_kind_of_error_comes_out(
    tmp_path: Path, place: tuple[str | int, ...], value: Any
) -> None:
    path = change_footer(saved(tmp_path / "lie"), put(value, *place))
    blocks, memory = BlockManager(40), Memory(40)
    try:
        load_pinned(path, IDENTITY, blocks, memory.write)
    except PrefixFileError:
        assert memory.writes == 0
    blocks.check()


def spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {
        "family": "tiny",
        "architecture": "TinyForCausalLM",
        "vocab_size": 77,
        "hidden_size": 72,
        "intermediate_size": 50,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 24,
        "layers": (LayerSpec(), LayerSpec()),
        "context": 512,
        "norm_eps": 1e-5,
        "attention_scale": 0.2,
        "ropes": (RopeSpec(inv_freq=(1.0,)),),
    }
    return ModelSpec(**(facts | changes))


def test_the_identity_tells_apart_all_that_changes_kv() -> None:
    facts: dict[str, Any] = {
        "weights_digest": "00",
        "spec": spec(),
        "plan": parse_plan("int8"),
        "kv": "bf16",
        "arithmetic": "portable",
        "block_tokens": SIZE,
        "block_bytes": BLOCK_BYTES,
    }
    changes: list[dict[str, Any]] = [
        {},
        {"weights_digest": "01"},
        {"spec": spec(norm_eps=1e-6)},
        {"plan": parse_plan("int4")},
        {"plan": parse_plan("int8", keep=["head=bf16"])},
        {"kv": "int8"},
        {"arithmetic": "amx"},
        {"block_tokens": 32},
        {"block_bytes": 97},
    ]
    assert len({kv_identity(**(facts | change)) for change in changes}) == len(changes)
    assert kv_identity(**facts) == kv_identity(**facts)
    assert kv_identity(**facts).layout == f"{_core.LAYOUT}.{_core.KV_LAYOUT}"
