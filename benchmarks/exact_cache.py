"""How long the exact cache takes: the key of a request, a hit from memory, a hit from sqlite.

    python benchmarks/exact_cache.py [--prompt 2000] [--answer 200] [--entries 1000] [--seconds 2]

A hit is counted from the prompt's tokens to the last chunk written for the client: the key, the look, and the answer's
chunks as a chat streams them. Prints one JSON object; times are in microseconds. Each of the measurements takes
`--seconds` at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from millrace.engine.request import Request
from millrace.engine.stream import Stream
from millrace.gateway.asked import Asked, Piece, Usage
from millrace.gateway.caches.exact import ExactCache
from millrace.gateway.caches.flight import Terms
from millrace.gateway.caches.key import Wanted, wanted_of
from millrace.gateway.caches.memory_store import MemoryStore
from millrace.gateway.caches.modes import Modes
from millrace.gateway.caches.sqlite_store import SqliteStore
from millrace.gateway.caches.stores import Guarded, Store
from millrace.gateway.chat import ChatStream
from millrace.gateway.database import Database
from millrace.gateway.exchange import Caller, Exchange
from millrace.gateway.fleet import Served
from millrace.models.loading import BUNDLED, open_model

ASKED = Asked(model="mini", messages=[{"role": "user", "content": "Hello"}], stream=True, include_usage=True)


class NoEngine:
    def stream(self, request: Request) -> Stream:
        raise AssertionError("everything is a hit")

    async def stats(self) -> list[dict[str, Any]]:
        return []


class Said:
    """An answer that is there already."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    async def run(self, take: Callable[[Piece], bool]) -> bool:
        return all(map(take, self._pieces))

    def cancel(self) -> None:
        pass


def prompts(count: int, tokens: int) -> list[tuple[int, ...]]:
    source = random.Random(1)
    return [tuple(source.randrange(32_000) for _ in range(tokens)) for _ in range(count)]


def key_of(served: Served, prompt: tuple[int, ...]) -> Wanted:
    wanted = wanted_of(tenant="a", served=served, asked=ASKED, prompts=[prompt], seeded=False)
    assert wanted is not None
    return wanted


async def hit(cache: ExactCache, served: Served, prompt: tuple[int, ...]) -> int:
    """The bytes written."""
    looked = await cache.look(key_of(served, prompt))
    assert looked.hit is not None
    events = ChatStream(Exchange(caller=Caller(tenant="a"), asked=ASKED, served=served))
    written = len(events.begin())

    def take(piece: Piece) -> bool:
        nonlocal written
        written += len(events.piece(piece))
        return True

    await looked.hit.run(take)
    return written + len(events.end())


async def timed(work: Callable[[tuple[int, ...]], Awaitable[object]], asked: list[Any], seconds: float) -> list[float]:
    """Microseconds, sorted."""
    source = random.Random(2)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(found) < 20_000:
        prompt = source.choice(asked)
        begun = time.perf_counter()
        await work(prompt)
        found.append((time.perf_counter() - begun) * 1e6)
        if len(found) % 100 == 0:
            await asyncio.sleep(0)
    return sorted(found)


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[len(times) * 99 // 100], 1),
        "count": len(times),
    }


async def measured(store: Store, served: Served, asked: list[Any], answer: list[Piece], seconds: float) -> Any:
    cache = ExactCache(Guarded(store, get_s=5.0, put_s=5.0), Modes(mode="on"))
    end = time.perf_counter() + seconds
    filled: list[Any] = []
    for prompt in asked:
        looked = await cache.look(key_of(served, prompt))
        generation = cache.generate(looked, Terms(), lambda: Said(answer))
        await generation.run(lambda piece: True)
        generation.cancel()
        while cache.flights:
            await asyncio.sleep(0)
        filled.append(prompt)
        if time.perf_counter() > end:
            break
    found = summary(await timed(lambda prompt: hit(cache, served, prompt), filled, seconds))
    size = await store.size()
    assert size is not None
    return {**found, "entries": size.entries, "bytes_per_entry": size.bytes // size.entries}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=200, help="pieces of an answer")
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0, help="most, of each measurement")
    options = parser.parse_args()
    served = Served(
        name="mini@int4",
        engine=NoEngine(),
        tokenizer=open_model(BUNDLED / "mini").tokenizer,
        context=32_768,
        fingerprint="fp_benchmark",
    )
    asked = prompts(options.entries, options.prompt)
    usage = Usage(prompt_tokens=options.prompt, output_tokens=options.answer)
    answer = [
        *(Piece(0, f" word{number % 10}") for number in range(options.answer)),
        Piece(0, finish="stop", usage=usage),
    ]

    async def key(prompt: tuple[int, ...]) -> None:
        key_of(served, prompt)

    found: dict[str, Any] = {"prompt_tokens": options.prompt, "answer_pieces": options.answer}
    found["key"] = summary(await timed(key, asked, options.seconds))
    found["memory_hit"] = await measured(MemoryStore(), served, asked, answer, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        try:
            found["sqlite_hit"] = await measured(
                SqliteStore(database, bound_s=5.0), served, asked, answer, options.seconds
            )
        finally:
            await database.close()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
