"""Questions on Headrace's documentation: retrieval with mini beside mini alone, stuffed contexts and a larger model.

    python benchmarks/pipelines/accuracy.py --encoder FOLDER [--large FILE] [--out FILE]

An answer is right if it has one of the question's expected phrases. A citation is right if a cited passage is of the
question's page. Greedy decoding; the pages are those of docs/how-to. Writes a page of results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace import LocalGateway
from headrace.models.model_folder import BUNDLED, open_model
from headrace.server.local_gateway import PipelineAnswer

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "how-to"
STUFFED_TOKENS: Final = 1700  # of mini's 2,048, beside the question and the answer
ANSWER_TOKENS: Final = 64

STAGES: Final = ["search", "assemble", "generate", "check"]
RETRIEVAL: Final[dict[str, Any]] = {"search": {"collection": "docs", "k": 6}, "assemble": {"keep": 3}}


def pipelines(large: bool) -> dict[str, Any]:
    def generate(**more: Any) -> dict[str, Any]:
        return {"max_tokens": ANSWER_TOKENS, **more}

    extract = generate(order=["extract", "large"], extract_confidence=0.4)
    declared: dict[str, Any] = {
        "extract": {"stages": STAGES, **RETRIEVAL, "generate": extract},
        "read": {"stages": STAGES, **RETRIEVAL, "generate": generate()},
        "alone": {"stages": ["generate"], "generate": generate()},
    }
    if large:
        declared["large"] = {"stages": ["generate"], "model": "large", "generate": generate()}
        declared["large-reads"] = {"stages": STAGES, **RETRIEVAL, "model": "large", "generate": generate()}
    return {name: {"deadline_ms": 120_000, "model": "mini", **each} for name, each in declared.items()}


def stuffed(pages: Sequence[Path]) -> str:
    """The beginning of pages, as much as fits."""
    tokenizer = open_model(BUNDLED / "mini").tokenizer
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    tokens = tokenizer.encode(text[: 8 * STUFFED_TOKENS], add_special_tokens=False)
    return tokenizer.decode(tokens[:STUFFED_TOKENS])


def is_right(text: str, phrases: Sequence[str]) -> bool:
    return any(re.search(phrase, text, re.IGNORECASE) for phrase in phrases)


def measure(
    questions: Sequence[Mapping[str, Any]], ask: Callable[[Mapping[str, Any]], PipelineAnswer]
) -> dict[str, Any]:
    right = found = cited = answered = 0
    seconds: list[float] = []
    stages: dict[str, list[float]] = {}
    for each in questions:
        began = time.perf_counter()
        answer = ask(each)
        seconds.append(time.perf_counter() - began)
        right += is_right(answer.text, each["answer"])
        pages = {source["number"]: Path(source["source"]).name for source in answer.sources}
        found += each["page"] in pages.values()
        cited += any(pages.get(citation["number"]) == each["page"] for citation in answer.citations)
        answered += bool(answer.citations)
        for report in answer.report["stages"]:
            stages.setdefault(report["stage"], []).append(report["ms"])
    count = len(questions)
    return {
        "right": right / count,
        "page_found": found / count,
        "cites": answered / count,
        "cites_the_page": cited / count,
        "ms": percentiles([each * 1e3 for each in seconds]),
        "stages_ms": {name: percentiles(values) for name, values in stages.items()},
    }


def percentiles(values: Sequence[float]) -> list[float]:
    return [round(float(np.percentile(values, share)), 1) for share in (50, 95)]


def run(encoder: str, large: str | None, others: int) -> dict[str, Any]:
    questions = [json.loads(line) for line in Path(__file__).with_name("questions.jsonl").read_text().splitlines()]
    models: dict[str, Any] = {"mini": {}, "encoder": {"path": encoder}}
    if large is not None:
        models["large"] = {"path": large}
    config = {
        "default_model": "mini",
        "models": models,
        "collections": {"embedder": "encoder", "chunk_tokens": 100, "overlap_tokens": 0},
        "pipelines": pipelines(large is not None),
    }
    asked = {question["page"] for question in questions}
    every = sorted(PAGES.glob("*.md"))
    pages = [page for page in every if page.name in asked] + [page for page in every if page.name not in asked][:others]
    results: dict[str, Any] = {"questions": len(questions), "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() as folder, LocalGateway(config, storage={"folder": folder}) as gateway:
        began = time.perf_counter()
        stats = gateway.collection("docs").add(pages)
        results |= {"chunks": stats.chunks, "pages": stats.ready, "ingest_s": round(time.perf_counter() - began, 1)}

        def ask(name: str, context: Callable[[Mapping[str, Any]], str] | None = None) -> dict[str, Any]:
            pipeline = gateway.pipeline(name)

            def one(question: Mapping[str, Any]) -> PipelineAnswer:
                before = "" if context is None else f"{context(question)}\n\n"
                return pipeline.run(f"{before}{question['question']}", temperature=0)

            found = measure(questions, one)
            print(name, found, file=sys.stderr, flush=True)
            return found

        everything = stuffed(sorted(pages))
        results["runs"] = {
            "retrieval, sentences of the pages, else mini": ask("extract"),
            "retrieval and mini": ask("read"),
            "mini alone": ask("alone"),
            "the first pages as context, mini": ask("alone", lambda question: everything),
            "the right page as context, mini": ask("alone", lambda question: stuffed([PAGES / question["page"]])),
        }
        if large is not None:
            results["runs"][f"{Path(large).stem} alone"] = ask("large")
            results["runs"][f"retrieval and {Path(large).stem}"] = ask("large-reads")
    results["load"].append(os.getloadavg()[0])
    return results


def page(results: Mapping[str, Any]) -> str:
    lines = [
        f"{results['questions']} questions on {results['pages']} pages in {results['chunks']} chunks; indexed in "
        f"{results['ingest_s']} s. Load average {results['load'][0]:.0f} to {results['load'][1]:.0f}.",
        "",
        "| | right | page found | cites a page | cites the right page | p50 ms | p95 ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in results["runs"].items():
        shares = " | ".join(f"{each[key]:.0%}" for key in ("right", "page_found", "cites", "cites_the_page"))
        lines.append(f"| {name} | {shares} | {each['ms'][0]:,.0f} | {each['ms'][1]:,.0f} |")
    lines += ["", "| run | stage | p50 ms | p95 ms |", "|---|---|---:|---:|"]
    for name, each in results["runs"].items():
        lines += [f"| {name} | {stage} | {ms[0]} | {ms[1]} |" for stage, ms in each["stages_ms"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="folder of an encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--large", help="a larger model, which answers alone and with retrieval")
    parser.add_argument("--others", type=int, default=100, help="pages beside those of the questions, at most")
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    given = parser.parse_args()
    results = run(given.encoder, given.large, given.others)
    print(page(results))
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
