"""Passages whose KV is kept: time to the first text and cached tokens of each order of passages, in one run.

    python benchmarks/pipelines/warm.py [--model FILE] [--asked 120] [--out FILE]

Questions on docs/how-to come by Zipf's law, as popular questions do. After each, another chat with a long prompt of its
own takes KV memory. The pipelines differ in `assemble` only, and in the first word of their
instructions, so that none finds the KV of another. They answer in turn, so that all see the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace import LocalGateway
from headrace.pipelines.pipelines import Pipelines

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "how-to"
KV_TOKENS: Final = 16_384
WARM: Final = 16
OTHER_WORDS: Final = 150  # of a prompt that only takes memory
ORDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "score": {"order": "score"},
    "stable": {"order": "stable"},
    "score, kept": {"order": "score", "warm": WARM},
    "warm, kept": {"order": "warm", "warm": WARM},
}
INSTRUCTIONS: Final = "{}: answer from the sources only, in one short sentence. Cite them like [1]."


def pipelines() -> dict[str, Any]:
    return {
        f"p{place}": {
            "stages": ["search", "assemble", "generate"],
            "deadline_ms": 120_000,
            "search": {"collection": "docs", "k": 6},
            "assemble": {"keep": 3, **assemble},
            "generate": {"max_tokens": 4, "instructions": INSTRUCTIONS.format(name)},
        }
        for place, (name, assemble) in enumerate(ORDERS.items())
    }


def run(model: str | None, asked: int) -> dict[str, Any]:
    lines = Path(__file__).with_name("questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    random = np.random.default_rng(11)
    order = random.permutation(len(questions))
    drawn = [questions[order[min(int(rank) - 1, len(order) - 1)]] for rank in random.zipf(1.3, asked)]
    name = "mini" if model is None else "model"
    config = {
        "default_model": name,
        "models": {name: {**({} if model is None else {"path": model}), "options": {"kv_tokens": KV_TOKENS}}},
        "collections": {"chunk_tokens": 160, "overlap_tokens": 0},
        "pipelines": {**pipelines(), "other": {"stages": ["generate"], "generate": {"max_tokens": 1}}},
    }
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ORDERS}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, LocalGateway(config, storage={"folder": folder}) as gateway:
        gateway.collection("docs", mode="keyword").add(sorted(PAGES.glob("*.md")))
        for number, question in enumerate(drawn):
            text = f"{question} (u{number}x)"  # no answer comes from the exact cache
            for place, order_name in enumerate(ORDERS):
                answer = gateway.pipeline(f"p{place}").run(text, cache="on")
                generate = answer.report["stages"][-1]
                cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
                seen[order_name].append((generate["first_text_ms"], cached, answer.usage["prompt_tokens"]))
            words = " ".join(f"{number}{word}" for word in random.integers(0, 9999, OTHER_WORDS))
            gateway.pipeline("other").run(words)
            print(f"{number + 1} of {asked}", file=sys.stderr, flush=True)
        kept = {each["id"]: each.get("warm") for each in gateway.call(_described(gateway))}
    second = asked // 2  # the first half finds out what is popular
    return {
        "asked": asked,
        "kv_tokens": KV_TOKENS,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "orders": {
            name: {**summed(seen[name][second:]), "kept": kept[f"p{place}"]} for place, name in enumerate(ORDERS)
        },
    }


async def _described(gateway: LocalGateway) -> list[dict[str, Any]]:
    pipelines = gateway.context.services.pipelines
    assert isinstance(pipelines, Pipelines)
    return pipelines.described(gateway.caller)


def summed(seen: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    times = [each[0] for each in seen]
    return {
        "first_text_ms": {
            "mean": round(float(np.mean(times)), 1),
            **{f"p{share}": round(float(np.percentile(times, share)), 1) for share in (50, 95)},
        },
        "prompt_tokens": round(float(np.mean([each[2] for each in seen]))),
        "cached_share": round(sum(each[1] for each in seen) / sum(each[2] for each in seen), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder or file; default: mini")
    parser.add_argument("--asked", type=int, default=120, help="questions for each pipeline")
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    given = parser.parse_args()
    text = json.dumps(run(given.model, given.asked), indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
