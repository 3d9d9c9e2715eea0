"""What a shadow costs served requests: the same chats to servers with a shadow and without one, in turns.

    python benchmarks/shadow.py [--share 0.2] [--rate 1.5] [--requests 40] [--rounds 6] [--out FILE]

Three servers have `mini` and its variant `int8`, each on one thread, and start before anything is measured: without a
shadow, with one whose copies begin at any time, and with one whose copies wait for an idle server. In a round each gets
the same chats at the same times (open loop), one server after the other, and the order alternates. A block begins when
no copy waits any more, so copies of one block never run in another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks is no package that is installed

from benchmarks.runs import commit, now
from headrace.bench.drills.drill_server import KEY, DrillServer

MODELS: Final = """
[models.mini.options]
threads = 1
prefix_cache = false
speculation = "none"

[models.mini.variants.int8]
weights = "int8"
"""
SHADOW: Final = """
[routing.shadows.int8]
variant = "mini@int8"
share = {share}
queue = 4096
when = "{when}"
tokens_per_day = 1_000_000_000
"""
ANSWER_TOKENS: Final = 32
PERCENTILES: Final = (50, 99)
MANUAL: Final = " ".join(f"Rule {number}: answer in one short sentence and stay polite." for number in range(12))


class Times(msgspec.Struct):
    """Milliseconds of the requests of a block, or of several."""

    ttft: list[float] = []
    e2el: list[float] = []

    def percentiles(self) -> dict[str, float]:
        return {
            f"{name} p{percent}": float(np.percentile(getattr(self, name), percent))
            for name in ("ttft", "e2el")
            for percent in PERCENTILES
        }


async def ask(session: aiohttp.ClientSession, number: int, times: Times) -> None:
    messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": f"What is {number} plus 7?"}]
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    began, first = time.monotonic(), 0.0
    async with session.post("/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.monotonic()
    times.ttft.append((first - began) * 1e3)
    times.e2el.append((time.monotonic() - began) * 1e3)


async def block(session: aiohttp.ClientSession, rate: float, requests: int, seed: int) -> Times:
    source, times = random.Random(seed), Times()
    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(ask(session, 1000 * seed + number, times))
            await asyncio.sleep(source.expovariate(rate))
    return times


async def copies(session: aiohttp.ClientSession) -> tuple[int, int]:
    """Return how many copies were answered, and how many wait or run."""
    async with session.get("/admin/v1/shadows") as answer:
        shadows: list[dict[str, Any]] = (await answer.json())["data"]
    done = sum(each["outcomes"].get("copied", 0) for each in shadows)
    async with session.get("/admin/v1/live") as answer:
        engines = (await answer.json())["engines"]
    return done, sum(each["waiting"] for each in shadows) + sum(each.get("running", 0) for each in engines)


async def until_quiet(session: aiohttp.ClientSession) -> int:
    """Wait for the last copy. Return how many were answered so far."""
    while (found := await copies(session))[1]:
        await asyncio.sleep(0.5)
    return found[0]


async def measure(given: argparse.Namespace) -> tuple[dict[str, list[Times]], dict[str, int]]:
    shadows = {when: MODELS + SHADOW.format(share=given.share, when=when) for when in ("always", "idle")}
    configs = {"off": MODELS, **shadows}
    found: dict[str, list[Times]] = {name: [] for name in configs}
    async with contextlib.AsyncExitStack() as stack:
        sessions: dict[str, aiohttp.ClientSession] = {}
        for name, config in configs.items():
            server = await stack.enter_async_context(DrillServer(config, name=f"shadow-{name}"))
            headers = {"authorization": f"Bearer {KEY}"}
            sessions[name] = await stack.enter_async_context(aiohttp.ClientSession(server.url, headers=headers))
            await block(sessions[name], given.rate, 4, 0)
        for name in shadows:
            await until_quiet(sessions[name])
        done: dict[str, int] = {}
        for number in range(given.rounds):
            for name in sorted(configs, reverse=bool(number % 2)):
                found[name].append(await block(sessions[name], given.rate, given.requests, number + 1))
                if name in shadows:
                    done[name] = await until_quiet(sessions[name])
            print(number + 1, {name: times[-1].percentiles() for name, times in found.items()}, flush=True)
    return found, done


def report(given: argparse.Namespace, found: dict[str, list[Times]], done: dict[str, int]) -> str:
    command = f"--share {given.share:g} --rate {given.rate:g} --requests {given.requests} --rounds {given.rounds}"
    rows = {name: [times.percentiles() for times in blocks] for name, blocks in found.items()}
    pooled = {
        name: Times(
            [each for times in blocks for each in times.ttft], [each for times in blocks for each in times.e2el]
        )
        for name, blocks in found.items()
    }
    lines = [
        "# Requests beside a shadow",
        "",
        f"`python benchmarks/shadow.py {command}`, {now()}, commit {commit()}, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores. {given.rounds * given.requests} requests to each server; the shadows answered "
        f"{done['always']} copies at any time and {done['idle']} on an idle server.",
        "",
        "| | no shadow, ms | copies at any time, ms | ratio of a round, median | least | most "
        "| copies on an idle server, ms | ratio, median | least | most |",
        "|---|" + "---:|" * 9,
    ]
    percentiles = {name: times.percentiles() for name, times in pooled.items()}
    for name, off in percentiles["off"].items():
        cells = [f"{off:.0f}"]
        for when in ("always", "idle"):
            ratios = [shadowed[name] / plain[name] for shadowed, plain in zip(rows[when], rows["off"], strict=True)]
            cells += [f"{percentiles[when][name]:.0f}", f"{statistics.median(ratios):.2f}"]
            cells += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        lines.append(f"| {name.replace('ttft', 'TTFT').replace('e2el', 'E2EL')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.2, help="of the requests that is copied")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--requests", type=int, default=40, help="of a block")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="Markdown file")
    given = parser.parse_args()
    text = report(given, *asyncio.run(measure(given)))
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)


if __name__ == "__main__":
    main()
