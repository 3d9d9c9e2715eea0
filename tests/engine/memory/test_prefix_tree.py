"""What is found again and by whom: prefixes, salts, variants, public prefixes and pinned ones."""

from __future__ import annotations

import pytest

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.prefix_pins import MOST_PINS
from headrace.engine.memory.prefix_tree import MOST_PUBLIC_BLOCKS
from headrace.errors import RequestError
from tests.engine.memory.block_users import SIZE, cached, opened, ran, text


def test_a_prefix_is_found_up_to_the_token_before_the_last() -> None:
    blocks = BlockManager(10)
    ran(blocks, text(40))
    assert cached(blocks, text(60)) == 40
    assert cached(blocks, text(40)) == 39
    assert cached(blocks, text(33)) == 32
    assert cached(blocks, text(32)) == 31
    assert cached(blocks, [*text(20), 99, 98]) == 20
    assert cached(blocks, [0]) == 0
    assert cached(blocks, []) == 0
    assert cached(blocks, [5, *text(40)]) == 0


def test_without_copies_only_whole_blocks_are_found() -> None:
    blocks = BlockManager(10, copies=False)
    ran(blocks, text(40))
    assert cached(blocks, text(40)) == 32
    assert cached(blocks, text(32)) == 16


def test_without_reuse_nothing_is_found_and_nothing_stays() -> None:
    blocks = BlockManager(10, reuse=False)
    ran(blocks, text(40))
    assert cached(blocks, text(60)) == 0
    assert blocks.stats().free == 10


def test_what_is_computed_is_found_while_its_sequence_still_runs() -> None:
    blocks = BlockManager(10)
    table = opened(blocks, text(50))
    blocks.publish(table, text(50), 15)
    assert cached(blocks, text(60)) == 0
    blocks.publish(table, text(50), 40)
    blocks.publish(table, text(50), 40)
    assert cached(blocks, text(60)) == 32
    other = opened(blocks, text(60))
    assert other.blocks[:2] == table.blocks[:2]
    blocks.check()
    blocks.release(table, text(50), 50)
    assert cached(blocks, text(60)) == 50
    blocks.release(other, text(60), 32)
    blocks.check()


def test_tokens_that_were_not_computed_are_not_found() -> None:
    blocks = BlockManager(10)
    table = opened(blocks, text(50))
    blocks.release(table, text(50), 20)
    assert cached(blocks, text(50)) == 20
    with pytest.raises(ValueError, match="only 10 given"):
        blocks.publish(opened(blocks, text(40, 100)), text(10, 100), 32)


def test_salts_do_not_see_each_other() -> None:
    blocks = BlockManager(20)
    ran(blocks, text(40), "a")
    assert cached(blocks, text(40), "b") == 0
    assert cached(blocks, text(40), "") == 0
    ran(blocks, text(40), "b")
    assert cached(blocks, text(40), "a") == 39
    a, b = opened(blocks, text(40), "a"), opened(blocks, text(40), "b")
    assert not set(a.blocks) & set(b.blocks)


def test_variants_do_not_see_each_other() -> None:
    blocks = BlockManager(20)
    ran(blocks, text(40))
    assert cached(blocks, text(40), variant=1) == 0
    table = blocks.acquire(blocks.match(text(40), "", variant=1), 40)
    assert table is not None
    blocks.release(table, text(40), 40)
    assert cached(blocks, text(40), variant=1) == 39
    assert blocks.stats().cached == 6


def test_a_declared_prefix_is_shared_and_what_follows_it_is_not() -> None:
    blocks = BlockManager(20)
    assert blocks.declare_public(text(40)) == 32
    first = ran(blocks, text(60), "a")
    assert cached(blocks, text(60), "b") == 32
    second = opened(blocks, text(60), "b")
    assert second.blocks[:2] == first.blocks[:2]
    assert cached(blocks, text(60), "a") == 59
    assert cached(blocks, [*text(20), 9], "b") == 20  # part of a public block
    blocks.release(second, text(60), 60)
    blocks.check()
    assert cached(blocks, text(60), "b") == 59
    assert cached(blocks, text(60), "c") == 32


def test_a_prefix_declared_late_is_shared_at_once() -> None:
    blocks = BlockManager(40)
    running = opened(blocks, text(70), "a")
    blocks.publish(running, text(70), 50)
    ran(blocks, text(70), "b")
    blocks.declare_public(text(32))
    blocks.check()
    assert cached(blocks, text(70), "c") == 32
    assert cached(blocks, text(70), "a") == 48
    blocks.release(running, text(70), 70)
    blocks.check()
    assert cached(blocks, text(70), "a") == 69
    assert cached(blocks, text(70), "c") == 32
    assert cached(blocks, text(70), "b") == 32  # what it had computed itself is out of reach, and goes with time
    ran(blocks, text(70), "b")
    assert cached(blocks, text(70), "b") == 69
    ran(blocks, text(39 * SIZE, 1000), "d")
    blocks.check()


