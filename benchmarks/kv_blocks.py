"""Measures what the size of a KV block gains and costs: time between steps, copies, prefix hits and empty slots.

    python benchmarks/kv_blocks.py [MODEL] [--rounds 3] [--blocks 16,32,64,128]

Sizes take turns. "host": blocks and tables alone, in processor time. "decode": sequences that generate together.
"prefixes": short prompts with a common beginning, one after the other, in memory that holds a part of them. All sizes
give the same tokens, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Final

import msgspec
import numpy as np

from headrace.bench.engine_runs import EngineJob, run_jobs
from headrace.bench.machine import cpu_name
from headrace.engine.executors.block_kv import BlockKv
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.variant import Variant

SEQUENCES: Final = 64
PREFIXES: Final = 40  # common beginnings, each of two prompts
BETWEEN: Final = 6  # beginnings between the two prompts of one
KEPT: Final = 2560  # tokens of KV for them
VOCAB: Final = 400
LONG: Final = 8192
TIMES: Final = 20

Answers = list[list[int]]


def decode_jobs(vocab: int) -> list[EngineJob]:
    dice = random.Random(1)
    return [
        EngineJob(
            prompt=tuple(dice.randrange(vocab) for _ in range(dice.randrange(20, 120))), answer=96, surface="batch"
        )
        for _ in range(SEQUENCES)
    ]


def prefix_jobs(vocab: int) -> list[EngineJob]:
    """Two prompts for each common beginning of 20 to 200 tokens, the second one after some others."""
    dice = random.Random(2)
    begins = [tuple(dice.randrange(vocab) for _ in range(dice.randrange(20, 200))) for _ in range(PREFIXES)]
    order = [each for place in range(PREFIXES + BETWEEN) for each in (place, place - BETWEEN) if 0 <= each < PREFIXES]
    return [
        EngineJob(
            prompt=(*begins[each], *(dice.randrange(vocab) for _ in range(12))),
            answer=4,
            surface="batch",
        )
        for each in order
    ]


def host_times_us(block: int) -> tuple[float, float]:
    """Return the processor time to find, hold, publish and release a prompt of LONG tokens, and to make tables of pages
    for a step of sequences of that length."""
    tokens = list(range(LONG))
    blocks = BlockManager(2 * LONG // block, block)
    began = time.process_time()
    for _ in range(TIMES):
        table = blocks.acquire(blocks.match(tokens, ""), LONG + 16)
        assert table is not None
        blocks.take_copies()
        for computed in range(512, LONG + 1, 512):
            blocks.publish(table, tokens, computed)
        blocks.release(table, tokens, LONG)
    prompt = (time.process_time() - began) / TIMES
    kv = BlockKv([(1, 16, 16)], 1, "bf16", block_tokens=block)
    tables = np.zeros((SEQUENCES, LONG // block), dtype=np.int32)
    computed, offsets = np.full(SEQUENCES, LONG - 1, np.int32), np.arange(SEQUENCES + 1, dtype=np.int32)
    began = time.process_time()
    for _ in range(10 * TIMES):
        kv.page_tables(tables, computed, offsets)
    return prompt * 1e6, (time.process_time() - began) / (10 * TIMES) * 1e6


def decode(model: str, block: int, kv: str) -> tuple[dict[str, float], Answers]:
    variant = Variant.of(model, kv=kv, kv_block=block, context=512, kv_tokens=512 * SEQUENCES, speculation="none")
    opened = open_variant(variant, cuts_texts=False)
    try:
        run_jobs(opened, decode_jobs(VOCAB)[:4])
        engine, empty = opened.engine, list[float]()
        timing = engine.timing
        before = msgspec.structs.replace(timing)
        plan = engine.scheduler.plan

        def watched(now: float) -> object:
            found = plan(now)
            empty.append(engine.blocks.fragmentation)
            return found

        engine.scheduler.plan = watched  # pyright: ignore[reportAttributeAccessIssue]
        cpu = time.process_time()
        run = run_jobs(opened, decode_jobs(VOCAB))
        cpu = time.process_time() - cpu
        steps = (timing.steps - before.steps) / 1e6
        found = {
            "between": (timing.between - before.between) / steps,
            "cpu": cpu / steps,
            "tokens_per_s": run.tokens_per_s,
            "empty": statistics.fmean(empty),
            "copy": copy_time_us(opened),
        }
    finally:
        opened.engine.close()
    return found, run.tokens


def prefixes(model: str, block: int, kv: str) -> tuple[dict[str, float], Answers]:
    variant = Variant.of(model, kv=kv, kv_block=block, context=512, kv_tokens=KEPT, speculation="none")
    opened = open_variant(variant, cuts_texts=False)
    try:
        run = run_jobs(opened, prefix_jobs(VOCAB), batching="serial")
        salts = opened.engine.blocks.stats().salts.values()
        return {"hit": sum(each.hit for each in salts) / sum(each.asked for each in salts)}, run.tokens
    finally:
        opened.engine.close()


def copy_time_us(opened: OpenedVariant, count: int = 200) -> float:
    executor = opened.executor
    began = time.perf_counter()
    for _ in range(count):
        executor.copy_block(0, 1)
    return (time.perf_counter() - began) / count * 1e6


COLUMNS: Final = {
    "prompt": ("CPU of a long prompt's blocks", "{:,.0f} µs"),
    "tables": ("CPU of a step's long tables", "{:,.0f} µs"),
    "between": ("host between steps", "{:,.0f} µs"),
    "cpu": ("CPU per step", "{:,.0f} µs"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "empty": ("empty slots", "{:.1%}"),
    "hit": ("prefix hits", "{:.1%}"),
    "copy": ("copy of a block", "{:,.0f} µs"),
}


def show(found: dict[int, list[dict[str, float]]]) -> None:
    names = [name for name in COLUMNS if name in next(iter(found.values()))[0]]
    print("| block |", " | ".join(COLUMNS[name][0] for name in names), "|")
    print("|---:" * (1 + len(names)) + "|")
    for block, rounds in found.items():
        middles = (COLUMNS[name][1].format(statistics.median(each[name] for each in rounds)) for name in names)
        print(f"| {block} |", " | ".join(middles), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", default="16,32,64,128")
    parser.add_argument("--parts", default="host,decode,prefixes")
    parser.add_argument("--kv", default="bf16")
    given = parser.parse_args()
    runs = {"decode": decode, "prefixes": prefixes}
    parts = given.parts.split(",")
    found: dict[int, list[dict[str, float]]] = {int(block): [] for block in given.blocks.split(",")}
    answers: dict[str, Answers] = {}
    for _ in range(given.rounds):
        for block, rounds in found.items():
            times = host_times_us(block) if "host" in parts else ()
            figures = dict(zip(("prompt", "tables"), times, strict=False))
            for part in parts:
                if part in runs:
                    more, tokens = runs[part](given.model, block, given.kv)
                    assert answers.setdefault(part, tokens) == tokens, "the size of a block changed an answer"
                    figures |= more
            rounds.append(figures)
    print(f"{given.model}, KV {given.kv}, {cpu_name()}, {given.rounds} rounds")
    show(found)


if __name__ == "__main__":
    main()
