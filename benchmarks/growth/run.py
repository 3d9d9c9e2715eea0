"""Measures how cost grows with prompt length, concurrent streams, threads and model size, in Headrace's engine.

    python benchmarks/growth/run.py --out benchmarks/growth/results/NAME.json
    python benchmarks/growth/plots.py benchmarks/growth/results/NAME.json

An engine is a worker process behind AsyncLLM. Each timing is the minimum of its repetitions, which excludes what else
the machine does.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import sys
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "core"))  # its models and places

import places
from probes import Prober, describe
from runs import commit, end, now, options, save

from headrace import AsyncLLM
from headrace.models.synthetic.random_model import write_random_model

KINDS: Final = ("prompt", "streams", "threads", "model")
SHAPE: Final = "qwen2.5-0.5b"
LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
STREAMS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
THREADS: Final = (1, 2)
MODELS: Final = (
    ("qwen2.5-0.5b", "int8"),
    ("qwen2.5-0.5b", "int4"),
    ("qwen2.5-1.5b", "int8"),
    ("qwen2.5-1.5b", "int4"),
    ("qwen2.5-7b", "int4"),
)
PROMPT: Final = 64  # tokens, where its length is not what is measured
ANSWER: Final = 32
SECONDS: Final = 600.0  # of one request


async def main() -> int:
    out = places.BUILD / "growth.json"
    asked = options("Measure how our engine's cost grows.", KINDS, repeat="of which the least counts", out=out)
    results: dict[str, Any] = {
        "command": f"python benchmarks/growth/run.py {shlex.join(sys.argv[1:])}".strip(),
        "started": now(),
        "finished": None,
        "commit": commit(),
        "machine": describe(Prober(max(THREADS)).machine),
        "timings": [],
    }
    run = Run(results, asked.out, asked.repeat)
    for kind in asked.kinds:
        await getattr(run, kind)()
    results["finished"] = now()
    save(results, asked.out)
    return 0


class Run:
    def __init__(self, results: dict[str, Any], out: Path, repeat: int) -> None:
        self._results = results
        self._out = out
        self._repeat = repeat
        self._random = random.Random(1)

    async def prompt(self) -> None:
        async with self._engine(SHAPE, "int8", context=LENGTHS[-1] + 64, kv_tokens=LENGTHS[-1] + 512) as llm:
            await self._first(llm, PROMPT)
            for length in LENGTHS:
                times = [await self._first(llm, length) for _ in range(self._repeat if length < 4096 else 1)]
                self._note("prompt", length, "int8", ttft_s=min(times))

    async def streams(self) -> None:
        for weights in ("int8", "int4"):
            most = STREAMS[-1]
            room = most * (PROMPT + ANSWER + 32)
            async with self._engine(SHAPE, weights, context=512, kv_tokens=room, max_sequences=most) as llm:
                await self._first(llm, PROMPT)
                for count in STREAMS:
                    runs = [await self._together(llm, count) for _ in range(self._repeat)]
                    best = max(runs, key=lambda each: each["tokens_per_s"])
                    self._note("streams", count, weights, **best)

    async def threads(self) -> None:
        for weights in ("int8", "int4"):
            for count in THREADS:
                async with self._engine(SHAPE, weights, threads=count) as llm:
                    await self._first(llm, PROMPT)
                    self._note("threads", count, weights, **await self._alone(llm))

    async def model(self) -> None:
        for shape, weights in MODELS:
            async with self._engine(shape, weights) as llm:
                await self._first(llm, PROMPT)
                self._note("model", shape, weights, **await self._alone(llm))

    # One measurement

    async def _alone(self, llm: AsyncLLM) -> dict[str, float]:
        """Measure one stream: TTFT of a 512-token prompt, and the tokens after it."""
        firsts, gaps = [], []
        for _ in range(self._repeat):
            times = await self._follow(llm, 512, ANSWER)
            firsts.append(times[0])
            gaps.append((times[-1] - times[0]) / (len(times) - 1))
        return {"ttft_s": min(firsts), "token_s": min(gaps)}

    async def _first(self, llm: AsyncLLM, length: int) -> float:
        return (await self._follow(llm, length, 1))[0]

    async def _together(self, llm: AsyncLLM, count: int) -> dict[str, float]:
        began = time.perf_counter()
        found = await asyncio.gather(*(self._follow(llm, PROMPT, ANSWER, "batch") for _ in range(count)))
        took = time.perf_counter() - began
        gaps = [late - early for times in found for early, late in pairwise(times)]
        return {
            "tokens_per_s": count * ANSWER / took,
            "token_s": median(gaps),
            "ttft_s": median(times[0] for times in found),
        }

    async def _follow(self, llm: AsyncLLM, length: int, new: int, surface: str = "chat") -> list[float]:
        """Return the seconds until each token, of background requests: chats would be rejected for long waits."""
        prompt = [self._random.randrange(1000, 100_000) for _ in range(length)]
        began = time.perf_counter()
        times: list[float] = []
        async with asyncio.timeout(SECONDS):
            async with llm.stream(prompt, max_tokens=new, temperature=0.0, ignore_eos=True, surface=surface) as stream:
                async for output in stream:
                    times += [time.perf_counter() - began] * len(output.tokens)
        return times

    def _engine(self, shape: str, weights: str, **options: Any) -> _Engine:
        return _Engine(shape, weights, {"context": 2048, "kv_tokens": 4096, **options})

    def _note(self, kind: str, at: int | str, weights: str, **values: float) -> None:
        self._results["timings"].append({"kind": kind, "at": at, "weights": weights, **values})
        said = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        print(f"  {kind:8} {at!s:>14} {weights:5} {said}", flush=True)
        save(self._results, self._out)


class _Engine:
    """Start a worker with a model of random weights, created if needed."""

    def __init__(self, shape: str, weights: str, options: dict[str, Any]) -> None:
        self._shape = shape
        self._weights = weights
        self._options = options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncLLM:
        folder = places.model(self._shape, "hf")
        if not (folder / "config.json").exists():
            print(f"{self._shape}: making it", flush=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_random_model(self._shape, folder, seed=0, dtype="bf16")
        llm = AsyncLLM(folder, weights=self._weights, speculation="none", **self._options)
        return await self._stack.enter_async_context(llm)

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    sys.exit(asyncio.run(main()))
