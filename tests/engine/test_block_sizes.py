"""The size of a KV block changes what is reserved and reused, and no token of any answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process.open_engine import OpenedVariant
from headrace.errors import RequestError
from headrace.variant import KV_BLOCKS
from tests.support.tiny_engine import open_tiny, run, tokens

SHARED = tuple(range(3, 143))
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
# Room for a few sequences, so that some are preempted and what the others leave is evicted.
OPTIONS: dict[str, Any] = {"kv_tokens": 384, "threads": 1}


def requests(turn: int) -> list[GenerationRequest]:
    """Prompts that share a beginning, with several answers to one of them; a later turn continues the first one."""
    more = tuple(range(50, 50 + 9 * turn))
    return [
        GenerationRequest(id=f"a{turn}", prompt=(*SHARED, 7, 8, *more), max_tokens=40),
        GenerationRequest(id=f"b{turn}", prompt=(*SHARED[:90], 9, *more), max_tokens=30, n=3, sampling=SAMPLED),
        GenerationRequest(id=f"c{turn}", prompt=(*range(200, 330), *more), max_tokens=40, salt="red"),
        GenerationRequest(id=f"d{turn}", prompt=(5, 6, *more), max_tokens=90, sampling=SAMPLED),
    ]


def answers(opened: OpenedVariant) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for turn in range(3):
        found |= tokens(run(opened.engine, requests(turn)))
    return found


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[str, list[list[int]]]:
    """The answers without reuse, in blocks of the default size and with memory for all."""
    opened = open_tiny(tiny_folder, threads=1, kv_tokens=4096, prefix_cache=False)
    found = answers(opened)
    opened.engine.close()
    return found


@pytest.mark.parametrize(("size", "speculation"), [*zip(KV_BLOCKS, ["ngram", "self"] * 2, strict=True)])
def test_answers_are_the_same_in_blocks_of_every_size(
    size: int, speculation: str, tiny_folder: Path, tmp_path: Path, expected: dict[str, list[list[int]]]
) -> None:
    drafts: dict[str, Any] = {"speculation": speculation}
    if speculation == "self":
        drafts |= {"skip_layers": (1,), "most_drafts": 3}
    tiers = {"kv_memory_bytes": 1 << 17, "kv_disk_bytes": 64 << 20, "kv_disk_folder": str(tmp_path)}
    opened = open_tiny(tiny_folder, kv_block=size, **OPTIONS, **drafts, **tiers)
    engine = opened.engine
    assert answers(opened) == expected
    stats = engine.stats()
    assert stats["blocks"].block_tokens == size
    assert stats["blocks"].total == 384 // size
    assert stats["blocks"].copies > 0
    assert stats["blocks"].evictions > 0
    assert engine.scheduler.stats().preempted > 0
    assert sum(salt.hit for salt in stats["blocks"].salts.values()) > 0
    assert stats["tiers"].recalled_tokens > 0
    opened.engine.close()


def test_a_table_of_blocks_reserves_at_most_a_block_more(tiny_folder: Path) -> None:
    for size in KV_BLOCKS:
        opened = open_tiny(tiny_folder, kv_block=size)
        opened.engine.submit(GenerationRequest(id="a", prompt=SHARED, max_tokens=90))
        opened.engine.step()
        blocks = opened.engine.stats()["blocks"]
        assert blocks.used * size >= len(SHARED) + 1
        assert blocks.unfilled < size
        assert blocks.used * size < len(SHARED) + 16 + size
        opened.engine.cancel("a")
        opened.engine.close()


@pytest.mark.parametrize("size", [0, 8, 24, 256, -16])
def test_other_sizes_are_rejected(size: int, tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match=rf"'kv_block' must be one of 16, 32, 64, 128 tokens, not {size}\. The"):
        LLM(str(tiny_folder), kv_block=size, cache=False)
