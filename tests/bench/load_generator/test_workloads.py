"""What is asked follows from the seed, has the lengths that its workload says, and shares what it should share."""

from __future__ import annotations

import itertools
import json
import statistics
from typing import Any

import pytest

from headrace.bench.client.http_client import Target
from headrace.bench.load_generator.benchmark_options import WorkloadOptions, build_mix
from headrace.bench.load_generator.request_builder import (
    BuiltRequest,
    PrebuiltRequests,
    RequestBuilder,
    TemplateOverheads,
    shape_of,
)
from headrace.bench.load_generator.text_generator import WORDS, TextGenerator, WordCosts
from headrace.bench.load_generator.workloads import (
    WORKLOADS,
    ConversationTurn,
    PromptPrefix,
    Session,
    SharedPrefixes,
    UniformLengths,
    Workload,
    scaled,
    sessions,
)
from headrace.bench.simulation.synthetic_traffic import LogNormalLengths
from headrace.errors import RequestError

COSTS = WordCosts(WORDS, (1,) * len(WORDS), 1, 0)
FRAMES = TemplateOverheads({("user",): 5, ("system", "user"): 8, ("user", "assistant") * 4 + ("user",): 29})


def prompts(*, chat: bool = True, nonce: str = "n", **options: Any) -> RequestBuilder:
    writer = TextGenerator(COSTS, seed=0, nonce=nonce)
    return RequestBuilder(
        Target.of("http://x"),
        chat=chat,
        body={"model": "m"},
        headers={},
        writer=writer,
        frames=FRAMES if chat else TemplateOverheads(),
        **options,
    )


def body(prompt: BuiltRequest) -> dict[str, Any]:
    return json.loads(prompt.request.partition(b"\r\n\r\n")[2])


def head(prompt: BuiltRequest) -> str:
    return prompt.request.partition(b"\r\n\r\n")[0].decode()


def words(prompt: BuiltRequest) -> list[str]:
    found = body(prompt)
    texts: list[str] = [each["content"] for each in found["messages"]] if "messages" in found else [found["prompt"]]
    return " ".join(texts).split()


def drawn(workload: Workload, count: int, seed: int = 0, tenant: str = "") -> list[Session]:
    return list(itertools.islice(sessions([(workload, 1.0)], seed=seed, tenant=tenant), count))


FIXED = Workload(name="fixed", own=UniformLengths(100), answer=UniformLengths(20))


