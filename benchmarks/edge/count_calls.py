"""Counts the calls that the server makes for one chat: the cost of a request as a number that no load changes.

    python benchmarks/edge/count_calls.py [--tree]

Serves the mock engine in this process, asks from another thread, and counts every call of a Python function and of a C
function on the event loop's thread, from the first byte of a request to the log line. Prints the sums by module, for a
whole and a streamed chat of 16 tokens. `--tree` prints every call in order instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvloop
from client import Connection, chat
from serve_mock import make_mock_fleet

from headrace.config import Config, ServerConfig, StorageConfig
from headrace.observe.logs import configure_log
from headrace.server import server

TOKENS: Final = 16
WARM_UP: Final = 100
SETTLE_S: Final = 0.05  # for the rest of the request before


class CallLog:
    """Every call, with its depth. Set it as the profile function of a thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []  # depth, module, name
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.calls.append((self._depth, _module(code.co_filename), code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth -= 1
        elif event == "c_call":
            self.calls.append((self._depth, "C", getattr(what, "__qualname__", repr(what))))


def _module(path: str) -> str:
    _, found, rest = path.rpartition("/headrace/")
    return rest if found else "/".join(path.split("/")[-2:])


async def _ask(port: int, log: CallLog, loop: asyncio.AbstractEventLoop, *, stream: bool) -> None:
    connection = await Connection.open(port)
    request = chat("at-once", tokens=TOKENS, stream=stream)
    for _ in range(WARM_UP):
        await connection.ask(request)
    await asyncio.sleep(SETTLE_S)
    loop.call_soon_threadsafe(sys.setprofile, log)
    await asyncio.sleep(SETTLE_S)
    log.calls.clear()
    await connection.ask(request)
    await asyncio.sleep(SETTLE_S)
    loop.call_soon_threadsafe(sys.setprofile, None)
    await asyncio.sleep(SETTLE_S)
    connection.close()


def count() -> dict[str, CallLog]:
    """Return the calls of a whole and of a streamed chat."""
    logs = {"whole": CallLog(), "streamed": CallLog()}

    async def serve() -> None:
        loop, serving = asyncio.get_running_loop(), asyncio.current_task()
        assert serving is not None

        def ask(url: str) -> None:
            try:
                for name, log in logs.items():
                    asyncio.run(_ask(int(url.rpartition(":")[2]), log, loop, stream=name == "streamed"))
            finally:
                loop.call_soon_threadsafe(serving.cancel)

        with tempfile.TemporaryDirectory() as folder, Path("/dev/null").open("w") as nowhere:
            config = Config(server=ServerConfig(port=0), storage=StorageConfig(folder=folder))
            configure_log(config.log, nowhere)
            ready = lambda url: threading.Thread(target=ask, args=(url,), daemon=True).start()  # noqa: E731
            try:
                await server.serve(config, fleet=make_mock_fleet(100.0), ready=ready)
            except asyncio.CancelledError:
                time.sleep(0)

    uvloop.run(serve())
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="store_true")
    options = parser.parse_args()
    for name, log in count().items():
        own = [module for _, module, _ in log.calls]
        print(f"{name}: {len(own) - own.count('C'):,} calls of Python functions, {own.count('C'):,} of C functions")
        if options.tree:
            for depth, module, what in log.calls:
                print(f"{'  ' * depth}{what} ({module})")
        else:
            for module, number in Counter(own).most_common(30):
                print(f"{number:6,}  {module}")
        print()


if __name__ == "__main__":
    main()
