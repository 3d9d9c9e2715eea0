"""The slots of recurrent states, and what of a prefix can be reused with them."""

from __future__ import annotations

import random

import pytest

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_table import BlockTable
from headrace.engine.memory.state_pool import StatePool
from headrace.errors import RequestError
from tests.engine.memory.block_users import SIZE, cached, opened, text


def manager(count: int = 20, *, running: int = 3, kept: int = 2) -> BlockManager:
    return BlockManager(count, SIZE, states=StatePool(running, kept))


def computed_up_to(blocks: BlockManager, tokens: list[int], *boundaries: int) -> BlockTable:
    """A sequence that was computed, with its state kept at these boundaries."""
    table = opened(blocks, tokens)
    for boundary in boundaries:
        blocks.keep_state(table, tokens, boundary)
    return table


def test_a_prefix_is_reused_up_to_the_last_kept_state() -> None:
    blocks = manager()
    tokens = text(70)
    blocks.release(computed_up_to(blocks, tokens, 32), tokens, 70)
    blocks.check()
    assert cached(blocks, tokens) == 32
    assert cached(blocks, tokens[:40]) == 32
    assert cached(blocks, tokens[:32]) == 0  # its last token has to be computed
    assert cached(blocks, text(40, start=5)) == 0


def test_a_state_is_copied_before_it_is_replaced() -> None:
    blocks = manager()
    states = blocks.states
    assert states is not None
    tokens = text(40)
    first = computed_up_to(blocks, tokens, 32)
    blocks.release(first, tokens, 40)
    again = opened(blocks, tokens)
    assert again.cached_tokens == 32
    (kept, resumed) = states.take_copies()
    assert kept[0] == first.state_slot
    assert resumed == (kept[1], again.state_slot)
    assert states.take_copies() == []


def test_the_state_used_longest_ago_goes_first() -> None:
    blocks = manager(kept=2)
    one, two, three = (text(20, start=start) for start in (0, 100, 200))
    for tokens in (one, two):
        blocks.release(computed_up_to(blocks, tokens, 16), tokens, 20)
    blocks.release(opened(blocks, one), one, 20)
    blocks.release(computed_up_to(blocks, three, 16), three, 20)
    blocks.check()
    assert [cached(blocks, tokens) for tokens in (one, two, three)] == [16, 0, 16]


def test_the_state_of_an_output_rolls_on() -> None:
    blocks = manager()
    states = blocks.states
    assert states is not None
    tokens = text(80)
    table = computed_up_to(blocks, tokens, 16)
    for boundary in (32, 48, 64):
        blocks.keep_state(table, tokens, boundary, rolling=True)
        assert states.snapshots == 2
    blocks.release(table, tokens, 70)
    assert cached(blocks, tokens) == 64
    assert cached(blocks, [*tokens[:48], 999, 999]) == 16
    blocks.check()


def test_a_state_goes_with_its_block() -> None:
    blocks = manager(count=3)
    states = blocks.states
    assert states is not None
    tokens = text(40)
    blocks.release(computed_up_to(blocks, tokens, 16, 32), tokens, 40)
    other = text(40, start=500)
    blocks.release(opened(blocks, other), other, 40)
    assert states.snapshots == 0
    blocks.check()


def test_no_sequence_starts_without_a_slot() -> None:
    blocks = manager(running=1)
    table = opened(blocks, text(5))
    assert blocks.acquire(blocks.match(text(5, start=50), ""), 5) is None
    blocks.release(table, text(5), 5)
    assert blocks.acquire(blocks.match(text(5, start=50), ""), 5) is not None
    blocks.check()


def test_prefixes_with_a_state_cannot_be_pinned() -> None:
    with pytest.raises(RequestError, match="recurrent layers") as caught:
        manager().pin(text(32), "")
    assert caught.value.parameter == "pin"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_and_goes_the_accounting_holds(seed: int) -> None:
    draw = random.Random(seed)
    blocks = manager(count=24, running=4, kept=3)
    states = blocks.states
    assert states is not None
    live: list[tuple[BlockTable, list[int], int]] = []
    for _ in range(300):
        if live and draw.random() < 0.6:
            table, tokens, computed = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.4:
                blocks.release(table, tokens, computed)
            else:
                computed = min(len(tokens), (computed // SIZE + 1) * SIZE)
                blocks.keep_state(table, tokens, computed, rolling=draw.random() < 0.5)
                live.append((table, tokens, computed))
        else:
            tokens = text(draw.randrange(1, 90), start=100 * draw.randrange(3))
            match = blocks.match(tokens, draw.choice(["", "a"]))
            assert match.cached_tokens % SIZE == 0
            assert match.cached_tokens < len(tokens)
            table = blocks.acquire(match, len(tokens))
            if table is not None:
                live.append((table, tokens, table.cached_tokens))
        for source, target in states.take_copies():
            assert 0 <= source < 7
            assert 0 <= target < 7
        blocks.check()
