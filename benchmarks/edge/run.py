"""Measures the overhead of Headrace's gateway with a mock engine, next to a bare echo server.

    python benchmarks/edge/run.py --repeat 5 --out benchmarks/edge/results/NAME.json

The results file is rewritten after every turn. See ../README.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import resource
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

import measures
import servers
import uvloop
from client import FailedError
from measures import Sizes
from report import table
from runs import commit, end, listed, now, save
from servers import Running, ServerError

FORMAT: Final = 1  # of the results file
KINDS: Final = ("whole", "streamed", "chunks", "streams", "memory")
PEER_KINDS: Final = ("whole", "streamed", "chunks")
CHUNK_PACE: Final = 100.0  # tokens a second of each of the streams whose chunks are counted


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, end)
    sizes = Sizes(memory_last=options.memory_requests)
    if options.quick:
        sizes = sizes.short()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16_384)), hard))  # the servers inherit it
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    results: dict[str, Any] = {
        "format": FORMAT,
        "command": f"python benchmarks/edge/run.py {shlex.join(sys.argv[1:])}".strip(),
        "started": now(),
        "finished": None,
        "quick": options.quick,
        "repeat": options.repeat,
        "sizes": {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
        "machine": _machine(cores),
        "versions": _versions(),
        "failures": [],
        "turns": [],
    }

    def fail(server: str, reason: str) -> None:
        results["failures"].append({"server": server, "reason": reason})
        print(f"{server}: {reason}", file=sys.stderr, flush=True)

    peers = options.peers
    if "litellm" in peers:
        try:
            results["versions"]["litellm"] = servers.set_up_litellm()
        except ServerError as error:
            fail("litellm", str(error))
            peers = []
    if options.setup:
        return 1 if results["failures"] else 0
    if client_core is not None:
        os.sched_setaffinity(0, {client_core})

    with ExitStack() as stack:

        def keep(running: Running) -> Running:
            stack.callback(running.end)
            return running

        # Two of each: streams for the counting of chunks are faster than those of readers.
        def ours(name: str, script: str, pace: float, core: int | None = server_core) -> Running:
            return keep(servers.start(name, script, ["--tokens-per-s", str(pace)], core=core))

        entrants = {
            "chunks": {
                "echo": ours("echo", "echo.py", CHUNK_PACE),
                "headrace": ours("headrace", "serve_mock.py", CHUNK_PACE),
            },
            "streams": {
                "echo": ours("echo-streams", "echo.py", sizes.tokens_per_s),
                "headrace": ours("headrace-streams", "serve_mock.py", sizes.tokens_per_s),
            },
        }
        upstream = ours("upstream", "echo.py", CHUNK_PACE, client_core)
        for number in range(1, options.repeat + 1):
            for kind in options.only:
                if kind == "memory" and number > 1:
                    continue  # it is of one long run
                there = entrants["streams" if kind == "streams" else "chunks"]
                if kind == "memory":
                    there = {"headrace": ours("headrace-memory", "serve_mock.py", CHUNK_PACE)}
                names = [*there, *(peers if kind in PEER_KINDS else ())]
                # Each round begins one server later than the one before.
                for place in range(len(names)):
                    name = names[(place + number - 1) % len(names)]
                    print(f"round {number} of {options.repeat}: {kind}, {name}", flush=True)
                    try:
                        server = there.get(name) or servers.start_litellm(upstream, core=server_core)
                    except ServerError as error:
                        fail(name, str(error))
                        continue
                    try:
                        values = _turn(MEASURES[kind](server, sizes, number))
                    except (FailedError, OSError, TimeoutError) as error:
                        fail(name, f"{kind}: {type(error).__name__} {str(error)[:300]}")
                        continue
                    finally:
                        if name in there:
                            server.settle()
                        else:  # a peer lives for a turn: what it was overloaded with goes with it
                            if (code := server.ended()) is not None:
                                fail(name, f"its process ended with {code} in round {number}, {kind}")
                            server.end()
                    turn = {"round": number, "kind": kind, "server": name, "load": os.getloadavg()[0], **values}
                    results["turns"].append(turn)
                    save(results, options.out)
    results["finished"] = now()
    save(results, options.out)
    print()
    print(table(results))
    return 0


Measure = Callable[[Running, Sizes, int], Awaitable[dict[str, float]]]
MEASURES: Final[dict[str, Measure]] = {
    "whole": lambda server, sizes, number: measures.open_loop(server, sizes, stream=False, seed=number),
    "streamed": lambda server, sizes, number: measures.open_loop(server, sizes, stream=True, seed=number),
    "chunks": lambda server, sizes, number: measures.chunks(server, sizes),
    "streams": lambda server, sizes, number: measures.streams(server, sizes),
    "memory": lambda server, sizes, number: measures.memory(server, sizes),
}


def _turn(measure: Awaitable[dict[str, float]]) -> dict[str, float]:
    """With nothing of the client's own that stops it."""

    async def run() -> dict[str, float]:
        return await measure

    gc.collect()
    gc.disable()
    try:
        return uvloop.run(run())
    finally:
        gc.enable()


def _machine(cores: list[int]) -> dict[str, Any]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()}"
    return {"cpu": cpu, "cores": len(cores), "memory": memory, "system": system, "python": platform.python_version()}


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("uvicorn", "uvloop", "httptools", "msgspec")}
    return {"headrace": commit(), **packages}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what Headrace's gateway costs.")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--only", type=listed(KINDS), default=list(KINDS), help="which measurements")
    parser.add_argument("--peers", type=listed(("litellm",)), default=["litellm"], help="litellm, or nothing")
    parser.add_argument("--memory-requests", type=int, default=Sizes().memory_last, help="of the measurement of memory")
    parser.add_argument("--setup", action="store_true", help="install the peer, and no more")
    parser.add_argument("--out", type=Path, default=servers.BUILD / "results.json")
    options = parser.parse_args()
    if options.quick:
        options.repeat = 1
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
