"""Forty thousand random operations: `BlockManager` answers as the slow model does, and the KV memory stays right.

After every operation: as many blocks free and idle as the model has. Whatever is reused holds the KV of exactly these
tokens, computed by the same salt or declared public. Nobody writes into a block that another may read.
"""

from __future__ import annotations

import random

import pytest

from headrace.engine.memory.block_manager import BlockManager
from headrace.errors import RequestError
from tests.engine.memory.slow_blocks import Found, Memory, Run, SlowBlocks, Tokens

BLOCKS = 32
SIZE = 4  # tokens of a block
ALPHABET = 3
SALTS = ["", "a", "b"]
PUBLIC: list[Tokens] = [(0, 1, 2, 0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 2, 2, 2, 2), (1, 1, 1, 1)]
OPERATIONS = 40_000


class World:
    """Both kinds of books, the memory, and random users of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.real = BlockManager(BLOCKS, SIZE, most_pinned=8)
        self.slow = SlowBlocks(BLOCKS, SIZE, 8, PUBLIC)
        self.memory = Memory(BLOCKS, SIZE)
        for prefix in PUBLIC:
            self.real.declare_public(prefix)
        self.drafts = 0

    def some_tokens(self, most: int) -> list[int]:
        """A few beginnings are common, so that sequences meet."""
        beginning = self.random.choice([(), (), (0,), (2, 2, 2, 2, 2), *PUBLIC])
        rest = [self.random.randrange(ALPHABET) for _ in range(self.random.randrange(1, most))]
        return [*beginning, *rest][:most]

    def some_run(self) -> Run | None:
        return self.random.choice(self.slow.runs) if self.slow.runs else None

    # Operations

    def open(self) -> None:
        tokens, salt, variant = self.some_tokens(24), self.random.choice(SALTS), self.random.randrange(2)
        match = self.real.match(tokens, salt, variant=variant)
        found = self.slow.match(tuple(tokens), salt, variant)
        assert match.cached_tokens == found.cached
        assert (match.source is None) == (found.source is None)
        if self.random.random() < 0.3:
            self.random.choice([self.step, self.release])()  # the tree may change before the match is used
            found = self.slow.match(tuple(tokens), salt, variant)
        total = max(found.cached, self.random.randrange(1, len(tokens) + 9))
        really = self.slow.acquire(found, tuple(tokens), salt, variant, total)
        table = self.real.acquire(match, total)
        assert (table is None) == (really is None)
        if table is None or really is None:
            return
        assert len(table.blocks) == -(-total // SIZE)
        assert table.cached_tokens == really.cached
        source = None if really.source is None else really.source.block
        run = Run(salt, variant, tokens, table, table.cached_tokens, really.whole, source)
        self.slow.start(run, really)
        self.check_reused(run)

    def compute(self) -> None:
        """A step in which one sequence computes some tokens, after the copies; drafts beyond them are rejected."""
        run = self.some_run()
        if run is None:
            return
        self.step()
        number = self.random.randrange(1, 7)
        while len(run.tokens) < run.computed + number:
            run.tokens.append(self.random.randrange(ALPHABET))
        total = run.computed + number
        needed = max(0, -(-total // SIZE) - len(run.table.blocks))
        enough = needed <= self.slow.free() + len(self.slow.idle())
        if enough:
            self.slow.take(needed)
        before = list(run.table.blocks)
        assert self.real.grow(run.table, total) == enough
        assert run.table.blocks[: len(before)] == before
        assert len(run.table.blocks) == len(before) + (needed if enough else 0)
        if not enough:
            return
        names = self.memory.names(run.tokens[:total], run.variant)
        self.write(run, run.computed, [(name, run.salt) for name in names[run.computed :]])
        run.computed = total
        room = len(run.table.blocks) * SIZE - total
        self.drafts += 1
        self.write(run, total, [(-100 - self.drafts, run.salt)] * self.random.randrange(room + 1))
        if self.random.random() < 0.8:
            self.real.publish(run.table, run.tokens, run.computed)
            self.slow.publish(run)

    def write(self, run: Run, start: int, contents: list[tuple[int, str]]) -> None:
        touched = {run.table.blocks[p // SIZE] for p in range(start, start + len(contents))}
        others = {block for other in self.slow.runs if other is not run for block in other.table.blocks}
        assert not touched & others
        assert not touched & {entry.block for entry in self.slow.entries.values()}
        self.memory.write(run.table.blocks, start, contents)

    def step(self) -> None:
        """The copies that are due are made, in their order."""
        due = list(self.slow.copies)
        assert self.real.take_copies() == due
        for source, target in due:
            self.memory.copy(source, target)
            self.slow.end_copy((source, target))

    def fork(self) -> None:
        run = self.some_run()
        if run is None or not run.computed or len(self.slow.runs) > 8:
            return
        self.real.publish(run.table, run.tokens, run.computed)
        self.slow.publish(run)
        end = self.random.choice([run.computed, self.random.randrange(1, run.computed + 1)])
        whole, part = divmod(end, SIZE)
        enough = not part or self.slow.free() + len(self.slow.idle()) > 0
        if enough and part:
            self.slow.take(1)
        table = self.real.fork(run.table, end)
        assert (table is not None) == enough
        if table is None:
            return
        fork = Run(run.salt, run.variant, run.tokens[:end], table, end, whole)
        self.slow.runs.append(fork)
        for entry in self.slow.chain(tuple(fork.tokens), fork.salt, fork.variant)[:whole]:
            entry.holders.add(fork)
        if part:
            self.slow.add_copy(run.table.blocks[whole], table.blocks[whole])

    def release(self) -> None:
        run = self.some_run()
        if run is None:
            return
        self.real.release(run.table, run.tokens, run.computed)
        self.slow.release(run)
        with pytest.raises(ValueError, match="released before"):
            self.real.release(run.table, run.tokens, run.computed)

    def pin(self) -> None:
        tokens, salt, variant = self.some_prefix()
        expected = self.slow.pin(tokens, salt, variant)
        if expected is None:
            with pytest.raises(RequestError, match="pinned"):
                self.real.pin(tokens, salt, variant=variant)
        else:
            assert self.real.pin(tokens, salt, variant=variant) == expected

    def unpin(self) -> None:
        if self.slow.pins and self.random.random() < 0.9:
            variant, salt, tokens = self.random.choice(list(self.slow.pins))
        else:
            tokens, salt, variant = self.some_prefix()
        assert self.real.unpin(tokens, salt, variant=variant) == self.slow.unpin(tokens, salt, variant)

    def restore(self) -> None:
        """A saved prefix comes back: its missing blocks are written from outside."""
        tokens, salt, variant = self.some_prefix()
        found = self.slow.chain(tokens, salt, variant)
        plan = Found(len(found), len(found) * SIZE, None)
        really = self.slow.acquire(plan, tokens, salt, variant, len(tokens))
        table = self.real.restore(tokens, salt, variant=variant)
        assert (table is None) == (really is None)
        if table is None:
            return
        assert table.cached_tokens == len(found) * SIZE
        run = Run(salt, variant, list(tokens), table, len(tokens), len(found))
        self.slow.start(run, plan)
        names = self.memory.names(run.tokens, variant)
        self.write(run, table.cached_tokens, [(name, salt) for name in names[table.cached_tokens :]])
        self.real.release(table, tokens, len(tokens))
        self.slow.release(run)

    def some_prefix(self) -> tuple[Tokens, str, int]:
        tokens = self.some_tokens(16)
        while len(tokens) < SIZE:
            tokens.append(self.random.randrange(ALPHABET))
        whole = len(tokens) // SIZE * SIZE
        return tuple(tokens[:whole]), self.random.choice(SALTS), self.random.randrange(2)

    # Checks

    def check_reused(self, run: Run) -> None:
        """What is cached is the KV of these tokens, and is this salt's or public."""
        self.check_run(run)
        contents = self.memory.read(run.table.blocks, self.slow.present(run))
        for position, (_, salt) in enumerate(contents):
            prefix = tuple(run.tokens[: position + 1])
            assert salt == run.salt or any(public[: len(prefix)] == prefix for public in PUBLIC)

    def check_run(self, run: Run) -> None:
        end = self.slow.present(run)
        names = self.memory.names(run.tokens[:end], run.variant)
        assert [name for name, _ in self.memory.read(run.table.blocks, end)] == names

    def check_books(self) -> None:
        stats = self.real.stats()
        assert (stats.free, stats.cached) == (self.slow.free(), len(self.slow.idle()))
        assert stats.used == len(self.slow.held_blocks())

    def check_all(self) -> None:
        self.real.check()
        for run in self.slow.runs:
            self.check_run(run)
        for (variant, _, prefix), entry in self.slow.entries.items():
            (name,) = self.memory.names(list(prefix), variant)[-1:]
            assert self.memory.slots[entry.block][(len(prefix) - 1) % SIZE][0] == name
        pinned = {(p.variant, p.salt, p.tokens): list(p.blocks) for p in self.real.pinned()}
        assert pinned == {key: [entry.block for entry in held] for key, held in self.slow.pins.items()}


def test_forty_thousand_random_operations_go_as_the_slow_model_says() -> None:
    world = World(seed=7)
    names = ["open"] * 6 + ["compute"] * 10 + ["release"] * 5 + ["step"] * 2 + ["fork", "pin", "unpin", "restore"]
    for number in range(OPERATIONS):
        getattr(world, world.random.choice(names))()
        world.check_books()
        if number % 50 == 0:
            world.check_all()

    while run := world.some_run():
        world.real.release(run.table, run.tokens, run.computed)
        world.slow.release(run)
    for variant, salt, tokens in list(world.slow.pins):
        world.real.unpin(tokens, salt, variant=variant)
        world.slow.unpin(tokens, salt, variant)
    world.check_all()
    stats = world.real.stats()
    assert stats.used == 0
    assert stats.evictions > OPERATIONS // 10
    assert stats.copies > OPERATIONS // 50
    everything = world.real.acquire(world.real.match([9], "c"), BLOCKS * SIZE)
    assert everything is not None
    assert sorted(everything.blocks) == list(range(BLOCKS))
