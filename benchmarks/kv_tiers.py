"""Measures the time to the first token of a conversation that comes back: computed again, or from host memory or disk.

    python benchmarks/kv_tiers.py MODEL [--tokens 4000] [--rounds 5] [--kv-block 16]

Two conversations take turns in a KV cache that has room for one, so that each turn finds its KV in the tier and not in
the cache. "disk" is read with an empty page cache, "disk, cached" from the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace import LLM


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    began = time.monotonic()
    for output in llm.stream(prompt, max_tokens=1, ignore_eos=True):
        if output.tokens:
            return time.monotonic() - began, output.tokens
    raise RuntimeError("The model generated no token.")


def write_idle(llm: LLM) -> None:
    while llm.opened.engine.rest():
        pass


def empty_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(model: str, tokens: int, rounds: int, kv: str, kv_block: int) -> dict[str, list[float]]:
    dice = random.Random(1)
    room = 1 << 34
    kinds: dict[str, dict[str, Any]] = {
        "cold": {},
        "memory": {"kv_memory_bytes": room},
        "disk, cached": {"kv_disk_bytes": room},
        "disk": {"kv_disk_bytes": room},
    }
    found: dict[str, list[float]] = {}
    expected: list[list[int]] = []
    for kind, options in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            if "kv_disk_bytes" in options:
                options = {**options, "kv_disk_folder": folder}
            options |= {"context": tokens + 64, "kv_tokens": tokens + 512, "kv": kv, "kv_block": kv_block}
            with LLM(model, speculation="none", **options) as llm:
                if not expected:
                    size = llm.tokenizer.vocab_size
                    prompts = [[dice.randrange(size // 2) for _ in range(tokens)] for _ in range(2)]
                turns = 2 if kind == "cold" else 2 + 2 * rounds
                for turn in range(turns):
                    if kind == "disk":
                        empty_page_cache(Path(folder))
                    seconds, token = first_token_s(llm, prompts[turn % 2])
                    write_idle(llm)
                    if kind == "cold":
                        expected.append(token)
                    assert token == expected[turn % 2], "the tier changed the answer"
                    if kind == "cold" or turn >= 2:
                        found.setdefault(kind, []).append(seconds)
                if kind == "cold":
                    first_token_s(llm, prompts[0])
                    found["KV cache"] = [first_token_s(llm, prompts[0])[0] for _ in range(rounds)]
                    print(f"KV of a conversation: {tokens * llm.opened.executor.kv_bytes_per_token / 2**20:.0f} MiB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--kv-block", type=int, default=16)
    given = parser.parse_args()
    found = measure(given.model, given.tokens, given.rounds, given.kv, given.kv_block)
    cold = statistics.median(found["cold"])
    print("| from | TTFT, median | least to most | of cold |\n|---|---:|---|---:|")
    for kind, seconds in found.items():
        median = statistics.median(seconds)
        print(
            f"| {kind} | {median * 1e3:,.0f} ms | {min(seconds) * 1e3:,.0f} to {max(seconds) * 1e3:,.0f} ms "
            f"| {median / cold:.3f} |"
        )


if __name__ == "__main__":
    main()
