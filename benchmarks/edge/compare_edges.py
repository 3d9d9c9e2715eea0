"""Compares HTTP servers under the same ASGI applications: Headrace's own edge, uvicorn and granian.

    python benchmarks/edge/compare_edges.py --rounds 7

Measures the server process's CPU per chat and per streamed chunk. Each round measures every server once, in turn, so
that noise on the machine hits all of them; the table has medians and the range.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections import defaultdict
from pathlib import Path

import servers
from client import Pool, chat
from servers import Running

EDGES = ("headrace", "uvicorn", "granian")
APPS = ("echo", "headrace")
CHATS = 400
STREAMS = 16
TOKENS = 128


async def measure(server: Running) -> dict[str, float]:
    pool = Pool(server.port)
    try:
        await pool.warm(STREAMS)
        whole = [chat("at-once", tokens=16, stream=False, number=number) for number in range(64)]
        for request in whole[:20]:
            await pool.ask(request)
        cpu = server.cpu()
        for number in range(CHATS):
            await pool.ask(whole[number % len(whole)])
        per_chat = (server.cpu() - cpu) / CHATS
        request = chat("paced", tokens=TOKENS, stream=True)
        cpu = server.cpu()
        await asyncio.gather(*(pool.ask(request) for _ in range(STREAMS)))
        per_chunk = (server.cpu() - cpu) / (STREAMS * TOKENS)
    finally:
        pool.close()
    return {"µs per chat": per_chat * 1e6, "µs per chunk": per_chunk * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares HTTP servers under the same applications.")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    numbers: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    running: dict[tuple[str, str], Running] = {}
    try:
        for app in APPS:
            for edge in EDGES:
                arguments = ["--edge", edge, "--app", app]
                running[app, edge] = servers.start(f"{edge}-{app}", "serve_edge.py", arguments, core=None)
        for _ in range(options.rounds):
            for (app, edge), server in running.items():
                for name, value in asyncio.run(measure(server)).items():
                    numbers[app, edge, name].append(value)
    finally:
        for server in running.values():
            server.end()
    print("| application | edge | CPU per chat | CPU per streamed chunk |\n|---|---|---|---|")
    for app in APPS:
        for edge in EDGES:
            cells = []
            for name in ("µs per chat", "µs per chunk"):
                values = numbers[app, edge, name]
                cells.append(f"{statistics.median(values):.1f} µs ({min(values):.1f} to {max(values):.1f})")
            print(f"| {app} | {edge} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
