"""A drafter with a model: in step with the sequence whatever held, all sequences together, within its memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.engine.interface.request import GenerationRequest, SequenceState, open_sequence
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.speculation.draft_model import DraftModelDrafter
from headrace.engine.speculation.drafters import Mask, sample_rows
from headrace.engine.speculation.speculator import DraftLength
from headrace.errors import RequestError
from headrace.models.model_folder import open_model


def load(folder: Path, *, blocks: int = 64, max_rows: int = 64, context: int = 256) -> CpuExecutor:
    return CpuExecutor.load(
        open_model(folder),
        weights="int8",
        kv="bf16",
        threads=1,
        context=context,
        kv_tokens=16 * blocks,
        max_rows=max_rows,
    )


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> CpuExecutor:
    return load(tiny_folder)


@pytest.fixture
def drafter(tiny_folder: Path) -> DraftModelDrafter:
    executor = load(tiny_folder, max_rows=160)
    return DraftModelDrafter(executor, vocab_size=executor.spec.vocab_size)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 250) for _ in range(length)]


def sequence(
    tokens: list[int], *, name: str = "r", salt: str = "", max_tokens: int = 100, **wishes: object
) -> SequenceState:
    request = GenerationRequest(
        id=name,
        prompt=tuple(tokens),
        salt=salt,
        max_tokens=max_tokens,
        sampling=SamplingParams(**wishes),  # type: ignore[arg-type]
    )
    return open_sequence(request)


def test_drafts_are_what_the_draft_model_would_say(executor: CpuExecutor, drafter: DraftModelDrafter) -> None:
    tokens = prompt(1, 30)
    assert drafter.propose(sequence(tokens), 6) == greedy(executor, [tokens], 6)[0]


def test_sequences_are_drafted_for_together_as_each_alone(executor: CpuExecutor, drafter: DraftModelDrafter) -> None:
    prompts = [prompt(seed, 3 + 7 * seed) for seed in range(4)]
    found = drafter.propose_all([(sequence(tokens), 2 + seed) for seed, tokens in enumerate(prompts)])
    assert found == [greedy(executor, [tokens], 2 + seed)[0] for seed, tokens in enumerate(prompts)]
    drafter.check()


def test_it_stays_in_step_whatever_held(executor: CpuExecutor, drafter: DraftModelDrafter) -> None:
    draw = random.Random(5)
    running = [sequence(prompt(seed, 20 + seed)) for seed in range(3)]
    for _ in range(12):
        found = drafter.propose_all([(one, draw.randrange(5)) for one in running])
        for one, drafts in zip(running, found, strict=True):
            if drafts:
                assert drafts == greedy(executor, [one.tokens], len(drafts))[0]
            held = draw.randrange(len(drafts) + 1)
            another = draw.randrange(5, 250)
            one.append([*drafts[:held], another])
        drafter.check()


def test_a_draft_model_is_tried_beside_a_step_of_a_millisecond(drafter: DraftModelDrafter) -> None:
    lengths = DraftLength().choose(
        [(sequence(prompt(1, 8)), 8)],
        rows=1,
        room=8,
        step_seconds=lambda rows: 1e-3 + 0.1e-3 * rows,
        draft_seconds=drafter.pass_seconds,
    )
    assert lengths[0] > 0  # else it would never be timed


def test_asking_twice_gives_the_same(drafter: DraftModelDrafter) -> None:
    one = sequence(prompt(2, 20))
    first = drafter.propose(one, 5)
    assert drafter.propose(one, 5) == first
    assert drafter.propose(one, 3) == first[:3]


def test_drafts_are_drawn_as_the_tokens_will_be(executor: CpuExecutor, drafter: DraftModelDrafter) -> None:
    """The same model, temperature, penalties and seed: every draft holds."""
    tokens = prompt(3, 20)
    wishes = {"temperature": 2.0, "seed": 11, "presence_penalty": 1.5, "top_k": 50, "logit_bias": {7: 3.0}}
    one = sequence(tokens, **wishes)
    drafts = drafter.propose(one, 8)
    assert len(drafts) == 8
    for draft in drafts:
        (chosen,) = executor.sample(logits(executor, [one.tokens])[0][-1:], sample_rows(one, []))
        assert draft == chosen.token
        one.append([draft])


def test_a_mask_constrains_the_drafts(tiny_folder: Path) -> None:
    executor = load(tiny_folder)
    words = -(-executor.spec.vocab_size // 32)

    def constrain(_: SequenceState, drafts: Sequence[int]) -> Mask:
        mask = np.zeros(words, dtype=np.uint32)
        mask[1] = 1 << len(drafts)
        return mask

    drafter = DraftModelDrafter(executor, vocab_size=executor.spec.vocab_size)
    drafter.constrain = constrain
    assert drafter.propose(sequence(prompt(4, 10)), 3) == [32, 33, 34]


def test_a_stop_id_is_the_last_draft(executor: CpuExecutor, drafter: DraftModelDrafter) -> None:
    tokens = prompt(6, 20)
    expected = greedy(executor, [tokens], 6)[0]
    request = GenerationRequest(id="r", prompt=tuple(tokens), stop_ids=frozenset({expected[2]}))
    assert drafter.propose(open_sequence(request), 6) == expected[: expected.index(expected[2]) + 1]


def test_a_long_prompt_is_computed_a_part_at_a_time(tiny_folder: Path, executor: CpuExecutor) -> None:
    draft = load(tiny_folder, max_rows=40)
    drafter = DraftModelDrafter(draft, vocab_size=draft.spec.vocab_size, catch_up=32)
    long, short = sequence(prompt(7, 150)), sequence(prompt(8, 4))
    counts: list[tuple[int, int]] = []
    for _ in range(6):
        found = drafter.propose_all([(long, 3), (short, 3)])
        counts.append((len(found[0]), len(found[1])))
        short.append(found[1][:1])
    assert counts[0] == (0, 3)
    assert counts[-1] == (3, 3)
    assert drafter.propose(long, 3) == greedy(executor, [long.tokens], 3)[0]


def test_memory_goes_to_those_that_are_asked_for(tiny_folder: Path, executor: CpuExecutor) -> None:
    draft = load(tiny_folder, blocks=8, context=128)
    drafter = DraftModelDrafter(draft, vocab_size=draft.spec.vocab_size)
    many = [sequence(prompt(seed, 40)) for seed in range(5)]
    for one in many:  # three blocks each
        assert drafter.propose(one, 2) == greedy(executor, [one.tokens], 2)[0]
        drafter.check()
    found = drafter.propose_all([(one, 2) for one in many])
    assert sorted(len(drafts) for drafts in found) == [0, 0, 0, 2, 2]
    drafter.check()
    for one in many:
        drafter.forget(one)
        drafter.forget(one)
    drafter.check()


def test_a_prefix_that_was_computed_is_found_again_by_the_same_tenant(drafter: DraftModelDrafter) -> None:
    tokens = prompt(9, 64)
    first = sequence(tokens, salt="a")
    drafts = drafter.propose(first, 2)
    drafter.forget(first)
    same, other = sequence(tokens, salt="a"), sequence(tokens, salt="b")
    assert drafter.propose_all([(same, 2), (other, 2)]) == [drafts, drafts]
    hits = {salt: stats.hit for salt, stats in drafter.stats().salts.items()}
    assert hits["a"] >= 48
    assert hits["b"] == 0


def test_nothing_is_drafted_past_the_context(tiny_folder: Path) -> None:
    draft = load(tiny_folder, context=64)
    drafter = DraftModelDrafter(draft, vocab_size=draft.spec.vocab_size)
    assert len(drafter.propose(sequence(prompt(1, 60)), 8)) == 4
    assert drafter.propose(sequence(prompt(1, 64)), 8) == []
    assert drafter.propose(sequence(prompt(1, 90)), 8) == []


def test_sequences_that_are_kept_are_bounded(tiny_folder: Path) -> None:
    draft = load(tiny_folder)
    drafter = DraftModelDrafter(draft, vocab_size=draft.spec.vocab_size, sequences=2)
    for seed in range(4):
        assert len(drafter.propose(sequence(prompt(seed, 10)), 2)) == 2
        drafter.check()
    assert drafter.stats().used <= 2


def test_another_vocabulary_is_refused(executor: CpuExecutor) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        DraftModelDrafter(executor, vocab_size=executor.spec.vocab_size + 1)


def test_passes_are_measured(drafter: DraftModelDrafter) -> None:
    drafter.propose(sequence(prompt(1, 10)), 4)
    assert drafter.step_time.steps == 4
    assert drafter.pass_seconds(1) > 0.0
