"""KV that leaves the block memory and comes back: bytes, salts, bounds, and what a disk may do to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine.memory.block_manager import LONE, BlockManager
from headrace.engine.memory.block_table import BlockTable
from headrace.engine.memory.kv_cipher import CipherError, KvCipher
from headrace.engine.memory.kv_disk import KvDisk
from headrace.engine.memory.kv_tiers import Bytes, KvTiers
from tests.support.clock import Clock

SIZE = 4  # tokens of a block
BYTES = 16  # of a block's KV here: 4 for each token
FILE_BYTES = 6 + 16 + BYTES
Tokens = tuple[int, ...]


class Kv:
    """The executor's memory. The KV of a token names all tokens up to it, so that a wrong block shows."""

    block_bytes = BYTES

    def __init__(self, count: int) -> None:
        self.memory = np.zeros((count, SIZE), dtype=np.uint32)

    def read_blocks(self, blocks: Sequence[int]) -> list[Bytes]:
        return [self.memory[block].copy().view(np.uint8) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        for block, data in zip(blocks, contents, strict=True):
            self.memory[block] = data.view(np.uint32)

    def named(self, tokens: Tokens, variant: int) -> np.uint32:
        return np.uint32(hash((variant, tokens)) & 0xFFFFFFFF)

    def compute(self, table: BlockTable, tokens: Tokens) -> None:
        for place in range(table.cached_tokens, len(tokens)):
            self.memory[table.blocks[place // SIZE], place % SIZE] = self.named(tokens[: place + 1], table.variant)

    def check(self, table: BlockTable, tokens: Tokens) -> None:
        for place in range(table.cached_tokens):
            found = self.memory[table.blocks[place // SIZE], place % SIZE]
            assert found == self.named(tokens[: place + 1], table.variant), (tokens, place)


class World:
    def __init__(self, count: int = 8, **tiers: Any) -> None:
        self.kv = Kv(count)
        self.blocks = BlockManager(count, SIZE, most_pinned=2)
        self.tiers = KvTiers(self.blocks, self.kv, **tiers)

    def run(self, tokens: Tokens, salt: str = "a", *, variant: int = 0) -> int:
        """One request from its start to its end. Return the tokens that were not computed."""
        blocks = self.blocks
        match = blocks.match(tokens, salt, variant=variant)
        blocks.recall(match, patient=True)
        table = blocks.acquire(match, len(tokens))
        assert table is not None
        self.tiers.save_evicted()
        for source, target in blocks.take_copies():
            self.kv.memory[target] = self.kv.memory[source]
        self.kv.check(table, tokens)
        self.kv.compute(table, tokens)
        blocks.release(table, tokens, len(tokens))
        blocks.check()
        return table.cached_tokens

    def rest(self) -> None:
        while self.tiers.rest():
            pass


def disk(folder: Path, **changes: Any) -> KvDisk:
    return KvDisk(folder, **{"block_bytes": BYTES, "most_bytes": 100 * FILE_BYTES, **changes})


FIRST = tuple(range(100, 124))  # six blocks of the eight
SECOND = tuple(range(200, 224))


def test_evicted_kv_comes_back_from_memory() -> None:
    world = World(memory_bytes=100 * BYTES)
    assert world.run(FIRST) == 0
    assert world.run(SECOND) == 0
    assert world.blocks.match(FIRST, "a").cached_tokens < 16
    assert world.run(FIRST) == 20  # all whole blocks but the last, whose last token is always computed
    stats = world.tiers.stats()
    assert (stats.recalls, stats.memory_hits, stats.disk_hits) == (1, stats.recalled_tokens // SIZE, 0)
    assert stats.memory_bytes == stats.memory_entries * BYTES


def test_without_a_tier_it_is_computed_again() -> None:
    world = World(memory_bytes=0)
    world.run(FIRST)
    world.run(SECOND)
    assert world.run(FIRST) < 20
    assert world.tiers.stats().memory_entries == 0


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    world = World(memory_bytes=3 * BYTES)
    for first in range(0, 1000, 100):
        world.run(tuple(range(first, first + 24)))
        assert world.tiers.stats().memory_entries <= 3
    assert world.tiers.stats().dropped > 0


def test_a_salt_never_gets_another_ones_kv_and_public_prefixes_are_shared(tmp_path: Path) -> None:
    world = World(memory_bytes=100 * BYTES, disk=disk(tmp_path))
    public = tuple(range(300, 308))
    world.blocks.declare_public(public)
    prompt = (*public, *range(16))
    for salt in ("a", "b", ""):
        world.run(prompt, salt)
        world.run(SECOND, "z")
        world.run(tuple(range(400, 424)), "z")
        for other in ("c", "a\0", " a"):
            assert world.blocks.match(prompt, other).stored in (0, 4, 8)
        assert world.blocks.match(prompt, salt).stored + world.blocks.match(prompt, salt).cached_tokens >= 20
    assert world.run(prompt, "new") == 8


def test_what_belongs_to_one_request_is_kept_nowhere(tmp_path: Path) -> None:
    kept = disk(tmp_path)
    world = World(memory_bytes=100 * BYTES, disk=kept)
    world.run(FIRST, f"{LONE}1")
    world.rest()
    world.run(SECOND, f"{LONE}2")
    assert world.tiers.stats().memory_entries == 0
    assert not list(tmp_path.iterdir())


def test_idle_kv_is_written_and_survives_the_process(tmp_path: Path) -> None:
    world = World(disk=disk(tmp_path))
    world.run(FIRST)
    world.rest()
    assert len(list(tmp_path.iterdir())) == 6
    assert not world.tiers.rest()  # nothing is written twice
    again = World(disk=disk(tmp_path))  # the first one was killed
    assert again.run(FIRST) == 20
    assert again.tiers.stats().disk_hits == 5


def test_memory_overflows_to_the_disk_beside_the_steps(tmp_path: Path) -> None:
    world = World(memory_bytes=2 * BYTES, disk=disk(tmp_path))
    world.run(FIRST)
    world.run(SECOND)
    waiting = world.tiers.stats().waiting
    assert waiting > 0
    assert world.run(FIRST) == 20  # what waits to be written is found as well
    world.tiers.work(1000)
    assert world.tiers.stats().waiting == 0
    assert world.tiers.stats().disk.written >= waiting


def test_what_is_left_is_written_at_the_end(tmp_path: Path) -> None:
    world = World(memory_bytes=100 * BYTES, disk=disk(tmp_path))
    world.run(FIRST)
    world.run(SECOND)
    world.tiers.close()
    assert World(disk=disk(tmp_path)).run(FIRST) == 20


@pytest.mark.parametrize("damage", [b"", b"HRKV1\n", b"x" * FILE_BYTES, "flip", "swap"])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path: Path, damage: bytes | str) -> None:
    world = World(disk=disk(tmp_path))
    world.run(FIRST)
    world.rest()
    files = sorted(tmp_path.iterdir())
    contents = [file.read_bytes() for file in files]
    for place, file in enumerate(files):
        if isinstance(damage, bytes):
            file.write_bytes(damage)
        elif damage == "flip":
            file.write_bytes(contents[place][:-1] + bytes([contents[place][-1] ^ 1]))
        else:
            file.write_bytes(contents[(place + 1) % len(files)])  # right bytes in another's place
    again = World(disk=disk(tmp_path))
    assert again.run(FIRST) == 0
    assert again.tiers.stats().disk.corrupt == 1
    assert len(list(tmp_path.iterdir())) == 5


def test_the_disk_is_bounded_over_restarts(tmp_path: Path) -> None:
    world = World(disk=disk(tmp_path, most_bytes=4 * FILE_BYTES))
    for first in range(0, 500, 100):
        world.run(tuple(range(first, first + 24)))
        world.rest()
        assert len(list(tmp_path.iterdir())) <= 4
    smaller = disk(tmp_path, most_bytes=2 * FILE_BYTES)
    assert smaller.stats.entries == len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_fails_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = disk(tmp_path, monotonic=clock)
    world = World(disk=kept)
    with monkeypatch.context() as full:
        full.setattr("headrace.engine.memory.kv_disk.os.replace", _no_room)
        world.run(FIRST)
        world.rest()
        assert kept.stats.failed == 1
    assert not list(tmp_path.iterdir())
    world.run(SECOND)
    world.rest()
    assert kept.stats.written == 0
    clock.now += 11.0
    world.run(tuple(range(50, 74)))
    world.rest()
    assert kept.stats.written > 0


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    first = World(disk=disk(tmp_path))
    first.run(FIRST)
    first.rest()
    second = World(disk=disk(tmp_path))
    for file in tmp_path.iterdir():
        file.unlink()
    assert second.run(FIRST) == 0
    assert second.tiers.stats().disk.corrupt == 0


def test_encrypted_files_are_read_with_the_key_and_for_the_tenant_only(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    cipher = KvCipher(bytes(range(32)))
    kept = disk(tmp_path, cipher=cipher)
    data = np.arange(BYTES, dtype=np.uint8)
    assert kept.write(b"d" * 32, "red", data)
    (file,) = tmp_path.iterdir()
    assert data.tobytes() not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    again = disk(tmp_path, cipher=KvCipher(bytes(range(32))))
    found = again.read(b"d" * 32, "red")
    assert found is not None
    assert found.tolist() == data.tolist()
    assert disk(tmp_path, cipher=cipher).read(b"d" * 32, "blue") is None  # and it is gone
    assert kept.write(b"e" * 32, "red", data)
    assert disk(tmp_path, cipher=KvCipher(bytes(32))).read(b"e" * 32, "red") is None


def test_the_key_of_the_cipher_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    key = KvCipher.from_environment("KV_KEY", {"KV_KEY": "0f" * 32})
    assert key.naming_key == KvCipher(b"\x0f" * 32).naming_key != KvCipher(bytes(32)).naming_key
    for text in ("", "0f", "zz" * 32):
        with pytest.raises(CipherError, match="KV_KEY must hold a key of 64 hexadecimal digits"):
            KvCipher.from_environment("KV_KEY", {"KV_KEY": text})


def test_encryption_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
    with pytest.raises(CipherError, match=r"pip install 'headrace\[encryption\]'"):
        KvCipher(bytes(32))


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_have_the_right_kv_whatever_the_tiers_are(tmp_path: Path, seed: int) -> None:
    """Every cached token is checked in World.run. With tiers that never lose anything, nothing is computed twice."""
    dice = random.Random(seed)
    roomy = World(count=12, memory_bytes=10_000 * BYTES)
    tight = World(count=12, memory_bytes=5 * BYTES, disk=disk(tmp_path, most_bytes=20 * FILE_BYTES))
    worlds = [roomy, tight, World(count=12)]
    public = (0, 1, 0, 1, 1, 1, 0, 0)
    for world in worlds:
        world.blocks.declare_public(public)
    seen: set[tuple[str | None, int, Tokens]] = set()
    for turn in range(150):
        beginning = dice.choice([(), (1, 1, 1, 1), public, public[:4]])
        tokens = (*beginning, *(dice.randrange(2) for _ in range(dice.randrange(1, 40))))[:44]
        salt, variant = dice.choice(["", "a", "b"]), dice.randrange(2)
        cached = [world.run(tokens, salt, variant=variant) for world in worlds]
        ends = range(SIZE, len(tokens), SIZE)
        known = 0
        for end in ends:
            scope = None if tokens[:end] == public[:end] else salt
            if (scope, variant, tokens[:end]) not in seen:
                break
            known = end
        assert cached[0] >= known
        assert cached[0] // SIZE >= cached[2] // SIZE  # parts of blocks are not kept
        for end in range(SIZE, len(tokens) + 1, SIZE):
            seen.add((None if tokens[:end] == public[:end] else salt, variant, tokens[:end]))
        if turn % 7 == 0:
            tight.rest()
        if turn % 50 == 49:  # killed, and started again on the same folder
            tight = worlds[1] = World(count=12, memory_bytes=5 * BYTES, disk=disk(tmp_path, most_bytes=20 * FILE_BYTES))
            tight.blocks.declare_public(public)
    assert worlds[0].tiers.stats().recalls > 20
    assert tight.tiers.stats().disk.corrupt == 0
