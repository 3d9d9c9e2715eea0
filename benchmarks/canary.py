"""Measures how many requests a canary of a real variant takes: planted regressions, an equal variant and a better one.

    python benchmarks/canary.py [--kinds noise,int4,slower,equal,faster] [--trials 5] [--most 1500] [--out FILE]

A server of its own serves the bundled model and spoiled copies of it, each in an engine process. For each trial a
canary is started with half of the requests and the default tolerances, and chats are sent, two at a time, until it ends
by itself or the candidate has had its most requests. All numbers are those of `GET /admin/v1/canary`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests and benchmarks are no packages that are installed

from benchmarks.runs import commit, listed, now
from headrace.bench.drills.drill_server import KEY, DrillServer
from tests.support.models.planted_defects import with_noise

COMMON: Final = 'threads = 1\nprefix_cache = false\ncontext = 512\nspeculation = "none"'
MODELS: Final = {  # what differs from the bundled model
    "mini": "",
    "equal": "",
    "noise": "",
    "int4": 'weights = "int4-channel"\nkeep = ["*=int4-channel"]',
    "slower": "max_rows = 16",
}
CANARY: Final = """
[canary]
stages = [50]
stage_requests = 500
stage_s = 0.001
promote = "auto"
reference = "mini"
pairs = 1.0
queue = 4096
tokens_per_day = 1_000_000_000
every_s = 0.5
"""
KINDS: Final = {  # candidate and control
    "noise": ("noise", "mini"),
    "int4": ("int4", "mini"),
    "slower": ("slower", "mini"),
    "equal": ("equal", "mini"),
    "faster": ("mini", "slower"),
}
EXPECTED: Final = {"noise": "rolled_back", "int4": "rolled_back", "slower": "rolled_back"}
CLIENTS: Final = 2
MANUAL: Final = " ".join(f"Rule {number}: answer in one short sentence and stay polite." for number in range(12))
TEMPLATES: Final = (
    "What is {number} plus {other}?",
    "Name something that costs {number} euros.",
    "Write a sentence about {number} boats on a river.",
    "Is {number} larger than {other}?",
)


class Trial(msgspec.Struct):
    kind: str
    phase: str
    reason: str
    candidate_requests: int
    control_requests: int
    compared: int
    quality: float
    ttft_ratio: float  # candidate's p50 by the control's
    seconds: float


class Run:
    def __init__(self, session: aiohttp.ClientSession, most: int) -> None:
        self._session = session
        self._most = most
        self._numbers = itertools.count()

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, path, json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def _canary(self, control: str) -> dict[str, Any]:
        rows = (await self._call("GET", "/admin/v1/canary"))["data"]
        return next(each for each in rows if each["control"] == control)

    async def _ask(self, control: str) -> None:
        number = next(self._numbers)
        question = TEMPLATES[number % len(TEMPLATES)].format(number=number, other=7 * number % 101)
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": question}]
        body = {"model": control, "messages": messages, "max_tokens": 16, "temperature": 0}
        await self._call("POST", "/v1/chat/completions", body | {"metadata": {"conversation": str(number)}})

    async def trial(self, kind: str) -> Trial:
        candidate, control = KINDS[kind]
        began = time.monotonic()
        await self._call("POST", "/admin/v1/canary", {"candidate": candidate, "control": control})
        ended = asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                await self._ask(control)

        async def watch() -> dict[str, Any]:
            while True:
                found = await self._canary(control)
                evidence = found["evidence"] or {"candidate": {"requests": 0}}
                if found["phase"] != "running" or evidence["candidate"]["requests"] >= self._most:
                    ended.set()
                    return found
                await asyncio.sleep(0.5)

        found, *_ = await asyncio.gather(watch(), *(client() for _ in range(CLIENTS)))
        if found["phase"] != "rolled_back":
            await self._call("POST", "/admin/v1/canary/rollback", {"control": control})
        evidence, agreement = found["evidence"], found["evidence"]["agreement"]
        p50 = {arm: evidence[arm]["latency"]["ttft"]["p50_ms"] for arm in ("control", "candidate")}
        return Trial(
            kind,
            found["phase"],
            found["reason"],
            evidence["candidate"]["requests"],
            evidence["control"]["requests"],
            agreement["compared"] if agreement else 0,
            evidence["candidate"]["quality"],
            p50["candidate"] / p50["control"],
            time.monotonic() - began,
        )


def config(noisy: Path) -> str:
    paths = {name: str(noisy) if name == "noise" else "mini" for name in MODELS}
    tables = [
        f'[models.{name}]\npath = "{path}"\n\n[models.{name}.options]\n{COMMON}\n{MODELS[name]}\n'
        for name, path in paths.items()
    ]
    return "\n".join(tables) + CANARY


async def measure(kinds: list[str], trials: int, most: int) -> list[Trial]:
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        noisy = with_noise(Path(folder) / "noisy", "model.layers.3.mlp.down_proj.weight", 1.0)
        async with DrillServer(config(noisy), name="canary") as server:
            headers = {"authorization": f"Bearer {KEY}"}
            async with aiohttp.ClientSession(server.url, headers=headers) as session:
                run = Run(session, most)
                for number, kind in itertools.product(range(trials), kinds):
                    found.append(trial := await run.trial(kind))
                    print(number + 1, trial, flush=True)
    return found


def report(trials: list[Trial], most: int) -> str:
    lines = [
        "# Canaries of real variants",
        "",
        f"`python benchmarks/canary.py --trials {len(trials) // len({each.kind for each in trials})} --most {most}`, "
        f"{now()}, commit {commit()}.",
        "",
        "| candidate | trials | as expected | by | quality | TTFT of the control's | its requests, median | most |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        if not (rows := [each for each in trials if each.kind == kind]):
            continue
        right = sum(each.phase == EXPECTED.get(kind, "promoted") for each in rows)
        measures = sorted({each.reason.rpartition(": ")[2] for each in rows})
        requests = [each.candidate_requests for each in rows]
        lines.append(
            f"| {kind} | {len(rows)} | {right} | {'; '.join(measures)} "
            f"| {statistics.median(each.quality for each in rows):.3f} "
            f"| {statistics.median(each.ttft_ratio for each in rows):.2f} "
            f"| {statistics.median(requests):g} | {max(requests)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=listed(KINDS), default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--most", type=int, default=1500, help="requests of the candidate after which a trial ends")
    parser.add_argument("--out", type=Path, help="Markdown file")
    given = parser.parse_args()
    text = report(asyncio.run(measure(given.kinds, given.trials, given.most)), given.most)
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)


if __name__ == "__main__":
    main()
