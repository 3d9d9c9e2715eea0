"""Adapter for Headrace's engine: requests through AsyncLLM to its worker process.

drive_engine.py MODEL WEIGHTS KV THREADS
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any, Final

from serve import Generate, Late, Prompts, Times, serve

from headrace import AsyncLLM

CONTEXT: Final = 4352  # tokens of one sequence
KV_TOKENS: Final = 16384  # of all sequences together
COUNTED: Final = {
    "steps": "steps",
    "between_seconds": "between",
    "choosing_seconds": "choosing",
    "device_seconds": "device",
}


def load() -> tuple[Generate, dict[str, Any]]:
    model, weights, kv, threads = sys.argv[1:]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def open_llm() -> AsyncLLM:
        llm = AsyncLLM(
            model,
            weights=weights,
            kv=kv,
            threads=int(threads),
            context=CONTEXT,
            kv_tokens=KV_TOKENS,
            speculation="none",
        )
        await llm.start()
        return llm

    llm = wait(open_llm())

    async def follow(prompt: list[int], new: int, arrival: float, surface: str) -> list[float]:
        times: list[float] = []
        wanted = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True, "surface": surface}
        async with llm.stream(prompt, **wanted) as stream:
            async for output in stream:
                times += [time.perf_counter() - arrival] * len(output.tokens)
        return times

    async def follow_late(each: Late, started: float) -> list[float]:
        await asyncio.sleep(max(0.0, started + each["at"] - time.perf_counter()))
        return await follow(each["prompt"], each["new"], started + each["at"], "chat")

    async def answer(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        # As AsyncLLM.generate: several prompts at once are one job in the background, whose measure is its throughput,
        # and one alone is a stream that somebody waits for.
        surface = "batch" if late is None and len(prompts) > 1 else "chat"
        late = late or []
        (before,) = await llm.client.stats()
        started = time.perf_counter()
        streams = [follow(prompt, new, started, surface) for prompt in prompts]
        found: Times = await asyncio.gather(*streams, *(follow_late(each, started) for each in late))
        (after,) = await llm.client.stats()
        host = {name: after[key] - before[key] for key, name in COUNTED.items()}
        return {"times": found[: len(prompts)], "late": found[len(prompts) :], "host": host}

    def generate(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        return wait(answer(prompts, new, late))

    return generate, {"variant": llm.variant.name, "kv_tokens": KV_TOKENS, "context": CONTEXT}


if __name__ == "__main__":
    serve(load)
