"""Draft heads: what they propose is what their networks say, and answers are the same bytes with and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.interface.request import GenerationRequest, open_sequence
from headrace.engine.speculation.head_drafter import HeadDrafter
from headrace.engine.speculation.joined_layer import eagle_layer
from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.engine.speculation.speculator import Speculator
from headrace.engine.speculation.state_recorder import StateRecorder
from headrace.llm import LLM
from headrace.models.config_json import ConfigJson
from headrace.models.draft_heads import (
    EagleLayer,
    HeadBlock,
    MedusaHeads,
    eagle_config,
    eagle_shapes,
    eagle_spec,
    open_draft_heads,
    write_eagle,
    write_medusa,
)
from headrace.models.model_folder import open_model
from headrace.models.precision import parse_precision
from tests.support.tiny_engine import one

PROMPTS = [[5, 9, 30, 41, 7], [100, 20, 21, 22, 23, 24], list(range(40, 80))]
COMMON: dict[str, Any] = {"weights": "f32", "kv": "f32", "threads": 1, "context": 128, "checks": True}


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads with random weights: Medusa with the model's own head and with its own products, and an EAGLE layer."""
    spec = open_model(tiny_folder).spec
    size = spec.hidden_size
    random = np.random.default_rng(7)
    made = {name: tmp_path_factory.mktemp(name) for name in ("medusa", "deep", "eagle")}

    def numbers(*shape: int, spread: float = 0.05) -> Any:
        return random.normal(0.0, spread, shape).astype(np.float32)

    blocks = [[HeadBlock(numbers(size, size), numbers(size))] for _ in range(3)]
    some = np.sort(random.choice(spec.vocab_size, spec.vocab_size // 2, replace=False)).astype(np.int32)
    write_medusa(made["medusa"], MedusaHeads(blocks, [], some), base="tiny")
    deep = [[*each, HeadBlock(numbers(size, size), numbers(size))] for each in blocks]
    write_medusa(made["deep"], MedusaHeads(deep, [], None), base="tiny")
    config = eagle_config(spec, base="tiny")
    own = eagle_spec(ConfigJson(config, path=made["eagle"]), spec, len(some))
    tensors = {
        name: numbers(*shape) if len(shape) > 1 else 1.0 + numbers(*shape) for name, shape in eagle_shapes(own).items()
    }
    join = np.concatenate([numbers(size, size), np.eye(size, dtype=np.float32)], axis=1)
    write_eagle(made["eagle"], EagleLayer(own, join, numbers(size), tensors, some), config)
    return made


def eager(llm: LLM) -> HeadDrafter:
    """Let the engine draft as much as it can, whatever that costs on this machine."""
    llm.opened.engine._step_time.predict = lambda rows, pairs: 1.0  # pyright: ignore[reportPrivateUsage]
    speculator = llm.opened.engine.speculator
    assert speculator is not None
    drafter = speculator.drafter
    assert isinstance(drafter, HeadDrafter)
    drafter.pass_seconds = lambda sequences: 0.0
    speculator.lengths.prior = speculator.lengths.memory = 0.99
    return drafter


@pytest.mark.parametrize("kind", ["medusa", "deep", "eagle"])
def test_answers_are_the_same_bytes_with_heads(tiny_folder: Path, folders: dict[str, Path], kind: str) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 30},
        {"temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 30},
        {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 12, "logprobs": 1},
    ]
    own = {"speculation": "heads", "draft_heads": str(folders[kind]), "draft_weights": "f32"}
    with LLM(tiny_folder, **COMMON, speculation="none") as plain, LLM(tiny_folder, **COMMON, **own) as drafted:
        drafter = eager(drafted)
        for wanted in ways:
            expected = plain.generate(PROMPTS, ignore_eos=True, **wanted)
            found = drafted.generate(PROMPTS, ignore_eos=True, **wanted)
            for one, other in zip(found, expected, strict=True):
                assert [each.tokens for each in one.completions] == [each.tokens for each in other.completions]
            assert sum(each.usage.drafted for one in found for each in one.completions) > 0
        if isinstance(drafter, LayerDrafter):
            assert drafter.free_blocks == drafted.opened.executor.capacity.blocks


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_request_after_a_cancelled_one_has_its_own_drafts(
    tiny_folder: Path, folders: dict[str, Path], kind: str
) -> None:
    own = {"speculation": "heads", "draft_heads": str(folders[kind]), "draft_weights": "f32"}
    with LLM(tiny_folder, **COMMON, **own) as llm:
        drafter = eager(llm)
        seen: set[str] = set()
        propose = drafter.propose_all
        engine = llm.opened.engine

        def watched(wanted: Any) -> list[list[int]]:
            seen.update(sequence.request.id for sequence, _ in wanted)
            return propose(wanted)

        drafter.propose_all = watched
        engine.submit(GenerationRequest(id="ended", prompt=tuple(PROMPTS[0]), max_tokens=40))
        for _ in range(3):
            engine.step()
        assert seen == {"ended"}
        seen.clear()
        engine.cancel("ended")
        engine.deliver()
        answer = one(engine, GenerationRequest(id="next", prompt=tuple(PROMPTS[0]), max_tokens=6))
        assert len(answer.tokens) == 6
        assert seen == {"next"}
        if isinstance(drafter, LayerDrafter):
            assert drafter.free_blocks == llm.opened.executor.capacity.blocks


def test_heads_propose_what_their_blocks_say(tiny_folder: Path, folders: dict[str, Path]) -> None:
    own = {"speculation": "heads", "draft_heads": str(folders["medusa"]), "draft_weights": "f32"}
    with LLM(tiny_folder, **COMMON, **own) as llm:
        seen: list[tuple[list[float], list[int]]] = []
        drafter = eager(llm)
        propose = drafter.propose_all

        def watched(wanted: Any) -> list[list[int]]:
            found = propose(wanted)
            state = drafter._latest.find(wanted[0][0], lambda: None).state  # pyright: ignore
            seen.append((state, found[0]))
            return found

        drafter.propose_all = watched
        llm.generate([PROMPTS[0]], max_tokens=8, temperature=0.0, ignore_eos=True)
        products = llm.opened.executor.products
        heads = open_draft_heads(folders["medusa"], products.spec)
        assert isinstance(heads, MedusaHeads)
        assert heads.tokens is not None
        rows = products.head_rows(heads.tokens)
        checked = 0
        for state, drafts in seen:
            for draft, ((block,),) in zip(drafts, zip(heads.blocks, strict=True), strict=False):
                inner = block.weight @ np.array(state) + block.bias
                logits = rows @ (state + inner / (1.0 + np.exp(-inner)))
                assert draft == heads.tokens[int(logits.argmax())]
                checked += 1
        assert checked >= 3


def test_states_that_wait_for_a_draft_are_bounded(tiny_folder: Path, folders: dict[str, Path]) -> None:
    with LLM(tiny_folder, **COMMON, speculation="none", max_rows=8) as llm:
        executor = llm.opened.executor
        layer = open_draft_heads(folders["eagle"], executor.spec)
        assert isinstance(executor, CpuExecutor)
        assert isinstance(layer, EagleLayer)
        states = np.random.default_rng(3).normal(size=(42, executor.spec.hidden_size)).astype(np.float32)
        drafter, late = (LayerDrafter(eagle_layer(executor, layer, parse_precision("f32"))) for _ in range(2))
        sequence = open_sequence(GenerationRequest(id="r", prompt=(5, 9, 30), max_tokens=60), 0, 0)
        dropped: list[Any] = []
        drop = drafter._drop  # pyright: ignore[reportPrivateUsage]
        drafter._drop = lambda past: (dropped.append(past), drop(past))[1]  # pyright: ignore[reportPrivateUsage]

        def verify(place: int, *drafters: LayerDrafter) -> None:
            for each in drafters:
                each.read_states(sequence, len(sequence.tokens) - 1, states[place : place + 1])
            sequence.append([7 + place])

        for place in range(40):
            verify(place, *([drafter] if place < 32 else [drafter, late]))
            past = drafter._pasts[id(sequence)]  # pyright: ignore[reportPrivateUsage]
            assert past.waits == sum(map(len, past.waiting)) <= 16
        # It drafts from the newest states alone, and goes on from there.
        expected = late.propose_all([(sequence, 3)])
        assert drafter.propose_all([(sequence, 3)]) == expected
        assert len(expected[0]) == 3
        for place in (40, 41):
            verify(place, drafter, late)
            assert drafter.propose_all([(sequence, 3)]) == late.propose_all([(sequence, 3)]) != [[]]
        assert past.computed == 10
        assert not dropped
        drafter.forget(sequence)
        assert dropped == [past]
        assert drafter.free_blocks == executor.capacity.blocks
        drafter.close()
        late.close()


def test_recorded_states_are_what_the_tokens_were_chosen_from(tiny_folder: Path) -> None:
    with LLM(tiny_folder, **COMMON, speculation="none", prefix_cache=False) as llm:
        recorder, whole = StateRecorder(), StateRecorder((2, 0), prompts=True)
        for each in (whole, recorder):
            llm.opened.engine.draft_with(Speculator(each))
            made = llm.generate(PROMPTS, max_tokens=9, temperature=0.0, ignore_eos=True)
        products = llm.opened.executor.products
        head = products.head_rows(np.arange(llm.opened.executor.spec.vocab_size, dtype=np.int32))
        size = llm.opened.executor.spec.hidden_size
    texts = {tuple(each.tokens[each.prompt :]): each for each in whole.answers}
    prompts = {tuple(each.completions[0].tokens): prompt for prompt, each in zip(PROMPTS, made, strict=True)}
    for answer in recorder.answers:
        text = texts[tuple(answer.tokens)]
        before = [*prompts[tuple(answer.tokens)], *answer.tokens]
        assert text.tokens == before[1:]
        assert np.array_equal(text.states[text.prompt :, 2 * size :], answer.states)
        # What the first layer begins with is the embedding of the token before.
        assert np.array_equal(text.states[:, size : 2 * size], products.embeddings(np.array(before[:-1], np.int32)))
    found = sorted(each.tokens for each in recorder.answers)
    assert found == sorted(each.completions[0].tokens for each in made)
    for answer in recorder.answers:
        assert (answer.states @ head.T).argmax(axis=1).tolist() == answer.tokens
