"""headrace.LLM and headrace.AsyncLLM as a program uses them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import LLM, AsyncLLM
from headrace.engine.executors.runner import embed, greedy, logits
from headrace.engine.grammar.constraints import Grammar
from headrace.engine.interface.request import FinishReason
from headrace.errors import RequestError
from headrace.llm.prompting import prefix_tokens

OPTIONS: dict[str, Any] = {"weights": "int8", "context": 256, "threads": 2, "cache": False, "checks": True}
CHAT = [{"role": "user", "content": "Where does the water run?"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        yield llm


def test_texts_are_continued_in_their_order(llm: LLM) -> None:
    texts = ["The water ran", "Hello", "The water"]
    found = llm.generate(texts, max_tokens=9, ignore_eos=True)
    prompts = [llm.tokenizer.encode(text) for text in texts]
    expected = greedy(llm.opened.executor, prompts, 9)
    assert [generation.prompt for generation in found] == prompts
    assert [generation.completions[0].tokens for generation in found] == expected
    assert [generation.text for generation in found] == [llm.tokenizer.decode(tokens) for tokens in expected]
    assert {generation.completions[0].finish for generation in found} == {FinishReason.LENGTH}


def test_a_prompt_is_a_text_or_tokens_or_several_of_either(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("The water ran")
    expected = llm.generate("The water ran", max_tokens=5)[0].text
    for prompts in (tokens, [tokens], ["The water ran"], [tuple(tokens)], np.array(tokens)):
        assert [generation.text for generation in llm.generate(prompts, max_tokens=5)] == [expected]
    assert llm.generate([]) == []


def test_wishes_of_the_sampling_are_given_by_name(llm: LLM) -> None:
    wishes: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 4, "n": 3, "logprobs": 2}
    (first,), (again,) = llm.generate("Hello", **wishes), llm.generate("Hello", **wishes)
    assert first == again or [c.tokens for c in first.completions] == [c.tokens for c in again.completions]
    assert len({tuple(completion.tokens) for completion in first.completions}) == 3
    for completion in first.completions:
        assert completion.logprobs is not None
        assert [chosen.token for chosen in completion.logprobs] == completion.tokens
        assert {len(chosen.top) for chosen in completion.logprobs} == {2}


def test_a_stop_string_may_be_given_alone(llm: LLM) -> None:
    whole = llm.generate("Hello", max_tokens=30)[0].text
    stop = whole[10:13]
    completion = llm.generate("Hello", max_tokens=30, stop=stop)[0].completions[0]
    assert (completion.text, completion.finish, completion.stop) == (
        whole[: whole.index(stop)],
        FinishReason.STOP,
        stop,
    )


def test_an_answer_follows_a_grammar(llm: LLM) -> None:
    grammar = Grammar("choice", json.dumps(["to the wheel", "to the sea"]))
    found = llm.generate(["It runs", "It ran"], grammar=grammar, temperature=1.0, seed=2)
    assert {generation.text for generation in found} <= {"to the wheel", "to the sea"}


def test_chats_go_through_the_template(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(llm.tokenizer.apply_template(CHAT), add_special_tokens=False)
    one = llm.chat(CHAT, max_tokens=6)
    assert one[0].prompt == prompt
    several = llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "Down."}, *CHAT]], max_tokens=6)
    assert several[0].text == one[0].text
    assert len(several[1].prompt) > len(prompt)


def test_a_stream_gives_the_same_text_piece_by_piece(llm: LLM) -> None:
    outputs = list(llm.stream("Hello", max_tokens=20, temperature=1.0, seed=5))
    whole = llm.generate("Hello", max_tokens=20, temperature=1.0, seed=5)[0].completions[0]
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.tokens] == whole.tokens
    assert outputs[-1].ending is not None
    assert len(outputs) > 3


def test_a_stream_that_is_left_frees_its_memory(llm: LLM) -> None:
    for output in llm.stream("Hello", max_tokens=200):
        if output.tokens:
            break
    assert llm.generate("Hello", max_tokens=3)[0].text
    assert llm.stats()["blocks"].used == 0


def test_texts_are_scored_after_others(llm: LLM) -> None:
    pairs = [("The water", " ran down"), ("The water", " ran up the hill"), ("Hello", [5, 6, 7])]
    found = llm.score(pairs)
    before, whole = llm.tokenizer.encode("The water"), llm.tokenizer.encode("The water ran down")
    rows = logits(llm.opened.executor, [whole])[0].astype(np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    expected = sum(logprobs[place - 1, whole[place]] for place in range(len(before), len(whole)))
    assert found[0].logprob == pytest.approx(expected, abs=1e-3)
    assert [chosen.token for chosen in found[2].tokens] == [5, 6, 7]
    assert not found[0].likeliest
    likely = llm.generate("The water", max_tokens=3)[0].completions[0].tokens
    assert llm.score([(llm.tokenizer.encode("The water"), likely)])[0].likeliest


def test_texts_become_vectors(llm: LLM) -> None:
    texts = ["The water ran", "Hello"]
    expected = embed(llm.opened.executor, [llm.tokenizer.encode(text) for text in texts])
    assert np.array_equal(llm.embed(texts), expected)
    assert llm.embed([]).shape == (0, expected.shape[1])


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"wisdom": 3}, "wisdom"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"grammar": Grammar("regex", "(")}, "grammar"),
        ({"max_tokens": 10_000}, "max_tokens"),
    ],
)
def test_a_wrong_wish_is_refused_by_name_and_nothing_is_left(wishes: dict[str, Any], parameter: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "Hello"], **wishes)
    assert caught.value.parameter == parameter
    assert llm.generate("Hello", max_tokens=2)[0].text is not None
    assert llm.stats()["scheduler"].running == 0


def test_one_prompt_that_is_too_long_ends_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="do not fit"):
        llm.generate([[5, 6], [7] * 500], max_tokens=100)
    assert llm.stats()["blocks"].used == 0


def test_more_requests_than_may_wait_are_run_all_the_same(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **OPTIONS, queued_sequences=8, max_sequences=4) as llm:
        found = llm.generate([[5 + n, 6] for n in range(40)], max_tokens=3)
        assert len(found) == 40
        assert {generation.completions[0].finish for generation in found} == {FinishReason.LENGTH}


def test_the_package_names_only_what_it_has() -> None:
    assert headrace.LLM is LLM
    with pytest.raises(AttributeError):
        headrace.Mill  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_the_same_from_processes_of_their_own(tiny_folder: Path, llm: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), replicas=2, **OPTIONS) as remote:
            texts = ["The water ran", "Hello", "The water"]
            wishes: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
            expected = llm.generate(texts, **wishes)
            found = await remote.generate(texts, **wishes)
            assert [[c.tokens for c in g.completions] for g in found] == [
                [c.tokens for c in g.completions] for g in expected
            ]
            assert (await remote.chat(CHAT, max_tokens=6))[0].text == llm.chat(CHAT, max_tokens=6)[0].text
            pairs = [("The water", " ran down"), ("Hello", " again")]
            assert await remote.score(pairs) == llm.score(pairs)
            assert np.array_equal(await remote.embed(texts), llm.embed(texts))
            async with remote.stream("Hello", max_tokens=20) as stream:
                text = "".join([output.text async for output in stream])
            assert text == llm.generate("Hello", max_tokens=20)[0].text
            with pytest.raises(RequestError, match="vocabulary"):
                await remote.generate([[10**6]])

    asyncio.run(asyncio.wait_for(ask(), 60.0))


SYSTEM = "You answer questions about rivers. Say only what you know, and say it in one short sentence. " * 2


def test_a_pinned_system_message_is_computed_before_the_first_chat(tiny_folder: Path) -> None:
    chat = [{"role": "system", "content": SYSTEM}, *CHAT]
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        kept = llm.pin(system=SYSTEM)
        assert kept % 16 == 0
        assert kept > 32
        (found,) = llm.chat(chat, max_tokens=4)
        assert found.completions[0].usage.cached_tokens >= kept
        assert llm.stats()["blocks"].pinned == kept // 16
        llm.unpin(system=SYSTEM)
        assert llm.stats()["blocks"].pinned == 0
        with pytest.raises(RequestError, match="not pinned"):
            llm.unpin(system=SYSTEM)
        assert llm.pin(llm.tokenizer.encode("The water ran and ran. " * 9)) > 32
        with pytest.raises(RequestError, match="either a prefix or a system message"):
            llm.pin("a", system="b")
        with pytest.raises(RequestError, match="fills no block"):
            llm.pin("a")


def test_the_tokens_of_a_pin_are_those_of_every_prompt_that_begins_with_it(llm: LLM) -> None:
    encode = llm.tokenizer.encode
    for text in ("The water ran", "The water ran ", "and 4", ""):
        tokens = prefix_tokens(llm.tokenizer, text=text)
        for more in (" on", "ning", "2", "\n", ""):
            assert tuple(encode(text + more)[: len(tokens)]) == tokens, (text, more)
    tokens = prefix_tokens(llm.tokenizer, system=SYSTEM)
    for user in ("Hello", "", "17 and 4?"):
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        prompt = encode(llm.tokenizer.apply_template(chat), add_special_tokens=False)
        assert tuple(prompt[: len(tokens)]) == tokens


def test_workers_keep_a_pin_over_a_crash(tiny_folder: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as llm:
            kept = await llm.pin(system=SYSTEM)
            (before,) = llm.supervisor.pids
            assert before is not None
            os.kill(before, signal.SIGKILL)
            while llm.supervisor.pids == [before] or await pinned(llm) != [kept // 16]:
                await asyncio.sleep(0.01)
            chat = [{"role": "system", "content": SYSTEM}, *CHAT]
            (found,) = await llm.chat(chat, max_tokens=4)
            assert found.completions[0].usage.cached_tokens >= kept
            await llm.unpin(system=SYSTEM)
            assert await pinned(llm) == [0]

    async def pinned(llm: AsyncLLM) -> list[int]:
        return [stats["blocks"]["pinned"] for stats in await llm.client.stats()]

    asyncio.run(asyncio.wait_for(run(), 120.0))
