"""What Headrace adds to a vLLM that it stands in front of: one vLLM, asked directly and through Headrace in turns.

    python benchmarks/vllm_overhead.py --vllm ENVIRONMENT/bin/python --model build/0.5b --pairs 200 --rounds 20

One client sends every request; each has a text of its own, so that no cache answers. Pairs are single streams, one
after the other, the first of each pair by turns: the added times are medians of the differences within pairs. Rounds
are `--streams` streams at once, by turns too: the throughput is that through Headrace over that without, in each round.
vLLM's engine takes both cores of a small machine, and what shares them with it waits for milliseconds: `--bind 0` keeps
its threads on one core. Run nothing else, and believe the pairs more than the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent / "edge"))

from client import Answer, Pool

NAME: Final = "model"
START_S: Final = 1800.0  # vLLM may compile for minutes
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ON_CPU: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], environ: dict[str, str], url: str, log: Path) -> Iterator[None]:
    """Run a server from when it answers `url` until the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environ}, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
        try:
            until = time.monotonic() + START_S
            while not answers(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            for number, seconds in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def request(number: int, tokens: int) -> bytes:
    text = f"What turns the wheel of mill number {number}, and where does it stand?"
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": text}], **options}).encode()
    head = ("POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
    return "\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body


def checked(answer: Answer, tokens: int) -> Answer:
    if answer.events < tokens // 2:  # a busy engine sends some tokens together, and `ignore_eos` fixes their number
        raise RuntimeError(f"{answer.events} events for {tokens} tokens")
    return answer


def first_s(answer: Answer) -> float:
    assert answer.times is not None
    return answer.times[0] - answer.sent


async def measure(ports: dict[str, int], given: argparse.Namespace) -> dict[str, Any]:
    pools = {name: Pool(port) for name, port in ports.items()}
    number = 0

    async def ask(name: str) -> Answer:
        nonlocal number
        number += 1
        return checked(await pools[name].ask(request(number, given.tokens), timed=True), given.tokens)

    pairs: list[dict[str, Answer]] = []
    rates: list[dict[str, float]] = []
    for place in range(given.warm + given.pairs):
        names = list(pools) if place % 2 else list(pools)[::-1]
        pair = {name: await ask(name) for name in names}
        if place >= given.warm:
            pairs.append(pair)
    for place in range(1 + given.rounds):
        names = list(pools) if place % 2 else list(pools)[::-1]
        rate: dict[str, float] = {}
        for name in names:
            began = time.monotonic()
            await asyncio.gather(*(ask(name) for _ in range(given.streams)))
            rate[name] = given.streams * given.tokens / (time.monotonic() - began)
        if place:  # the first round warms up
            rates.append(rate)
    for pool in pools.values():
        pool.close()
    return summary(pairs, rates)


def summary(pairs: list[dict[str, Answer]], rates: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"pairs": len(pairs), "rounds": len(rates)}
    for what, seconds in (("ttft", first_s), ("answer", lambda answer: answer.seconds)):
        alone = [seconds(pair["alone"]) * 1e3 for pair in pairs]
        behind = [seconds(pair["behind"]) * 1e3 for pair in pairs]
        added = sorted(after - before for before, after in zip(alone, behind, strict=True))
        quartiles = statistics.quantiles(added, n=4) if len(added) > 1 else [added[0]] * 3
        found[what] = {
            "alone_p50_ms": round(statistics.median(alone), 3),
            "behind_p50_ms": round(statistics.median(behind), 3),
            "added_p50_ms": round(quartiles[1], 3),
            "added_quartiles_ms": [round(quartiles[0], 3), round(quartiles[2], 3)],
        }
    ratios = [rate["behind"] / rate["alone"] for rate in rates]
    found["throughput"] = {
        "alone_tokens_s": round(statistics.median(rate["alone"] for rate in rates), 1),
        "behind_tokens_s": round(statistics.median(rate["behind"] for rate in rates), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="a Python that has vLLM")
    parser.add_argument("--model", required=True, help="a folder in Hugging Face layout")
    parser.add_argument("--pairs", type=int, default=200, help="single streams, one after the other")
    parser.add_argument("--warm", type=int, default=10, help="pairs before them that do not count")
    parser.add_argument("--streams", type=int, default=8, help="at once in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--bind", default="nobind", help="cores of vLLM's threads, such as '0': leaves the others free")
    parser.add_argument("--arguments", default="", help="more arguments of vLLM, such as '--enforce-eager'")
    parser.add_argument("--out", type=Path, help="results file")
    given = parser.parse_args()
    engine, gateway = free_port(), free_port()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = folder / "headrace.toml"
        config.write_text(
            f'[server]\nport = {gateway}\n[storage]\nfolder = "{folder}"\n[log]\nrequests = false\n'
            f'[models.{NAME}.upstream]\nkind = "vllm"\nurl = "http://127.0.0.1:{engine}/v1"\nmodel = "{NAME}"\n'
        )
        vllm = [given.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(given.model).resolve())]
        vllm += ["--host", "127.0.0.1", "--port", str(engine), "--served-model-name", NAME]
        vllm += ["--max-model-len", "512", "--max-num-seqs", str(max(8, given.streams)), *given.arguments.split()]
        serve = [sys.executable, "-m", "headrace", "serve", "--config", str(config)]
        environ = {**OFFLINE, **ON_CPU, "VLLM_CPU_OMP_THREADS_BIND": given.bind}
        with (
            running(vllm, environ, f"http://127.0.0.1:{engine}/health", folder / "vllm.log"),
            running(serve, {}, f"http://127.0.0.1:{gateway}/health/ready", folder / "headrace.log"),
        ):
            found = asyncio.run(measure({"alone": engine, "behind": gateway}, given))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
