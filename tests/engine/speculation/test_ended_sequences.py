"""Sequences that end between two steps are not drafted for: the next request is served as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.llm import LLM
from tests.support.tiny_engine import one

GREEDY = SamplingParams(temperature=0.0)
NEXT = GenerationRequest(id="next", prompt=(5, 9, 30, 41, 7), max_tokens=4, sampling=GREEDY)


def open_eager(folder: Path, **options: Any) -> LLM:
    """Open a model whose engine drafts as much as it can, whatever that costs on this machine."""
    llm = LLM(folder, weights="f32", kv="f32", threads=1, context=128, checks=True, **options)
    llm.opened.engine._step_time.predict = lambda rows, pairs: 1.0  # pyright: ignore[reportPrivateUsage]
    return llm


def constrained(llm: LLM, **changes: Any) -> GenerationRequest:
    """A request that repeats itself under a grammar, so that n-grams are found and checked."""
    prompt = tuple(llm.tokenizer.encode("abababababab", add_special_tokens=False))
    grammar = Grammar("regex", "[ab]{80}")
    return GenerationRequest(id="ended", prompt=prompt, max_tokens=60, sampling=GREEDY, grammar=grammar, **changes)


def assert_next_is_served(engine: Engine) -> None:
    answer = one(engine, NEXT)
    assert answer.ending is not None
    assert answer.ending.finish is FinishReason.LENGTH
    assert len(answer.tokens) == 4
    assert engine.idle


def test_a_request_after_a_cancelled_one_with_a_grammar(tiny_folder: Path) -> None:
    with open_eager(tiny_folder) as llm:
        engine = llm.opened.engine
        engine.submit(constrained(llm))
        for _ in range(6):
            engine.step()
        engine.cancel("ended")
        assert [output.ending.finish for output in engine.deliver() if output.ending] == [FinishReason.CANCELLED]
        assert_next_is_served(engine)


def test_a_request_after_one_whose_deadline_passed_during_a_step(tiny_folder: Path) -> None:
    with open_eager(tiny_folder) as llm:
        engine = llm.opened.engine
        late, clock = 0.0, engine._clock  # pyright: ignore[reportPrivateUsage]
        engine._clock = lambda: clock() + late  # pyright: ignore[reportPrivateUsage]
        engine.submit(constrained(llm, arrival=clock(), deadline=clock() + 1000.0))
        for _ in range(6):
            engine.step()
        assert engine.begin() is not None
        late = 2000.0
        engine.finish()
        engine.deliver()
        assert_next_is_served(engine)


def test_a_request_after_a_cancelled_one_that_the_model_drafted_for(tiny_folder: Path) -> None:
    with open_eager(tiny_folder, speculation="self", draft_weights="int8") as llm:
        engine = llm.opened.engine
        assert engine.speculator is not None
        drafter: Any = engine.speculator.drafter
        drafter.pass_seconds = drafter.start_seconds = lambda sequences: 0.0
        engine.submit(GenerationRequest(id="ended", prompt=NEXT.prompt, max_tokens=40, sampling=GREEDY))
        for _ in range(3):
            engine.step()
        engine.cancel("ended")
        engine.deliver()
        assert_next_is_served(engine)
