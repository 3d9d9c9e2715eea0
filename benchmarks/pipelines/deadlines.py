"""Short deadlines: what a pipeline that sets no budget answers with, on questions about Headrace's documentation.

    python benchmarks/pipelines/deadlines.py --encoder FOLDER [--asked 20]

Counts the outcomes of each deadline: the model's answer, or part of it; sentences of the sources; the text that says
that nothing was found in time; and errors, of which there should be none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from headrace import LocalGateway
from headrace.gateway.api_errors import ApiError
from headrace.server.local_gateway import LocalPipeline

PAGES: Final = Path(__file__).parents[2] / "docs" / "how-to"
DEADLINES_MS: Final = (2000, 1050, 250, 100, 20)
DOCS: Final[dict[str, Any]] = {
    "stages": ["search", "assemble", "generate", "check"],
    "search": {"collection": "docs", "k": 6},
    "assemble": {"keep": 3},
    "generate": {"max_tokens": 64},
}


def outcome(pipeline: LocalPipeline, question: str, deadline_ms: int) -> str:
    try:
        answer = pipeline.run(question, deadline_ms=deadline_ms)
    except ApiError as error:
        return f"error {error.status} {error.code}"
    if answer.report["skipped"] and not answer.sources:
        return "nothing was found in time"
    if "generate" not in answer.report["skipped"]:
        return "answer of the model"
    return "part of the model's answer" if answer.finish == "deadline" else "sentences of the sources"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="folder of an encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--asked", type=int, default=20, help="questions for each deadline")
    given = parser.parse_args()
    lines = Path(__file__).with_name("questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    config = {
        "default_model": "mini",
        "models": {"mini": {}, "encoder": {"path": given.encoder}},
        "collections": {"embedder": "encoder", "chunk_tokens": 100, "overlap_tokens": 0},
        "pipelines": {"docs": DOCS},
    }
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder, LocalGateway(config, storage={"folder": folder}) as gateway:
        gateway.collection("docs").add(sorted(PAGES.glob("*.md"))[:6])
        pipeline = gateway.pipeline("docs")
        pipeline.run(questions[-1])  # the first request of all loads what the others share
        for place, deadline_ms in enumerate(DEADLINES_MS):
            seconds: list[float] = []
            outcomes: Counter[str] = Counter()
            for number in range(given.asked):
                question = questions[(place * given.asked + number) % len(questions)]
                began = time.perf_counter()
                outcomes[outcome(pipeline, f"{question} ({place}.{number})", deadline_ms)] += 1
                seconds.append(time.perf_counter() - began)
            found[f"{deadline_ms} ms"] = {**outcomes, "longest_ms": round(max(seconds) * 1e3)}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(main())
