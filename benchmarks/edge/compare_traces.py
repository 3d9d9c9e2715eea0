"""Measures what exported traces cost: the same server without a collector, with a tenth and with all of its traces.

    python benchmarks/edge/compare_traces.py --rounds 7

Measures the server process's CPU per chat and per streamed chunk. Each round measures every server once, in turn, so
that noise on the machine hits all of them; the table has medians, ranges and the median of the rounds' differences.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import servers
from compare_edges import measure
from servers import Running

SHARES = {"none": None, "a tenth": 0.1, "all": 1.0}


class Collector(BaseHTTPRequestHandler):
    """Takes every trace and keeps none."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.taken += 1  # pyright: ignore[reportAttributeAccessIssue]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what exported traces cost.")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.taken = 0  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}"
    numbers: dict[tuple[str, str], list[float]] = defaultdict(list)
    running: dict[str, Running] = {}
    try:
        for name, share in SHARES.items():
            arguments = ["--tokens-per-s", "100"]
            if share is not None:
                arguments += ["--traces", url, "--sample", str(share)]
            running[name] = servers.start(f"traces-{name.replace(' ', '-')}", "serve_mock.py", arguments, core=None)
        for _ in range(options.rounds):
            for name, server in running.items():
                for measured, value in asyncio.run(measure(server)).items():
                    numbers[name, measured].append(value)
    finally:
        for server in running.values():
            server.end()
        collector.shutdown()
    print(f"The collector took {collector.taken} exports.\n")  # pyright: ignore[reportAttributeAccessIssue]
    print("| traces exported | CPU per chat | more than none | CPU per streamed chunk | more than none |")
    print("|---|---|---|---|---|")
    for name in SHARES:
        cells: list[str] = []
        for measured in ("µs per chat", "µs per chunk"):
            values, plain = numbers[name, measured], numbers["none", measured]
            more = statistics.median((one - other) / other for one, other in zip(values, plain, strict=True))
            cells += [f"{statistics.median(values):.1f} µs ({min(values):.1f} to {max(values):.1f})", f"{more:+.1%}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
