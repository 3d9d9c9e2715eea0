"""The engine's loop: the same bytes under load, preemption, drafts and continuation; results, stops, failures."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.engine.engine import Engine
from headrace.engine.executors.executor import StepBatch, StepTicket
from headrace.engine.executors.runner import embed, greedy, logits
from headrace.engine.grammar.constraints import Grammar
from headrace.engine.interface.grammar_spec import GrammarTrigger
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams, sequence_seed
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.open_engine import OpenedVariant
from headrace.errors import RequestError
from headrace.models.synthetic.random_model import write_random_model
from tests.support.tiny_engine import PROMPT, one, open_tiny, run, tokens

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PENALISED = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)


# Free text in which every "e" begins a call.
CALLS = Grammar("lark", 'start: "e" /[a-d]{2,6}/ ";"', trigger=GrammarTrigger(("e",), repeats=True))


@pytest.fixture(scope="module")
def opened(tiny_folder: Path) -> OpenedVariant:
    return open_tiny(tiny_folder)


@pytest.fixture(scope="module")
def engine(opened: OpenedVariant) -> Engine:
    return opened.engine


def request(id: str = "r", **changes: Any) -> GenerationRequest:
    return GenerationRequest(**({"id": id, "prompt": PROMPT, "max_tokens": 24} | changes))


def mixed(stop: str) -> list[GenerationRequest]:
    """Requests of every kind of sampling, with prompts of very different lengths; one of them stops at `stop`."""
    return [
        request("greedy", prompt=PROMPT[:7]),
        request("long", prompt=tuple(range(100, 290)), sampling=SAMPLED),
        request("penalised", prompt=PROMPT * 2, sampling=PENALISED, max_tokens=40),
        request("several", n=3, sampling=SAMPLED),
        request("grammar", grammar=Grammar("json_schema", SCHEMA), sampling=SAMPLED, max_tokens=60),
        request("calls", grammar=CALLS, sampling=SAMPLED, max_tokens=60),
        request("biased", sampling=SamplingParams(logit_bias={77: 3.0}, min_p=0.02, temperature=1.0, seed=2)),
        request("stopped", stop=(stop,), max_tokens=40),
        request("short", prompt=(9,), max_tokens=3, sampling=SamplingParams(temperature=2.0, top_k=50, seed=8)),
    ]


@pytest.fixture(scope="module")
def stop(engine: Engine) -> str:
    """A text in the middle of what the model writes."""
    text = one(engine, request(max_tokens=40)).text
    return text[20:24]


@pytest.fixture(scope="module")
def alone(engine: Engine, stop: str) -> dict[str, list[SequenceResult]]:
    return {wanted.id: run(engine, [wanted])[wanted.id] for wanted in mixed(stop)}


def test_greedy_tokens_are_those_of_the_executor_driven_directly(opened: OpenedVariant) -> None:
    expected = greedy(opened.executor, [PROMPT], 24)[0]
    answer = one(opened.engine, request())
    assert answer.tokens == expected
    assert answer.text == opened.tokenizer.decode(expected)
    assert answer.ending is not None
    assert (answer.ending.finish, answer.ending.usage.output_tokens) == (FinishReason.LENGTH, 24)
    usage = answer.ending.usage
    assert (usage.prefill_steps, usage.prefill_steps + usage.decode_steps) == (1, 24)


def test_company_changes_nothing(engine: Engine, stop: str, alone: dict[str, list[SequenceResult]]) -> None:
    together = run(engine, mixed(stop))
    assert tokens(together) == tokens(alone)
    assert {id: [a.text for a in found] for id, found in together.items()} == {
        id: [a.text for a in found] for id, found in alone.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"kv_tokens": 512},  # not all fit at once
        {"max_rows": 9},
        {"speculation": "ngram"},
        {"speculation": "ngram", "kv_tokens": 512, "max_rows": 30, "max_sequences": 4},
        {"prefix_cache": False},
    ],
    ids=["little-memory", "few-rows", "speculating", "all-at-once", "no-prefix-cache"],
)
def test_nor_do_memory_steps_drafts_and_caches(
    options: dict[str, Any], tiny_folder: Path, stop: str, alone: dict[str, list[SequenceResult]]
) -> None:
    other = open_tiny(tiny_folder, **options).engine
    for _ in range(2):  # the second time with whatever the first has left in the cache
        found = run(other, mixed(stop))
        assert tokens(found) == tokens(alone)
        assert [a.text for a in found["grammar"]] == [a.text for a in alone["grammar"]]
    if options.get("speculation"):
        assert found["long"][0].ending is not None
        drafted = sum(a.ending.usage.drafted for answers in found.values() for a in answers if a.ending)
        assert drafted > 0


def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    tiny_folder: Path, stop: str, alone: dict[str, list[SequenceResult]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own draft model: what it proposes holds. As slow as it is, it would not be asked: so steps seem slower,
    # by far, since a busy machine may take long for a draft.
    other = open_tiny(tiny_folder, speculation="model", draft_model=str(tiny_folder), max_sequences=16)
    model = other.engine.scheduler.model
    slow = functools.partial(monkeypatch.setattr, model, "predict", lambda rows, pairs: 5.0)  # once all are admitted
    found = run(other.engine, mixed(stop), at_step=lambda step: slow())
    assert tokens(found) == tokens(alone)
    usage = [a.ending.usage for answers in found.values() for a in answers if a.ending]
    assert sum(u.accepted for u in usage) >= 0.8 * sum(u.drafted for u in usage) > 0
    constrained = found["grammar"][0].ending  # its drafts follow the grammar too
    assert constrained is not None
    assert constrained.usage.accepted >= 0.8 * constrained.usage.drafted > 0
    other.engine.close()


def test_sequences_that_are_preempted_come_back_with_the_same_tokens(tiny_folder: Path, engine: Engine) -> None:
    wanted = [
        request(
            str(n), prompt=PROMPT[n : n + 9], max_tokens=120, sampling=SamplingParams(temperature=0.9 * (n % 2), seed=n)
        )
        for n in range(8)
    ]
    expected = {each.id: [one(engine, each).tokens] for each in wanted}
    other = open_tiny(tiny_folder, kv_tokens=512).engine  # half of what they come to
    assert tokens(run(other, wanted)) == expected
    assert other.scheduler.stats().preempted > 0


@pytest.mark.parametrize("id", ["greedy", "penalised", "grammar", "calls", "biased", "stopped"])
def test_an_answer_goes_on_from_the_tokens_of_another_engine(
    id: str, engine: Engine, stop: str, alone: dict[str, list[SequenceResult]]
) -> None:
    wanted = next(found for found in mixed(stop) if found.id == id)
    whole = alone[id][0]
    pieces: list[tuple[tuple[int, ...], str]] = [((), "")]
    text = ""
    engine.submit(wanted)
    while not engine.idle:  # what has left the engine together with the tokens so far
        for output in engine.step():
            text += output.text
            pieces.append(((*pieces[-1][0], *output.tokens), text))
    for made, before in pieces[1:-1]:
        answer = one(engine, wanted, output=made)
        assert [*made, *answer.tokens] == whole.tokens
        assert before + answer.text == whole.text
        assert answer.ending is not None
        assert answer.ending.usage.output_tokens == len(whole.tokens)


def test_each_of_several_sequences_has_a_seed_of_its_own(
    engine: Engine, alone: dict[str, list[SequenceResult]]
) -> None:
    several = [answer.tokens for answer in alone["several"]]
    assert len({tuple(found) for found in several}) == 3
    for index, found in enumerate(several):
        seed = sequence_seed(11, index)
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        assert one(engine, request(f"s{index}", sampling=sampling)).tokens == found


def test_draws_follow_from_the_seed(engine: Engine, opened: OpenedVariant) -> None:
    def draw(seed: int, temperature: float = 5.0) -> list[int]:
        return one(engine, request(sampling=SamplingParams(temperature=temperature, seed=seed))).tokens

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(7, temperature=1e-6) == greedy(opened.executor, [PROMPT], 24)[0]


def test_a_stop_string_ends_the_text_before_it(
    stop: str, alone: dict[str, list[SequenceResult]], engine: Engine
) -> None:
    stopped = alone["stopped"][0]
    assert stopped.ending is not None
    assert (stopped.ending.finish, stopped.ending.stop) == (FinishReason.STOP, stop)
    whole = one(engine, request(max_tokens=40)).text
    assert stopped.text == whole[: whole.index(stop)]


def test_a_stop_id_ends_an_answer_once_it_is_long_enough(opened: OpenedVariant) -> None:
    made = greedy(opened.executor, [PROMPT], 24)[0]
    place = next(place for place in range(4, 24) if made.index(made[place]) == place)
    answer = one(opened.engine, request(stop_ids=frozenset({made[place]})))
    assert answer.tokens == made[: place + 1]
    assert answer.text == opened.tokenizer.decode(made[:place])
    assert answer.ending is not None
    assert answer.ending.finish is FinishReason.STOP
    longer = one(opened.engine, request(stop_ids=frozenset({made[place]}), min_tokens=place + 3))
    assert len(longer.tokens) >= place + 3
    assert longer.tokens[:place] == made[:place]
    assert made[place] not in longer.tokens[: place + 2]


def test_a_grammar_holds_the_text(alone: dict[str, list[SequenceResult]]) -> None:
    answer = alone["grammar"][0]
    assert answer.ending is not None
    if answer.ending.finish is FinishReason.STOP:
        assert json.loads(answer.text).keys() == {"name", "age"}
    assert answer.text.lstrip().startswith("{")


def test_a_grammar_holds_from_its_marker_on(alone: dict[str, list[SequenceResult]]) -> None:
    free, *calls = alone["calls"][0].text.split("e")
    assert free
    assert len(calls) > 2
    for call in calls[:-1]:
        assert re.match("[a-d]{2,6};", call), call
    assert re.match("[a-d]{0,6}(;|$)", calls[-1])


def test_a_grammar_with_log_probabilities_writes_the_same(
    engine: Engine, alone: dict[str, list[SequenceResult]]
) -> None:
    wanted = request(
        "grammar",
        grammar=Grammar("json_schema", SCHEMA),
        sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=1),
        max_tokens=60,
    )
    answer = one(engine, wanted)
    assert answer.tokens == alone["grammar"][0].tokens
    assert [chosen.token for chosen in answer.chosen] == answer.tokens
    assert all(chosen.logprob is not None and chosen.logprob <= 0.0 for chosen in answer.chosen)


def log_softmax(rows: Any) -> Any:
    rows = rows.astype(np.float64)
    shifted = rows - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("rows", [512, 10])
def test_a_text_is_scored_token_by_token(rows: int, tiny_folder: Path, opened: OpenedVariant) -> None:
    other = open_tiny(tiny_folder, max_rows=rows).engine
    expected = log_softmax(logits(opened.executor, [PROMPT])[0])
    for score_from in (0, 1, 30, len(PROMPT)):
        answer = one(other, request(kind="score", score_from=score_from, sampling=SamplingParams(logprobs=2)))
        measured = answer.prompt or []
        first = max(1, score_from)
        assert [chosen.token for chosen in measured] == list(PROMPT[first:])
        assert [chosen.logprob for chosen in measured] == pytest.approx(
            [expected[place - 1, PROMPT[place]] for place in range(first, len(PROMPT))], abs=1e-3
        )
        assert all(chosen.top[0][0] == expected[first + n - 1].argmax() for n, chosen in enumerate(measured))
        assert answer.tokens == []
        assert answer.ending is not None
        assert answer.ending.finish is FinishReason.STOP


def test_a_prompt_is_measured_beside_its_answer(engine: Engine, opened: OpenedVariant) -> None:
    expected = log_softmax(logits(opened.executor, [PROMPT])[0])
    answer = one(engine, request(prompt_logprobs=0, sampling=SamplingParams(logprobs=0)))
    assert [chosen.logprob for chosen in answer.prompt or []] == pytest.approx(
        [expected[place - 1, PROMPT[place]] for place in range(1, len(PROMPT))], abs=1e-3
    )
    assert answer.tokens == greedy(opened.executor, [PROMPT], 24)[0]
    assert answer.chosen[0].logprob == pytest.approx(expected[-1].max(), abs=1e-3)


@pytest.mark.parametrize("surface", ["chat", "voice", "agent", "batch"])
@pytest.mark.parametrize("kind", ["generate", "score", "embed"])
def test_one_slow_step_stops_nobody(kind: str, surface: str, tiny_folder: Path) -> None:
    other = open_tiny(tiny_folder).engine
    other.scheduler.model.observe(32, 528, 60.0)  # a machine that was busy, or weights that came from a slow disk
    other.submit(request(kind=kind, surface=surface))
    for _ in range(200):
        other.step()
    assert other.idle


def test_a_thousand_texts_are_scored_in_one_go(engine: Engine, opened: OpenedVariant) -> None:
    texts = [tuple(5 + (seed * 7919 + place * 31) % 4000 for place in range(4 + seed % 9)) for seed in range(1000)]
    wanted = [request(str(n), prompt=text, kind="score", score_from=2, surface="batch") for n, text in enumerate(texts)]
    found = run(engine, wanted)
    for n in (0, 333, 999):
        expected = log_softmax(logits(opened.executor, [texts[n]])[0])
        measured = found[str(n)][0].prompt or []
        assert [chosen.logprob for chosen in measured] == pytest.approx(
            [expected[place - 1, texts[n][place]] for place in range(2, len(texts[n]))], abs=1e-3
        )


@pytest.mark.parametrize("rows", [512, 10])
def test_a_decoder_embeds_the_mean_of_its_states(rows: int, tiny_folder: Path, opened: OpenedVariant) -> None:
    other = open_tiny(tiny_folder, max_rows=rows).engine
    texts = [PROMPT, PROMPT[:3], tuple(range(100, 190))]
    wanted = [request(f"e{n}", prompt=text, kind="embed") for n, text in enumerate(texts)]
    found = run(other, [*wanted, request("beside")])
    expected = embed(opened.executor, texts)
    for n in range(3):
        assert np.array_equal(np.frombuffer(found[f"e{n}"][0].vector or b"", dtype="<f4"), expected[n])
    assert found["beside"][0].tokens == greedy(opened.executor, [PROMPT], 24)[0]


def test_an_encoder_embeds_and_writes_nothing(tmp_path: Path) -> None:
    write_random_model("minilm-l6", tmp_path / "encoder")
    encoder = open_tiny(tmp_path / "encoder", weights="bf16", kv="f32", kv_tokens=None)
    texts = [tuple(range(10, 30)), (7,), tuple(range(100, 300)), tuple(range(50, 250))]
    wanted = [request(str(n), prompt=text, kind="embed") for n, text in enumerate(texts)]
    found = run(encoder.engine, wanted)
    expected = embed(encoder.executor, texts)
    for n in range(4):
        vector = np.frombuffer(found[str(n)][0].vector or b"", dtype="<f4")
        assert vector == pytest.approx(expected[n], abs=1e-6)
    with pytest.raises(RequestError, match="encoder"):
        encoder.engine.submit(request())


def test_a_cancelled_request_is_gone_by_the_next_step(engine: Engine, opened: OpenedVariant) -> None:
    def cancel(step: int) -> None:
        if step == 5:
            engine.cancel("gone")

    found = run(engine, [request("gone", max_tokens=200), request("stays")], at_step=cancel)
    gone = found["gone"][0]
    assert gone.ending is not None
    assert gone.ending.finish is FinishReason.CANCELLED
    assert 3 <= len(gone.tokens) <= 5
    assert found["stays"][0].tokens == greedy(opened.executor, [PROMPT], 24)[0]
    assert engine.blocks.stats().used == 0


def test_a_request_that_is_cancelled_while_its_step_runs_ends_with_it(engine: Engine) -> None:
    engine.submit(request("gone", max_tokens=200))
    while engine.begin() is None or engine.timing.steps % 7 != 3:
        if engine.ticket is not None:
            engine.finish()
            engine.deliver()
    engine.cancel("gone")
    engine.finish()
    (output,) = engine.deliver()
    assert output.ending is not None
    assert output.ending.finish is FinishReason.CANCELLED
    assert engine.idle


def test_a_deadline_cuts_an_answer_short_with_what_there_is(opened: OpenedVariant) -> None:
    now = 0.0
    base = opened.engine
    engine = Engine(opened.executor, base.scheduler, base.blocks, opened.tokenizer, clock=lambda: now)

    def tick(step: int) -> None:
        nonlocal now
        now += 0.01

    wanted = request("late", max_tokens=200, deadline=0.2, arrival=0.0)
    answer = run(engine, [wanted], at_step=tick)["late"][0]
    assert answer.ending is not None
    assert answer.ending.finish is FinishReason.DEADLINE
    expected = greedy(opened.executor, [PROMPT], 24)[0]
    assert 3 < len(answer.tokens) < 24
    assert answer.tokens == expected[: len(answer.tokens)]


def test_what_is_cut_in_the_queue_has_used_nothing(opened: OpenedVariant) -> None:
    engine = opened.engine
    assert engine.submit(request("waits")).accepted
    engine.cancel("waits")
    (output,) = engine.deliver()
    assert output.ending is not None
    assert (output.ending.finish, output.ending.usage.prompt_tokens) == (FinishReason.CANCELLED, 0)


def test_a_step_that_fails_fails_those_in_it_and_no_others(
    opened: OpenedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened.engine
    launch = opened.executor.launch
    count = 0

    def failing(batch: StepBatch) -> StepTicket:
        nonlocal count
        count += 1
        if count != 3:
            return launch(batch)
        ticket: Future[Any] = Future()
        ticket.set_exception(RuntimeError("the hardware is on fire"))
        return ticket

    monkeypatch.setattr(opened.executor, "launch", failing)

    def more(step: int) -> None:
        if step == 5:
            engine.submit(request("later"))

    answers = run(engine, [request("unlucky")], at_step=more)
    unlucky = answers["unlucky"][0]
    assert unlucky.ending is not None
    assert unlucky.ending.finish is FinishReason.FAILED
    assert "on fire" in unlucky.ending.why
    assert unlucky.tokens == greedy(opened.executor, [PROMPT], 2)[0]
    assert engine.scheduler.stats().failed == 1
    after = one(engine, request("after"))
    assert after.tokens == greedy(opened.executor, [PROMPT], 24)[0]


def test_what_a_failed_step_computed_is_not_found_in_the_cache(
    tiny_folder: Path, opened: OpenedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_tiny(tiny_folder, kv_tokens=256)  # so little that the blocks are those of the failed step
    launch = other.executor.launch

    def spoil(batch: StepBatch) -> StepTicket:
        wrong = replace(batch, tokens=batch.tokens[::-1].copy())
        other.executor.collect(launch(wrong))
        ticket: Future[Any] = Future()
        ticket.set_exception(RuntimeError("bit rot"))
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(other.executor, "launch", spoil)
        failed = one(other.engine, request("spoiled"))
    assert failed.ending is not None
    assert failed.ending.finish is FinishReason.FAILED
    after = one(other.engine, request("after"))
    assert after.ending is not None
    assert after.ending.usage.cached_tokens == 0
    assert after.tokens == greedy(opened.executor, [PROMPT], 24)[0]


def test_a_row_without_a_choice_fails_its_sequence_alone(
    opened: OpenedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = opened.executor.collect

    def spoiled(ticket: StepTicket) -> Any:
        result = collect(ticket)
        if len(result.values) == 2:
            result.values[0] = np.nan
        return result

    monkeypatch.setattr(opened.executor, "collect", spoiled)
    found = run(opened.engine, [request("bad", max_tokens=20), request("good", prompt=PROMPT[:9], max_tokens=20)])
    endings = {id: answers[0].ending for id, answers in found.items()}
    assert sorted(ending.finish for ending in endings.values() if ending) == [FinishReason.FAILED, FinishReason.LENGTH]
    failed = next(ending for ending in endings.values() if ending and ending.finish is FinishReason.FAILED)
    assert "no token can be chosen" in failed.why


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (5, 10**6)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": PROMPT * 5}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 100}, "stop"),
        ({"stop_ids": frozenset({10**6})}, "stop_token_ids"),
        ({"prompt_logprobs": 10**5}, "prompt_logprobs"),
        ({"grammar": Grammar("json_schema", "{")}, "grammar"),
        ({"grammar": Grammar("regex", "(")}, "grammar"),
        ({"surface": "kitchen"}, "surface"),
        ({"weight": 0.0}, "weight"),
        ({"priority": 99}, "priority"),
        ({"deadline": float("nan")}, "deadline"),
        ({"kind": "score", "score_from": 999}, "score_from"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(changes: dict[str, Any], parameter: str, engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(request(**changes))
    assert caught.value.parameter == parameter
    assert engine.idle


def test_output_that_its_grammar_does_not_allow_is_refused(engine: Engine, opened: OpenedVariant) -> None:
    wrong = tuple(opened.tokenizer.encode("The water", add_special_tokens=False))
    with pytest.raises(RequestError, match="grammar"):
        engine.submit(request(grammar=Grammar("json_object")), output=wrong)
    assert engine.idle


def test_a_prompt_is_found_in_the_cache_the_second_time(tiny_folder: Path) -> None:
    engine = open_tiny(tiny_folder).engine
    first, second = one(engine, request("a")), one(engine, request("b"))
    assert first.ending is not None
    assert second.ending is not None
    assert first.tokens == second.tokens
    assert (first.ending.usage.cached_tokens, second.ending.usage.cached_tokens) == (0, len(PROMPT) - 1)
    other = one(engine, request("c", salt="another tenant"))
    assert other.ending is not None
    assert (other.tokens, other.ending.usage.cached_tokens) == (first.tokens, 0)


def test_outputs_of_a_step_come_while_the_next_one_runs(engine: Engine) -> None:
    engine.submit(request("slow", max_tokens=4))
    assert engine.deliver() == []
    seen: list[list[int]] = []
    for _ in range(5):
        seen += [output.tokens for output in engine.overlapped_step()]
    assert [len(made) for made in seen] == [1, 1, 1, 1]
    assert engine.idle


def test_what_follows_a_grammar_of_one_choice_takes_few_steps(engine: Engine) -> None:
    before = engine.timing.steps
    grammar = Grammar("choice", json.dumps(["the water runs down the narrow channel to the wheel"]))
    answer = one(engine, request("choice", grammar=grammar, max_tokens=60))
    assert answer.text == "the water runs down the narrow channel to the wheel"
    assert len(answer.tokens) > 2 * (engine.timing.steps - before)


def test_a_changed_copy_of_a_request_is_another_request(engine: Engine) -> None:
    base = request("a", sampling=SAMPLED)
    assert one(engine, base).tokens == one(engine, replace(base, id="b")).tokens


def test_every_request_ends_once_whatever_happens_to_the_others(tiny_folder: Path, engine: Engine) -> None:
    chance = random.Random(7)
    now = 0.0
    base = open_tiny(tiny_folder, kv_tokens=1024, max_rows=64, speculation="ngram", max_sequences=12)
    busy = Engine(base.executor, base.engine.scheduler, base.engine.blocks, base.tokenizer, clock=lambda: now)
    wanted: dict[str, GenerationRequest] = {}
    answers: dict[str, SequenceResult] = {}
    endings: Counter[str] = Counter()
    for step in range(4000):
        now += 0.004
        if len(wanted) < 150 and chance.random() < 0.4:
            start = chance.randrange(5, 12) * 100
            each = request(
                str(len(wanted)),
                prompt=tuple(range(start, start + chance.randrange(1, 120))),
                max_tokens=chance.randrange(1, 60),
                sampling=SamplingParams(
                    temperature=chance.choice([0.0, 1.0]), seed=step, presence_penalty=step % 3 / 10
                ),
                deadline=now + chance.uniform(0.05, 2.0) if chance.random() < 0.2 else None,
                arrival=now,
                tenant=chance.choice("abc"),
                surface=chance.choice(["chat", "batch", "voice"]),
                priority=chance.randrange(-1, 2),
            )
            if busy.submit(each).accepted:
                wanted[each.id] = each
                answers[each.id] = SequenceResult(0)
        if wanted and chance.random() < 0.05:
            busy.cancel(chance.choice(list(wanted)))
        for output in busy.overlapped_step():
            answers[output.request].add(output)
            endings[output.request] += output.ending is not None
        if len(wanted) == 150 and busy.idle:
            break
    busy.blocks.check()
    assert busy.blocks.stats().used == 0
    assert set(endings) == set(wanted)
    assert set(endings.values()) == {1}
    finishes = Counter(answer.ending.finish for answer in answers.values() if answer.ending)
    assert finishes.keys() >= {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE}
    assert FinishReason.FAILED not in finishes
    for id, answer in list(answers.items())[::5]:
        whole = one(engine, replace(wanted[id], deadline=None))
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert whole.text.startswith(answer.text) or not answer.text.isascii()
        assert answer.ending is not None
        if answer.ending.finish is FinishReason.LENGTH:
            assert (answer.tokens, answer.text) == (whole.tokens, whole.text)
