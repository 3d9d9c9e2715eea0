"""Measures what observing a request costs: CPU time of its record, its latencies, objectives and log fields.

    python benchmarks/edge/observation_cost.py [--chats 2000]

Serves streamed chats of eight tokens from an engine that computes nothing, with objectives, in one process, and adds up
the CPU time of the thread inside `RequestObserver.finish_call`. Prints it per chat beside the CPU time of the whole
chat, client included. On a busy machine both grow, because caches and cores are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests is no package that is installed

from headrace.config import SloConfig
from headrace.gateway.observation.request_observer import RequestObserver
from tests.support.running_server import config_of, serving, words


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                self.seconds += time.thread_time() - began

        return timed


async def measure(chats: int) -> tuple[float, float]:
    """Return CPU seconds of observing, and of everything."""
    watch = Stopwatch()
    RequestObserver.finish_call = watch.around(RequestObserver.finish_call)
    with tempfile.TemporaryDirectory() as folder:
        slo = {"chat": SloConfig(ttft_p95_ms=300, itl_p95_ms=60, availability=0.999)}
        config = msgspec.structs.replace(config_of(Path(folder)), slo=slo)
        async with serving(config=config) as server:
            server.engine.answer = words(*"abcdefgh")
            client = await server.client()
            for number in range(chats + 100):
                if number == 100:  # the first ones warm up
                    watch.seconds, began = 0.0, time.thread_time()
                assert (await client.chat(stream=True)).status == 200
            return watch.seconds, time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=2000)
    given = parser.parse_args()
    observing, whole = asyncio.run(measure(given.chats))
    share = observing / whole
    print(f"{observing / given.chats * 1e6:.1f} µs of {whole / given.chats * 1e6:.0f} µs per chat: {share:.1%}")


if __name__ == "__main__":
    main()