def test_sessions_are_the_seeds() -> None:
    assert drawn(WORKLOADS["agent"], 20) == drawn(WORKLOADS["agent"], 20)
    assert drawn(WORKLOADS["agent"], 20) != drawn(WORKLOADS["agent"], 20, seed=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_the_lengths_that_it_names(name: str) -> None:
    workload = WORKLOADS[name]
    found = drawn(workload, 600)
    asked = workload.own, workload.answer
    assert isinstance(asked[0], LogNormalLengths)
    assert isinstance(asked[1], LogNormalLengths)
    own = statistics.median(turn.tokens for session in found for turn in session.turns)
    answer = statistics.median(turn.answer for session in found for turn in session.turns)
    assert own == pytest.approx(asked[0].median, rel=0.2)
    assert answer == pytest.approx(asked[1].median, rel=0.2)
    half = drawn(scaled(workload, 0.5), 600)
    assert statistics.median(turn.answer for each in half for turn in each.turns) == pytest.approx(answer / 2, rel=0.1)


def test_a_mix_has_its_shares() -> None:
    mix = build_mix(WorkloadOptions(workload="chat=3,rag=1"))
    names = [session.workload for session in itertools.islice(sessions(mix, seed=0), 1000)]
    assert names.count("chat") == pytest.approx(750, abs=50)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (WorkloadOptions(workload="nobody"), "nobody"),
        (WorkloadOptions(workload="chat=x"), "chat=x"),
        (WorkloadOptions(workload="chat", input_tokens=5), "scale"),
        (WorkloadOptions(turns="5-2"), "turns"),
        (WorkloadOptions(spread=2.0), "spread"),
        (WorkloadOptions(prefix_share=-1.0), "prefix-share"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(asked: WorkloadOptions, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        build_mix(asked)


def test_flags_change_a_workloads_prefixes() -> None:
    ((plain, _),) = build_mix(WorkloadOptions())
    assert plain.shared is None
    ((with_prefix, _),) = build_mix(WorkloadOptions(prefix_tokens=64))
    assert with_prefix.shared == SharedPrefixes(count=1, tokens=64)
    ((without, _),) = build_mix(WorkloadOptions(workload="chat", prefixes=0))
    assert without.shared is None
    ((more, _),) = build_mix(
        WorkloadOptions(workload="chat", prefixes=9, prefix_kind="few-shot", turns="2-3", think=1.5)
    )
    assert more.shared == SharedPrefixes(count=9, tokens=200, kind="few-shot")
    assert (more.turns, more.think) == ((2, 3), 1.5)


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_has_the_length_that_was_asked_by_the_servers_count(chat: bool) -> None:
    built = prompts(chat=chat).build(drawn(FIXED, 1)[0], 0, ())
    assert built.asked_input == 100
    assert len(words(built)) == (95 if chat else 100)  # the frame of a chat is in it
    assert (body(built)["max_tokens"], body(built)["ignore_eos"], built.asked_output) == (20, True, 20)


@pytest.mark.parametrize("kind", ["system", "few-shot", "documents"])
@pytest.mark.parametrize("chat", [True, False])
def test_prefixes_are_shared_and_come_on_top(kind: Any, chat: bool) -> None:
    workload = Workload(
        name="w",
        own=UniformLengths(100),
        answer=UniformLengths(20),
        shared=SharedPrefixes(count=2, tokens=64, kind=kind),
    )
    maker = prompts(chat=chat)
    found = drawn(workload, 30)
    built = [maker.build(session, 0, ()) for session in found]
    assert {prompt.asked_input for prompt in built} == {164}
    for session, prompt in zip(found, built, strict=True):
        frame = FRAMES.of(shape_of(session, chat=True)) if chat else 0
        assert len(words(prompt)) == 164 - frame
    begins = {tuple(words(prompt)[:64]) for prompt in built}
    assert len(begins) == 2
    assert len({tuple(words(prompt)[64:80]) for prompt in built}) == 30
    if chat:
        roles = [message["role"] for message in body(built[0])["messages"]]
        assert roles == list(shape_of(found[0], chat=True))


def test_only_a_share_of_the_sessions_has_a_prefix() -> None:
    workload = Workload(
        name="w", own=UniformLengths(10), answer=UniformLengths(2), shared=SharedPrefixes(count=1, tokens=8, share=0.25)
    )
    having = sum(session.prefix is not None for session in drawn(workload, 1000))
    assert having == pytest.approx(250, abs=40)


def test_no_prompt_begins_as_another_ones_or_another_runs() -> None:
    def begins(nonce: str, tenant: str = "") -> set[tuple[str, ...]]:
        maker = prompts(nonce=nonce)
        return {tuple(words(maker.build(each, 0, ()))[1:5]) for each in drawn(FIXED, 200, tenant=tenant)}

    one, later, other = begins("a"), begins("b"), begins("a", "tenant")
    assert len(one) == len(later) == len(other) == 200
    assert not one & later
    assert not one & other


def test_tenants_do_not_share_prefixes() -> None:
    workload = Workload(
        name="w", own=UniformLengths(10), answer=UniformLengths(2), shared=SharedPrefixes(count=1, tokens=32)
    )
    maker = prompts()
    one, other = (words(maker.build(drawn(workload, 1, tenant=tenant)[0], 0, ()))[:32] for tenant in "ab")
    assert one != other


def test_later_turns_carry_what_was_said() -> None:
    session = Session(
        number=0,
        name="s",
        turns=(ConversationTurn(20, 5), ConversationTurn(10, 5)),
        prefix=PromptPrefix("p", "system", 8),
    )
    maker = prompts()
    first = maker.build(session, 0, ())
    second = maker.build(session, 1, [(first.text, "an answer")])
    messages = body(second)["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[:2] == body(first)["messages"]
    assert messages[2]["content"] == "an answer"
    assert len(messages[3]["content"].split()) == 10
    assert second.asked_input == 0  # nobody knows how long the answer was in tokens
    text = prompts(chat=False).build(session, 1, [(first.text, "an answer")])
    assert " an answer " in body(text)["prompt"]


def test_blocks_of_the_same_id_have_the_same_text() -> None:
    def session(number: int, tokens: int, *blocks: str) -> Session:
        return Session(
            number=number, name=f"s{number}", turns=(ConversationTurn(tokens, 1),), blocks=blocks, block_tokens=32
        )

    maker = prompts(chat=False)
    one, other, short = (
        words(maker.build(each, 0, ()))
        for each in (session(0, 70, "1", "2", "3"), session(1, 80, "1", "2"), session(2, 40, "1", "2"))
    )
    assert (len(one), len(other), len(short)) == (70, 80, 40)
    assert one[:64] == other[:64]
    assert one[64:] != other[64:70]
    assert short == one[:40]


def test_a_prompt_that_is_given_goes_as_it_is() -> None:
    session = Session(number=0, name="s", turns=(ConversationTurn(0, 0),), text="Why?")
    built = prompts().build(session, 0, ())
    assert body(built) == {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
    assert built.asked_input == 0


def test_each_tenant_has_its_key_and_its_surface() -> None:
    maker = prompts(keys={"a": "sk-a"})
    session = Session(
        number=0, name="s", turns=(ConversationTurn(9, 1),), tenant="a", surface="voice", priority=2, deadline=1.5
    )
    said = head(maker.build(session, 0, ()))
    assert "authorization: Bearer sk-a\r\n" in said
    assert "x-headrace-surface: voice\r\n" in said
    assert "x-headrace-priority: 2\r\n" in said
    assert "x-headrace-deadline-ms: 1500\r\n" in said
    assert "authorization" not in head(maker.build(drawn(FIXED, 1, tenant="b")[0], 0, ()))


def test_requests_built_ahead_are_those_built_when_due() -> None:
    late, early = (PrebuiltRequests(iter(drawn(FIXED, 5)), prompts()) for _ in range(2))
    early.fill(3)
    early.fill(2)
    assert [early.next() for _ in range(6)] == [late.next() for _ in range(6)]
    assert early.next() is None
