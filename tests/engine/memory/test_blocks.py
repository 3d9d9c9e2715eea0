"""BlockManager: who holds what, what goes first when memory is needed, and what is never given twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from headrace.engine.memory.block_manager import MOST_SALTS, OTHER_SALTS, BlockManager
from headrace.engine.memory.prefix_tree import LOOK, IntegrityError
from tests.engine.memory.block_users import SIZE, cached, opened, ran, text


def test_a_sequence_wastes_at_most_one_part_of_a_block() -> None:
    blocks = BlockManager(10)
    for total, needed in [(1, 1), (16, 1), (17, 2), (48, 3)]:
        table = opened(blocks, [1], total=total)
        assert len(table.blocks) == needed
        blocks.release(table, [1], 0)
    table = opened(blocks, text(20))
    assert blocks.stats().unfilled == 12
    assert blocks.stats().fragmentation == 12 / 32
    assert blocks.grow(table, 32)
    assert len(table.blocks) == 2
    assert blocks.stats().unfilled == 0
    assert blocks.grow(table, 33)
    assert len(table.blocks) == 3
    assert len(set(table.blocks)) == 3


def test_whole_blocks_are_shared_and_part_of_one_is_copied() -> None:
    blocks = BlockManager(10)
    first = ran(blocks, text(40))
    second = opened(blocks, [*text(36), 99, 98])
    assert second.cached_tokens == 36
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    assert blocks.take_copies() == [(first.blocks[2], second.blocks[2])]
    assert blocks.take_copies() == []
    assert blocks.stats().copies == 1
    blocks.check()


def test_the_least_recently_used_go_first_and_tails_before_heads() -> None:
    blocks = BlockManager(9)
    a, b, c = text(48), text(48, 100), text(48, 200)
    for tokens in (a, b, c):
        ran(blocks, tokens)
    ran(blocks, [*a[:32], 7])  # a's head is used again; its tail is not, and its last block goes for it
    assert blocks.stats().evictions == 1
    assert cached(blocks, [*a, 1]) == 32
    table = opened(blocks, [99], total=2 * SIZE)
    assert (cached(blocks, [*a, 1]), cached(blocks, [*b, 1]), cached(blocks, [*c, 1])) == (32, 16, 48)
    assert blocks.grow(table, 4 * SIZE)
    assert (cached(blocks, [*a, 1]), cached(blocks, [*b, 1]), cached(blocks, [*c, 1])) == (32, 0, 32)
    blocks.check()


def test_what_is_in_use_is_never_taken() -> None:
    blocks = BlockManager(6)
    table = opened(blocks, text(64))
    assert blocks.acquire(blocks.match([99], ""), 3 * SIZE) is None
    assert not blocks.grow(table, 7 * SIZE)
    assert len(table.blocks) == 4
    assert blocks.available == 2
    other = opened(blocks, [99], total=2 * SIZE)
    assert not set(other.blocks) & set(table.blocks)
    blocks.check()


def test_a_refused_sequence_changes_nothing() -> None:
    blocks = BlockManager(6)
    ran(blocks, text(40))
    running = opened(blocks, [99], total=3 * SIZE)
    before = blocks.stats()
    assert blocks.acquire(blocks.match(text(80), ""), 7 * SIZE) is None
    assert blocks.stats() == before
    assert cached(blocks, text(80)) == 40
    blocks.release(running, [99], 0)
    assert opened(blocks, text(80), total=6 * SIZE).cached_tokens == 32  # the block to copy from is needed itself


def test_a_match_that_is_old_is_looked_for_again() -> None:
    blocks = BlockManager(6)
    ran(blocks, text(40))
    match = blocks.match(text(41), "")
    assert match.cached_tokens == 40
    assert blocks.refresh(match) is match
    table = opened(blocks, text(70, 1000))
    blocks.release(table, text(70, 1000), 0)
    assert blocks.refresh(match).cached_tokens < 40
    table = blocks.acquire(match, 41)
    assert table is not None
    assert table.cached_tokens == 16
    blocks.check()


def test_two_that_compute_the_same_keep_their_own_blocks() -> None:
    blocks = BlockManager(10)
    first, second = opened(blocks, text(40)), opened(blocks, text(40))
    blocks.publish(first, text(40), 40)
    before = list(second.blocks)
    blocks.publish(second, text(40), 40)
    assert second.blocks == before
    blocks.check()
    blocks.release(first, text(40), 40)
    blocks.check()
    blocks.release(second, text(40), 40)
    blocks.check()
    assert blocks.stats().cached == 3  # once, and not twice
    assert blocks.stats().free == 7


def test_a_fork_shares_whole_blocks_and_copies_the_part() -> None:
    blocks = BlockManager(10)
    table = opened(blocks, text(40))
    with pytest.raises(ValueError, match="of which 0 are published"):
        blocks.fork(table, 40)
    blocks.publish(table, text(40), 40)
    fork = blocks.fork(table, 40)
    assert fork is not None
    assert fork.blocks[:2] == table.blocks[:2]
    assert fork.blocks[2] != table.blocks[2]
    assert blocks.take_copies() == [(table.blocks[2], fork.blocks[2])]
    assert blocks.grow(fork, 49)
    blocks.release(table, [*text(40), 7, 7], 42)
    blocks.check()
    blocks.release(fork, [*text(40), 8, 8], 42)
    blocks.check()
    assert cached(blocks, [*text(40), 7, 7, 7]) == 42
    assert cached(blocks, [*text(40), 8, 8, 8]) == 42


def test_a_fork_at_the_end_of_a_block_needs_no_memory() -> None:
    blocks = BlockManager(2)
    table = opened(blocks, text(32))
    blocks.publish(table, text(32), 32)
    fork = blocks.fork(table, 32)
    assert fork is not None
    assert fork.blocks == table.blocks
    assert blocks.take_copies() == []
    assert blocks.fork(table, 20) is None
    with pytest.raises(ValueError, match="fork at 33"):
        blocks.fork(table, 33)
    blocks.check()


def test_without_reuse_forks_share_blocks_all_the_same() -> None:
    blocks = BlockManager(4, reuse=False)
    table = opened(blocks, text(40))
    fork = blocks.fork(table, 40)
    assert fork is not None
    assert fork.blocks[:2] == table.blocks[:2]
    blocks.release(table, text(40), 40)
    blocks.check()
    assert blocks.stats().used == 4  # the source of the copy too
    blocks.take_copies()
    blocks.release(fork, text(40), 40)
    assert blocks.stats().free == 4


def test_a_fork_of_a_copy_that_is_still_due_comes_after_it() -> None:
    blocks = BlockManager(10)
    first = ran(blocks, text(40))
    second = opened(blocks, [*text(36), 99])
    third = blocks.fork(second, 36)
    assert third is not None
    blocks.release(second, [*text(36), 99], 36)
    blocks.check()
    assert blocks.take_copies() == [(first.blocks[2], second.blocks[2]), (second.blocks[2], third.blocks[2])]
    blocks.check()
    blocks.release(third, text(36), 36)
    assert blocks.stats().used == 0


def test_copies_that_nobody_waits_for_are_not_made_and_not_taken_for_computed() -> None:
    blocks = BlockManager(10)
    ran(blocks, text(40))
    tokens = [*text(36), 99]
    second = opened(blocks, tokens)
    fork = blocks.fork(second, 36)
    assert fork is not None
    blocks.release(fork, text(36), 36)
    blocks.release(second, tokens, 36)
    assert blocks.take_copies() == []
    blocks.check()
    stats = blocks.stats()
    assert (stats.used, stats.cached, stats.copies) == (0, 3, 0)


def test_what_a_copy_is_still_to_bring_is_not_published() -> None:
    blocks = BlockManager(10)
    ran(blocks, text(40))
    tokens = [*text(36), *text(28, 90)]
    second = opened(blocks, tokens)
    blocks.publish(second, tokens, 64)
    blocks.check()
    assert cached(blocks, [*tokens, 1]) == 36
    blocks.take_copies()
    blocks.publish(second, tokens, 64)
    assert cached(blocks, [*tokens, 1]) == 64


def test_part_of_a_block_is_not_forgotten_while_it_is_to_be_copied() -> None:
    blocks = BlockManager(10)
    first = ran(blocks, text(40))
    tokens = [*text(40), *text(8, 90)]
    second = opened(blocks, tokens)
    blocks.take_copies()
    third = opened(blocks, [*text(39), 99])
    blocks.publish(second, tokens, 48)
    blocks.check()
    assert blocks.take_copies() == [(first.blocks[2], third.blocks[2])]


def test_the_source_of_a_copy_stays_until_the_copy_is_made() -> None:
    blocks = BlockManager(4)
    first = ran(blocks, text(20))
    second = opened(blocks, [*text(18), 99])
    assert blocks.available == 1
    opened(blocks, [500])
    assert blocks.acquire(blocks.match([600], ""), 1) is None
    assert blocks.take_copies() == [(first.blocks[1], second.blocks[1])]
    assert opened(blocks, [600]).blocks == [first.blocks[1]]


def test_nothing_is_released_twice() -> None:
    blocks = BlockManager(4)
    table = ran(blocks, text(20))
    for use in (
        lambda: blocks.release(table, text(20), 20),
        lambda: blocks.grow(table, 100),
        lambda: blocks.fork(table, 20),
        lambda: BlockManager(4).release(opened(blocks, text(5)), text(5), 5),
    ):
        with pytest.raises(ValueError, match="released before"):
            use()
    blocks.check()


def test_statistics_per_salt_count_tokens_asked_for_and_hit() -> None:
    blocks = BlockManager(10)
    ran(blocks, text(40), "a")
    ran(blocks, text(40), "a")
    ran(blocks, text(20), "b")
    cached(blocks, text(40), "a")  # looking is not asking
    salts = blocks.stats().salts
    assert (salts["a"].asked, salts["a"].hit) == (80, 39)
    assert (salts["b"].asked, salts["b"].hit) == (20, 0)


def test_statistics_name_a_bounded_number_of_salts() -> None:
    blocks = BlockManager(10)
    for number in range(MOST_SALTS + 50):
        ran(blocks, [1, 2], f"tenant-{number}")
    ran(blocks, [1, 2], "tenant-0")
    salts = blocks.stats().salts
    assert len(salts) == MOST_SALTS + 1
    assert salts["tenant-0"].asked == 4
    assert salts[OTHER_SALTS].asked == 100


def test_impossible_sizes_are_refused() -> None:
    for count, size in [(0, 16), (-1, 16), (1, 0)]:
        with pytest.raises(ValueError, match="blocks of"):
            BlockManager(count, size)
    blocks = BlockManager(10)
    ran(blocks, text(40))
    with pytest.raises(ValueError, match="are cached"):
        blocks.acquire(blocks.match(text(50), ""), 39)
    with pytest.raises(OverflowError):
        blocks.match([2**63], "")


def lost(blocks: BlockManager) -> None:
    blocks._free.pop()  # pyright: ignore[reportPrivateUsage]


def free_twice(blocks: BlockManager) -> None:
    blocks._free.append(blocks._free[0])  # pyright: ignore[reportPrivateUsage]


def one_holder_too_many(blocks: BlockManager) -> None:
    blocks._blocks[0].refs += 1  # pyright: ignore[reportPrivateUsage]


def out_of_order(blocks: BlockManager) -> None:
    blocks._idle.move_to_end(next(reversed(blocks._idle)), last=False)  # pyright: ignore[reportPrivateUsage]


def other_owner(blocks: BlockManager) -> None:
    next(iter(blocks._idle)).salt = "b"  # pyright: ignore[reportPrivateUsage]


def not_in_its_place(blocks: BlockManager) -> None:
    next(iter(blocks._idle)).key = bytes(64)  # pyright: ignore[reportPrivateUsage]


def public_by_mistake(blocks: BlockManager) -> None:
    next(iter(blocks._idle)).declared = {}  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "spoil",
    [lost, free_twice, one_holder_too_many, out_of_order, other_owner, not_in_its_place, public_by_mistake],
    ids=lambda spoil: spoil.__name__,
)
def test_the_check_finds_broken_books(spoil: Callable[[BlockManager], None]) -> None:
    blocks = BlockManager(10)
    ran(blocks, text(48), "a")
    opened(blocks, text(20), "b")
    blocks.check()
    spoil(blocks)
    with pytest.raises(IntegrityError):
        blocks.check()


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that the work takes: its cost, without a clock."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_the_cost_of_a_sequence_does_not_grow_with_what_is_cached() -> None:
    def cost(others: int) -> int:
        """Of one sequence, where so many others were that begin as it does; all memory is cached."""
        blocks = BlockManager(2 * others + 2)
        for number in range(2 * others):
            ran_quickly(blocks, [1, 2, 3, 1000 + number] + [4] * 28)
        return lines_of(lambda: ran_quickly(blocks, [1, 2, 3, 5] + [4] * 28))

    assert cost(LOOK) == cost(50 * LOOK)


def ran_quickly(blocks: BlockManager, tokens: list[int]) -> None:
    table = opened(blocks, tokens)
    blocks.take_copies()
    blocks.publish(table, tokens, len(tokens))
    blocks.release(table, tokens, len(tokens))
