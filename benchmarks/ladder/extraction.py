"""Measures the quality of extracted answers on the reading task's held-out questions, and fits their weights.

The corpus separates training and held-out questions (training/corpus/instances.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import fields, replace

from headrace.gateway.degradation.ladder.extractive_answer import (
    ExtractOptions,
    SentenceWeights,
    extract_answer,
    question_and_sources,
    score_sentences,
)
from headrace.gateway.requests.text_request import SourceText
from training.corpus.conversation import Turn, rendered
from training.corpus.instances import is_held_out
from training.corpus.reading import NOT_THERE, instance, questions
from training.corpus.scoring import CITATION, folded, same_citation

# The corpus has passages of one to three sentences, in which the words around a sentence speak against it. In longer
# ones they are its subject, so these weights are set by hand and not fitted; and of nothing_new there are no examples.
HELD = ("around", "named_around", "nothing_new")


@dataclass(frozen=True, slots=True)
class Asked:
    question: str
    before: list[str]
    sources: tuple[SourceText, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Of questions whose answer is in the sources, and of those whose is not."""

    there: int
    cited: int  # the right passages, and no other
    exact: int  # and the right sentences, to the letter
    wrong: int  # something else was quoted
    silent: int  # it was said not to be there
    absent: int
    declined: int  # of these: said so
    seconds: list[float]

    @property
    def right(self) -> float:
        return (self.exact + self.declined) / (self.there + self.absent)


def as_asked(turns: Sequence[Turn], expected: str) -> Asked:
    question, before, sources = question_and_sources([{"role": turn.role, "content": turn.content} for turn in turns])
    return Asked(question, before, sources, expected)


def held_out() -> list[Asked]:
    return [as_asked(each.turns, each.expected) for each in questions()]


def to_learn(count: int, seed: int = 11) -> list[Asked]:
    """Turns of instances of which nothing is held out."""
    random = Random(seed)
    found: list[Asked] = []
    while len(found) < count:
        drawn = instance(random)
        if any(is_held_out(key) for key in drawn.keys):
            continue
        ends = [place for place, turn in enumerate(drawn.turns) if turn.role == "assistant"]
        end = random.choice(ends)
        found.append(as_asked(drawn.turns[:end], rendered(drawn.turns[end])))
    return found


def count(asked: Sequence[Asked], options: ExtractOptions) -> Counted:
    there = cited = exact = wrong = silent = absent = declined = 0
    seconds: list[float] = []
    for each in asked:
        began = time.perf_counter()
        answer = extract_answer(each.question, each.sources, before=each.before, options=options)
        seconds.append(time.perf_counter() - began)
        if each.expected.endswith(NOT_THERE):
            absent += 1
            declined += not answer.quotes
            continue
        there += 1
        wanted = sorted(CITATION.findall(each.expected))
        right = sorted(str(quote.number) for quote in answer.quotes) == wanted
        cited += right
        exact += same_citation(each.expected, answer.text)
        silent += not answer.quotes
        wrong += bool(answer.quotes) and not same_citation(each.expected, answer.text)
    return Counted(there, cited, exact, wrong, silent, absent, declined, seconds)


def choices(asked: Sequence[Asked], options: ExtractOptions) -> Iterator[tuple[Any, int]]:
    """Of each turn with one question: the features of its sentences, and which is the answer; -1 where none is."""
    for each in asked:
        candidates = score_sentences(each.question, each.sources, before=each.before, options=options)
        if len(candidates) != 1 or not candidates[0]:
            continue
        wanted = {folded(text) for text in CITATION.split(each.expected)[::2]}
        texts = [each.sources[one.sentence.source].text[one.sentence.start : one.sentence.end] for one in candidates[0]]
        place = next((place for place, text in enumerate(texts) if folded(text) in wanted), -1)
        yield np.array([(1.0, *one.features) for one in candidates[0]]), place


def fit(asked: Sequence[Asked], options: ExtractOptions, *, ridge: float = 0.2, steps: int = 50) -> SentenceWeights:
    """Maximum likelihood of the right choice among the sentences of a question and none of them (which has the score
    0), by Newton's method. The weights of HELD stay what they are."""
    given = list(choices(asked, options))
    names = [each.name for each in fields(SentenceWeights)]
    weights = np.array([getattr(options.weights, name) if name in HELD else 0.0 for name in names])
    held = np.array([1e9 if name in HELD else 0.0 for name in names])
    for _ in range(steps):
        slope, bend = -ridge * weights * (held == 0.0), np.diag(ridge + held)
        for x, place in given:
            scores = x @ weights
            most = max(float(scores.max()), 0.0)
            odds = np.exp(scores - most)
            p = odds / (float(odds.sum()) + math.exp(-most))
            mean = x.T @ p
            slope += (x[place] if place >= 0 else 0.0) - mean
            bend += (x * p[:, None]).T @ x - np.outer(mean, mean)
        step = np.linalg.solve(bend, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-6:
            break
    return SentenceWeights(**{name: round(float(value), 2) for name, value in zip(names, weights, strict=True)})


def thresholds(asked: Sequence[Asked], options: ExtractOptions) -> Iterator[tuple[float, Counted]]:
    for least in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        yield least, count(asked, replace(options, least=least))


def speed(options: ExtractOptions, *, sources: int = 20, times: int = 100) -> list[float]:
    """Seconds of the processor for one answer from so many sources of 196 words."""
    random = Random(1)
    vocabulary = [f"word{number}" for number in range(600)]
    vocabulary += "the office opens market river system release policy team in Porto at on of 9:30 March".split() * 10
    texts = [
        " ".join(" ".join(random.choices(vocabulary, k=14)).capitalize() + "." for _ in range(14))
        for _ in range(sources)
    ]
    given = [SourceText(str(place), text) for place, text in enumerate(texts)]
    found: list[float] = []
    for _ in range(times):
        began = time.process_time()
        extract_answer("When does the Porto office open, and what is the release policy?", given, options=options)
        found.append(time.process_time() - began)
    return sorted(found)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]
