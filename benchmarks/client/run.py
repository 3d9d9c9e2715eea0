"""Checks whether the client of `headrace bench` is a bottleneck, and whether it agrees with another tool.

    python benchmarks/client/run.py --repeat 3 --out benchmarks/client/results/NAME.json

Ceiling: against a server with a known pace. Agreement: with guidellm, alternating on the same server. Results are
written after each measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "core"))  # its environments and commands

import commands
import install
import places
from runs import commit, end, now, options, save

import headrace
from headrace.bench.results.benchmark_result import BenchmarkResult, read
from headrace.models.model_folder import BUNDLED

HERE: Final = Path(__file__).resolve().parent
MODEL: Final = Path(str(BUNDLED)) / "mini"
KINDS: Final = ("ceiling", "agreement")
SECONDS: Final = 300.0  # of one run of a client
AGREES: Final = 0.05  # of each other
PROMPT: Final = 128  # tokens, the chat template left out
ANSWER: Final = 64
_URL: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)")

# What the mock does, and what is asked of it.
CEILING: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("200 requests/s, constant", (), ("--rate", "200", "--arrivals", "constant")),
    ("1,000 requests/s, constant", (), ("--rate", "1000", "--arrivals", "constant")),
    ("64 at once, as fast as it goes", (), ("--concurrency", "64")),
    ("256 streams of 20 tokens/s", ("--pace", "0.05"), ("--concurrency", "256")),
    ("256 streams of 50 tokens/s", ("--pace", "0.02"), ("--concurrency", "256")),
    ("1 stream of 50 tokens/s", ("--pace", "0.02"), ("--concurrency", "1")),
)
# Before a server of a known pace, whose times no load moves, and before ours with the bundled model.
AGREEMENT: Final[tuple[tuple[str, int, int], ...]] = (
    ("mock", 1, 20),
    ("mock", 8, 80),
    ("headrace", 1, 60),
    ("headrace", 4, 120),
)


def main() -> int:
    asked = options("Measure the client of headrace bench.", KINDS, repeat="rounds", out=places.BUILD / "client.json")
    signal.signal(signal.SIGTERM, end)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    results: dict[str, Any] = {
        "command": f"python benchmarks/client/run.py {shlex.join(sys.argv[1:])}".strip(),
        "started": now(),
        "finished": None,
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "ceiling": [],
        "agreement": [],
    }
    if "agreement" in asked.kinds:
        results["guidellm"] = install.set_up("guidellm")
    for _ in range(asked.repeat):
        if "ceiling" in asked.kinds:
            for name, pace, load in CEILING:
                results["ceiling"].append({"load": name, **_ceiling(pace, load)})
                save(results, asked.out)
        if "agreement" in asked.kinds:
            for server, users, requests in AGREEMENT:
                results["agreement"].append({"server": server, "users": users, **_agreement(server, users, requests)})
                save(results, asked.out)
    results["finished"] = now()
    save(results, asked.out)
    print(page(results))
    return 0


# The ceiling


def _ceiling(pace: tuple[str, ...], load: tuple[str, ...]) -> dict[str, Any]:
    with _mock(*pace) as url:
        tokens = "128" if pace else "16"
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        result = _bench(
            url, *("--model", "mock", "--seconds", "10", "--input-tokens", "64", "--output-tokens", tokens), *load
        )
        took = time.monotonic() - began
        now_used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = result.figures
    assert found.ttft is not None
    return {
        "requests_per_s": found.request_throughput,
        "tokens_per_s": found.output_throughput,
        "failed": found.failed,
        "lag_p50_ms": None if found.lag is None else found.lag.p50,
        "lag_p99_ms": None if found.lag is None else found.lag.p99,
        "ttft_p50_ms": found.ttft.p50,
        "ttft_p99_ms": found.ttft.p99,
        "itl_p50_ms": found.itl.p50 if pace and found.itl is not None else None,
        "itl_p99_ms": found.itl.p99 if pace and found.itl is not None else None,
        "cpu": (now_used.ru_utime + now_used.ru_stime - used.ru_utime - used.ru_stime) / took,
    }


# The agreement


def _agreement(server: str, users: int, requests: int) -> dict[str, Any]:
    with _mock("--first", "0.1", "--pace", "0.02") if server == "mock" else _headrace() as url:
        model = "mock" if server == "mock" else "mini"
        return {"ours": _ours(url, model, users, requests), "guidellm": _guidellm(url, model, users, requests)}


def _ours(url: str, model: str, users: int, requests: int) -> dict[str, float]:
    figures = _bench(
        url,
        *("--model", model, "--concurrency", str(users), "--requests", str(requests), "--warmup", str(2 * users)),
        *("--input-tokens", str(PROMPT), "--output-tokens", str(ANSWER)),
    ).figures
    assert figures.ttft is not None
    return {
        "ttft": figures.ttft.p50,
        "itl": figures.itl.mean,
        "e2el": figures.e2el.p50,
        "tokens": figures.output_throughput,
    }


def _guidellm(url: str, model: str, users: int, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="headrace-guidellm-") as folder:
        out = Path(folder) / "result.json"
        warm = 2 * users
        command: list[str | Path] = [
            *(places.environment("guidellm") / "bin" / "guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model={model}"),
            *("--profile", f"kind=concurrent,streams={users},warmup={warm}"),
            *("--constraint", f"kind=max_requests,count={requests + warm}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
            *("--tokenizer", f"kind=hf_auto,model={MODEL}"),
            *("--output", f"kind=json,path={out}"),
        ]
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        commands.run(command, log="client-guidellm", seconds=SECONDS, env=env)
        metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def of(name: str, what: str) -> float:
        return float(metrics[name]["successful"][what])

    return {
        "ttft": of("time_to_first_token_ms", "median"),
        "itl": of("inter_token_latency_ms", "mean"),
        "e2el": of("request_latency", "median") * 1e3,
        "tokens": of("output_tokens_per_second", "mean"),
    }


# Servers and our client


def _bench(url: str, *flags: str) -> BenchmarkResult:
    with tempfile.TemporaryDirectory(prefix="headrace-client-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "headrace", "bench", url, "--json", str(out), "--no-live", *flags]
        commands.run([*command, "--token-mismatch", "off"], log="client-bench", seconds=SECONDS, env=_environment())
        return read(out)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(headrace.__file__).parents[1])}


@contextlib.contextmanager
def _mock(*flags: str) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(HERE / "mock.py"), *flags], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _headrace() -> Iterator[str]:
    """`headrace serve` with the bundled model on one thread, so that the client has a core of its own: guidellm needs
    one, and does not measure what it takes from a server. Guesses are off: with them a chunk has several tokens."""
    with tempfile.TemporaryDirectory(prefix="headrace-client-") as folder:
        log, config = Path(folder) / "log", Path(folder) / "headrace.toml"
        config.write_text('[models.mini.options]\nthreads = 1\nspeculation = "none"\n')
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", "--port", "0", "--config", str(config)],
                stdout=out,
                stderr=out,
                env={**os.environ, **_environment(), "HEADRACE_STORAGE_FOLDER": folder},
                start_new_session=True,
            )
        try:
            give_up = time.monotonic() + 120
            while (found := _URL.search(log.read_bytes())) is None:
                if process.poll() is not None or time.monotonic() > give_up:
                    raise commands.CommandError(f"headrace serve does not start: {commands.tail(log)}")
                time.sleep(0.1)
            yield found[0].decode()
        finally:
            commands.end_group(process)


# The page


def page(results: dict[str, Any]) -> str:
    lines = ["# The client of `headrace bench`", ""]
    lines += [
        f"- {results['cores']} cores; {results['started']} to {results['finished']}; Headrace {results['commit']}"
    ]
    lines += [f"- Command: `{results['command']}`; medians of the rounds", ""]
    ceiling, agreement = results["ceiling"], results["agreement"]
    if ceiling:
        lines += ["| load | requests/s | tokens/s | lag p50, p99 | TTFT p50, p99 | ITL p50, p99 | failed | of a core |"]
        lines += ["|---" * 8 + "|"]
    for load in dict.fromkeys(each["load"] for each in ceiling):
        rounds = [each for each in ceiling if each["load"] == load]

        def of(name: str, rounds: list[dict[str, Any]] = rounds) -> float | None:
            values = [each[name] for each in rounds if each[name] is not None]
            return median(values) if values else None

        def pair(name: str) -> str:
            low, high = of(f"{name}_p50_ms"), of(f"{name}_p99_ms")
            return "-" if low is None or high is None else f"{low:.2f} ms, {high:.2f} ms"

        lines.append(
            f"| {load} | {of('requests_per_s'):,.0f} | {of('tokens_per_s'):,.0f} | {pair('lag')} | {pair('ttft')} | "
            f"{pair('itl')} | {of('failed'):.0f} | {of('cpu'):.0%} |"
        )
    if agreement:
        named = " ".join(f"{name} {version}" for name, version in results["guidellm"].items())
        lines += ["", f"Against {named}, in turns before the same server: ours / guidellm, median of the rounds.", ""]
        lines += ["| server | at once | TTFT p50 | ITL mean | E2EL p50 | output tokens/s |", "|---" * 6 + "|"]
    for server, users in dict.fromkeys((each["server"], each["users"]) for each in agreement):
        rounds = [each for each in agreement if (each["server"], each["users"]) == (server, users)]
        cells: list[str] = []
        for name in ("ttft", "itl", "e2el", "tokens"):
            mine, theirs = (median(each[tool][name] for each in rounds) for tool in ("ours", "guidellm"))
            ratio = median(each["ours"][name] / each["guidellm"][name] for each in rounds)
            mark = "" if abs(ratio - 1) <= AGREES else " **apart**"
            cells.append(f"{ratio:.3f} ({mine:.1f}, {theirs:.1f}){mark}")
        lines.append(f"| {server} | {users} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
