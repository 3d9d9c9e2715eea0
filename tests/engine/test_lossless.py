"""Speculation changes nothing but the time: outputs with drafts of every kind, beside one another, on a real executor.

Greedy and seeded, with penalties, logit bias, log-probabilities, grammars, stop strings, stop ids and min_tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.grammar.constraints import Grammar, GrammarCompiler
from headrace.engine.interface.grammar_spec import GrammarTrigger
from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.speculation.draft_model import DraftModelDrafter
from headrace.engine.speculation.drafters import Drafter, DraftRequests, NgramDrafter, ReplayDrafter
from headrace.engine.speculation.speculator import DraftLength, Speculator
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.text.tokenizer import Tokenizer
from tests.engine.speculation.decoding_loop import Running, decode

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["wheel", "water"]}, "value": {"type": "integer", "maximum": 99}},
    "required": ["name", "value"],
    "additionalProperties": False,
}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=1.5, seed=3, top_k=60, top_p=0.95, min_p=0.01)},
    "three at once": {"sampling": SamplingParams(temperature=3.0, seed=5), "n": 3},
    "predicted": {"prediction": tuple(range(30, 90))},
    "penalties": {
        "sampling": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, temperature=0.7)
    },
    "bias": {"sampling": SamplingParams(logit_bias={40: 5.0, 41: -8.0, 42: 4.0})},
    "logprobs": {"sampling": SamplingParams(logprobs=3, temperature=1.0, seed=9)},
    "json": {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "max_tokens": 60},
    "json, seeded": {
        "grammar": Grammar("json_object"),
        "sampling": SamplingParams(temperature=5.0, seed=2),
        "max_tokens": 60,
    },
    "regex": {"grammar": Grammar("regex", "([a-d]{2,6} ){3,9}!"), "sampling": SamplingParams(temperature=4.0, seed=8)},
    "choice": {"grammar": Grammar("choice", '["the water wheel turns", "the water runs"]')},
    "grammar and logprobs": {
        "grammar": Grammar("json_object"),
        "sampling": SamplingParams(logprobs=1, temperature=2.0),
    },
    "free text and calls": {
        "grammar": Grammar(
            "lark", 'start: "e" /[a-d]{2,6}/ ";"', trigger=GrammarTrigger(("e",), repeats=True), best_effort=True
        ),
        "sampling": SamplingParams(temperature=3.0, seed=4),
        "max_tokens": 60,
    },
    "grammar and min tokens": {"grammar": Grammar("regex", "a{1,30}"), "min_tokens": 12},
}


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> ModelFolder:
    return open_model(tiny_folder)


def load(folder: ModelFolder) -> CpuExecutor:
    return CpuExecutor.load(
        folder, weights="int8", kv="bf16", threads=1, context=256, kv_tokens=16 * 400, max_rows=1024
    )


@pytest.fixture(scope="module")
def executor(folder: ModelFolder) -> CpuExecutor:
    return load(folder)


@pytest.fixture(scope="module")
def grammars(folder: ModelFolder) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(folder.tokenizer)
    yield grammars
    grammars.close()


def requests_of(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """One of each kind, all in one batch."""
    draw = random.Random(1)
    found: list[GenerationRequest] = []
    for name, wishes in WISHES.items():
        prompt = [draw.randrange(5, 250) for _ in range(draw.randrange(4, 20))]
        prompt += prompt[-6:]  # something to find again
        found.append(
            GenerationRequest(
                id=name, prompt=tuple(prompt), **{"max_tokens": 40, "stop_ids": tokenizer.eos_ids, **wishes}
            )
        )
    return found


def results(runs: list[Running]) -> list[tuple[str, int, list[int], str, object, object]]:
    return [
        (
            run.sequence.request.id,
            run.sequence.index,
            run.sequence.output,
            run.text,
            run.sequence.finish,
            run.chosen if run.sequence.request.sampling.logprobs is not None else None,
        )
        for run in runs
    ]


class Noise:
    """Drafts whatever comes, now and then what is right."""

    free = True

    def __init__(self, outputs: dict[str, list[list[int]]], vocab: int) -> None:
        self._outputs = outputs
        self._draw = random.Random(4)
        self._vocab = vocab

    def start_seconds(self, sequence: SequenceState) -> float:
        return 0.0

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [self.propose(sequence, most) for sequence, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        start = sequence.output_count
        right = self._outputs[sequence.request.id][sequence.index][start : start + most]
        return [
            token if self._draw.random() < 0.7 else self._draw.randrange(self._vocab)
            for token in right[: self._draw.randrange(most + 1)]
        ]

    def forget(self, sequence: SequenceState) -> None:
        pass


@pytest.fixture(scope="module")
def plain(executor: CpuExecutor, folder: ModelFolder, grammars: GrammarCompiler) -> list[Running]:
    return decode(executor, folder.tokenizer, requests_of(folder.tokenizer), grammars=grammars)


def outputs_of(runs: list[Running]) -> dict[str, list[list[int]]]:
    outputs: dict[str, list[list[int]]] = {}
    for run in runs:
        outputs.setdefault(run.sequence.request.id, []).append(run.sequence.output)
    return outputs


def test_the_plain_outputs_are_worth_comparing(plain: list[Running]) -> None:
    by_name = {run.sequence.request.id: run for run in plain}
    for run in plain:
        assert run.sequence.finish is not None
        assert run.sequence.output_count > 2
    assert json.loads(by_name["json"].text)["name"] in ("wheel", "water")
    assert by_name["json"].forced > 3
    assert by_name["choice"].text in ("the water wheel turns", "the water runs")
    assert len(set(map(tuple, outputs_of(plain)["three at once"]))) == 3
    assert (
        by_name["grammar and min tokens"].sequence.output_count >= 12
        or len(by_name["grammar and min tokens"].text) == 30
    )


@pytest.mark.parametrize("name", ["ngram", "replay", "half right", "noise", "model", "self", "self, int4"])
def test_outputs_are_the_same_with_drafts(
    executor: CpuExecutor, folder: ModelFolder, grammars: GrammarCompiler, plain: list[Running], name: str
) -> None:
    outputs = outputs_of(plain)
    drafter: Drafter
    match name:
        case "ngram":
            drafter = NgramDrafter()
        case "replay":
            drafter = ReplayDrafter(outputs, 1.0)
        case "half right":
            drafter = ReplayDrafter(outputs, 0.5)
        case "noise":
            drafter = Noise(outputs, executor.spec.vocab_size)
        case "self":
            own = executor.drafting(folder, (1,))
            drafter = DraftModelDrafter(own, vocab_size=executor.spec.vocab_size)
        case "self, int4":
            own = executor.drafting(folder, (), weights="int4")
            drafter = DraftModelDrafter(own, vocab_size=executor.spec.vocab_size)
        case _:
            drafter = DraftModelDrafter(load(folder), vocab_size=executor.spec.vocab_size)
    speculator = Speculator(drafter, DraftLength(most=6, prior=0.9))
    found = decode(executor, folder.tokenizer, requests_of(folder.tokenizer), speculator=speculator, grammars=grammars)
    assert results(found) == results(plain)
    assert speculator.drafted > 0
    if name in ("replay", "model"):
        # What a grammar forces is not drafted, and comes in other places than in the plain run's output.
        assert speculator.held > 0.7 * speculator.drafted


def test_outputs_are_the_same_alone_and_without_forcing(
    executor: CpuExecutor, folder: ModelFolder, grammars: GrammarCompiler, plain: list[Running]
) -> None:
    expected = results(plain)
    for request in requests_of(folder.tokenizer):
        drafter = ReplayDrafter(outputs_of(plain), 0.8, seed=2)
        alone = decode(
            executor,
            folder.tokenizer,
            [request],
            speculator=Speculator(drafter, DraftLength(most=5, prior=0.9)),
            grammars=grammars,
            force=False,
        )
        assert results(alone) == [result for result in expected if result[0] == request.id]


@pytest.mark.parametrize("seed", range(3))
def test_stops_end_outputs_where_they_do_without_drafts(executor: CpuExecutor, folder: ModelFolder, seed: int) -> None:
    """Stop strings and stop ids taken from what would be written, with and without min_tokens before them."""
    tokenizer = folder.tokenizer
    draw = random.Random(seed)
    sampling = SamplingParams(temperature=1.0 * seed, seed=seed)
    base = GenerationRequest(
        id="0", prompt=tuple(draw.randrange(5, 250) for _ in range(12)), sampling=sampling, max_tokens=40
    )
    (free,) = decode(executor, tokenizer, [base])
    output, text = free.sequence.output, free.text
    cut = draw.randrange(len(text) // 3, len(text) - 6)
    cases: list[dict[str, Any]] = [
        {"stop": (text[cut : cut + 4],)},
        {"stop": (text[cut : cut + 4], "never there"), "min_tokens": 30},
        {"stop_ids": frozenset({output[20]})},
        {"stop_ids": frozenset({output[5], output[9]}), "min_tokens": 12},
    ]
    requests = [
        GenerationRequest(id=str(place), prompt=base.prompt, sampling=sampling, max_tokens=40, **case)
        for place, case in enumerate(cases)
    ]
    expected = decode(executor, tokenizer, requests)
    assert FinishReason.STOP in {run.sequence.finish for run in expected}
    # Drafts that go on past the stop, as if nothing had stopped.
    outputs = {request.id: [output] for request in requests}
    for acceptance in (1.0, 0.6):
        speculator = Speculator(ReplayDrafter(outputs, acceptance), DraftLength(most=8, prior=0.95))
        found = decode(executor, tokenizer, requests, speculator=speculator)
        assert results(found) == results(expected)
    for request, run in zip(requests, expected, strict=True):
        if run.sequence.finish is FinishReason.STOP:
            assert run.sequence.output_count > request.min_tokens
        assert not any(stop in run.text for stop in request.stop) or request.min_tokens
