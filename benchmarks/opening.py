"""Measures what an opening gains: the time to the first token with and without one, at the same server.

    python benchmarks/opening.py [--small draft] [--large mini] [--words 900] [--rounds 9] [--threads 2]

Starts a server with both models, and sends a new long prompt alternately to the large model alone and to the opening.
The table has medians and the median ratio of the pairs, with the time to the end. Runs in the environment of `make
test`.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

CONFIG = """
[server]
port = {port}
[models.large]
path = "{large}"
options = {{ threads = {threads}, speculation = "none", context = 2048 }}
[models.small]
path = "{small}"
options = {{ threads = {threads}, speculation = "none", context = 2048 }}
[[routing.rules]]
name = "speak at once"
when = {{ models = ["large"], surfaces = ["voice"] }}
opening = "quick"
[routing.openings.quick]
small = "small"
large = "large"
"""
WORDS = "river engine table quiet signal window paper green market story winter number simple garden music".split()


def ask(port: int, text: str, surface: str) -> tuple[float, float, dict[str, object]]:
    """Return the seconds to the first text and to the end, and the answer's mark."""
    body = {
        "model": "large",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 48,
        "surface": surface,
        "messages": [{"role": "user", "content": text}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, mark = time.perf_counter(), 0.0, {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            mark = event.get("headrace", {}).get("opening", mark)
            if not first and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                first = time.perf_counter() - began
    return first, time.perf_counter() - began, mark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", default="draft")
    parser.add_argument("--large", default="mini")
    parser.add_argument("--words", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    draw = random.Random(7)
    firsts: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "headrace.toml"
        path.write_text(
            CONFIG.format(port=port, large=options.large, small=options.small, threads=options.threads), "utf-8"
        )
        server = subprocess.Popen([sys.executable, "-m", "headrace", "serve", "--config", str(path)], cwd=folder)
        try:
            wait_until_ready(port, server)
            for turn in range(options.rounds + 1):
                pair: dict[str, tuple[float, float]] = {}
                for surface in ("chat", "voice") if turn % 2 else ("voice", "chat"):
                    text = " ".join(draw.choice(WORDS) for _ in range(options.words)) + ". Say what this text is about."
                    first, end, mark = ask(port, text, surface)
                    pair[surface] = first, end
                    if surface == "voice" and turn:
                        tokens.append(int(str(mark.get("tokens", 0))))
                if turn:  # the first is a warm-up
                    firsts.append((pair["chat"][0], pair["voice"][0]))
                    ends.append((pair["chat"][1], pair["voice"][1]))
        finally:
            server.terminate()
            server.wait()
    print("| | large alone, ms | opened, ms | median ratio of pairs |\n|---|---:|---:|---:|")
    for name, pairs in (("first text", firsts), ("end", ends)):
        alone, opened = (median(each[place] for each in pairs) * 1e3 for place in (0, 1))
        print(f"| {name} | {alone:,.0f} | {opened:,.0f} | {median(b / a for a, b in pairs):.2f} |")
    print(f"\nThe small model wrote {median(tokens):.0f} of the tokens (median).")


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit("the server has ended")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