def test_a_prefix_may_be_declared_in_steps() -> None:
    blocks = BlockManager(20)
    ran(blocks, text(60), "a")
    for tokens in (16, 48):
        assert blocks.declare_public(text(tokens)) == tokens
        blocks.check()
        assert cached(blocks, text(60), "b") == tokens
        assert cached(blocks, text(60), "a") == 59


def test_declared_prefixes_are_bounded() -> None:
    blocks = BlockManager(20, block_tokens=1)
    blocks.declare_public(range(MOST_PUBLIC_BLOCKS))
    assert blocks.declare_public(range(MOST_PUBLIC_BLOCKS)) == MOST_PUBLIC_BLOCKS  # known already
    with pytest.raises(RequestError, match="bound") as caught:
        blocks.declare_public([1])
    assert caught.value.parameter == "public_prefixes"


def test_pinned_prefixes_survive_pressure() -> None:
    blocks = BlockManager(8)
    ran(blocks, text(40), "a")
    assert blocks.pin(text(40), "a") == 32
    assert blocks.pin(text(40), "a") == 32
    for start in range(1000, 5000, 500):
        ran(blocks, text(6 * SIZE, start))
    assert cached(blocks, text(40), "a") == 32
    assert blocks.stats().pinned == 2
    assert blocks.acquire(blocks.match([9], ""), 7 * SIZE) is None
    assert blocks.unpin(text(40), "a")
    assert not blocks.unpin(text(40), "a")
    ran(blocks, text(8 * SIZE, 9000))
    assert cached(blocks, text(40), "a") == 0
    assert blocks.stats().pinned == 0


def test_a_prefix_may_be_pinned_before_it_is_computed() -> None:
    blocks = BlockManager(8)
    assert blocks.pin(text(48), "a") == 0
    ran(blocks, text(20), "a")
    assert blocks.pin(text(48), "a") == 16
    ran(blocks, text(60), "b")
    assert blocks.pin(text(48), "a") == 16
    ran(blocks, text(60), "a")
    assert blocks.pin(text(48), "a") == 48
    ran(blocks, text(5 * SIZE, 9000))
    assert cached(blocks, text(60), "a") == 48
    (prefix,) = blocks.pinned()
    assert prefix.tokens == tuple(text(48))
    assert len(prefix.blocks) == 3
    blocks.check()


def test_pins_are_bounded_and_leave_room_for_a_sequence() -> None:
    blocks = BlockManager(10)
    assert blocks.largest_sequence == 10 * SIZE
    blocks.pin(text(32), "a")
    assert blocks.largest_sequence == 8 * SIZE
    blocks.pin(text(48), "b")
    with pytest.raises(RequestError, match="3 prefixes of 6 blocks") as caught:
        blocks.pin(text(16), "c")
    assert caught.value.parameter == "pin"
    with pytest.raises(RequestError, match="fills no block"):
        blocks.pin(text(15), "c")
    many = BlockManager(2 * MOST_PINS, 1)
    for token in range(MOST_PINS):
        many.pin([token], "")
    with pytest.raises(RequestError, match=f"{MOST_PINS} prefixes"):
        many.pin([MOST_PINS], "")


def test_pins_may_share_a_beginning() -> None:
    blocks = BlockManager(20)
    blocks.declare_public(text(32))
    blocks.pin(text(32), "")
    blocks.pin(text(64), "a")
    ran(blocks, text(64), "a")
    assert blocks.stats().pinned == 4
    blocks.unpin(text(64), "a")
    assert blocks.stats().pinned == 2
    blocks.check()
    ran(blocks, text(18 * SIZE, 1000), "b")
    assert cached(blocks, text(64), "b") == 32


def test_a_saved_prefix_is_put_back() -> None:
    blocks = BlockManager(10)
    ran(blocks, text(16))
    table = blocks.restore(text(48), "")
    assert table is not None
    assert table.cached_tokens == 16
    assert len(table.blocks) == 3
    assert blocks.take_copies() == []
    blocks.release(table, text(48), 48)
    assert cached(blocks, text(60)) == 48
    again = blocks.restore(text(48), "")
    assert again is not None
    assert again.cached_tokens == 48
    blocks.release(again, text(48), 48)
    assert blocks.restore(text(200), "") is None
    blocks.check()


def test_salts_that_are_gone_leave_nothing_in_the_tree() -> None:
    blocks = BlockManager(3)
    for number in range(1000):
        ran(blocks, text(20), f"tenant-{number}")
    branches = blocks._tree.root(0).branches  # pyright: ignore[reportPrivateUsage]
    assert len(branches) <= 3


def test_the_turns_of_a_conversation_leave_no_parts_behind() -> None:
    blocks = BlockManager(40)
    tokens: list[int] = []
    for turn in range(20):
        tokens += text(21, 1000 * turn)
        ran(blocks, tokens)
        assert blocks.stats().cached == blocks.blocks_for(len(tokens))


def test_equal_tails_are_kept_once() -> None:
    blocks = BlockManager(10)
    first, second = opened(blocks, text(20)), opened(blocks, text(18))
    blocks.release(first, text(20), 20)
    blocks.release(second, text(18), 18)
    assert blocks.stats().cached == 2
