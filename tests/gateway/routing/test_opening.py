"""Openings: who writes which part of an answer, what the client is told, and who is charged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.config.routing_section import OpeningConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenUsage, Tool
from headrace.gateway.routing.composite_answerer import Answerer, derive_exchange, sum_usage
from headrace.gateway.routing.opening import OpeningAnswerer, why_not_opened
from tests.support.running_server import asynchronous, until
from tests.support.scripted_answers import (
    PROMPT,
    Client,
    Line,
    Scripted,
    Stage,
    answer,
    asked_for,
    broken,
    deliver,
    ends,
    exchange_of,
    served,
)

OPENING = OpeningConfig(small="draft", large="mini")
COMPUTED: list[Line] = [ends(finish="length")]  # the prompt alone


def token(text: str) -> ChoiceDelta:
    return ChoiceDelta(0, text, tokens=1)


def words(*texts: str) -> list[Line]:
    return [*(token(text) for text in texts), ends(tokens=len(texts))]


class Opened:
    """An opening over scripts: of the small model, of the large one's prompt, and of its continuation."""

    def __init__(
        self,
        small: Sequence[Line],
        large: Sequence[Line],
        *,
        ahead: Sequence[Line] | None = None,
        computed: Sequence[Line] = COMPUTED,
        config: OpeningConfig = OPENING,
        asked: TextRequest | None = None,
        refused: ApiError | None = None,
        small_refused: ApiError | None = None,
    ) -> None:
        self.stage = Stage(exchange_of(asked or asked_for(stream=True)))
        self.first = asyncio.Event()  # the client has something: by default, the prompt is computed then
        self.client = Client(room=self.note_first)
        self.continued: list[TextRequest] = []
        scripts = [[self.first, *computed] if ahead is None else ahead, large]

        def make_large(text_request: TextRequest) -> Answerer:
            script = scripts[min(len(self.stage.made.get("mini", ())), 1)] if not small_refused else large
            refuses = refused if text_request.max_tokens != 0 else None
            part = Scripted(derive_exchange(self.stage.exchange, served("mini"), text_request), script, refuses)
            self.stage.made.setdefault("mini", []).append(part)
            if text_request.max_tokens != 0:
                self.continued.append(text_request)
            return part

        self.answers = OpeningAnswerer(
            self.stage.exchange, self.stage.plays("draft", small, small_refused), make_large, config
        )

    def note_first(self) -> bool:
        self.first.set()
        return True

    @property
    def charged(self) -> list[tuple[str, str, int, int]]:
        return [
            (each.variant, each.role, each.usage.prompt_tokens, each.usage.output_tokens)
            for each in self.answers.charges
            if each.charged
        ]

    @property
    def note(self) -> dict[str, object]:
        return self.stage.exchange.notes.get("opening", {})

    async def deliver(self) -> ApiError | None:
        return await deliver(self.answers, self.client)


@asynchronous
async def test_the_small_model_begins_and_the_large_one_continues_at_a_sentence() -> None:
    ready = asyncio.Event()
    opened = Opened(
        [token("Yes"), token("."), token(" It"), token(" is"), ready, token(" so"), token("."), token(" More"), ends()],
        words(" Large", " words."),
        ahead=[ready, *COMPUTED],
    )
    await opened.answers.begin()
    running = asyncio.ensure_future(opened.answers.run(opened.client.take))
    await until(lambda: opened.client.texts.get(0) == "Yes. It is")  # while the large model computes the prompt
    ready.set()
    assert await running
    opened.answers.settle()
    assert opened.client.texts == {0: "Yes. It is so. Large words."}
    (request,) = opened.continued
    assert request.begun == "Yes. It is so."
    assert opened.note == {"variant": "draft", "tokens": 6, "continued_by": "mini", "why": "at the end of a sentence"}
    assert opened.charged == [("draft", "opening", PROMPT, 6), ("mini", "answer", PROMPT, 2)]
    assert opened.client.told() == opened.stage.exchange.usage == sum_usage(e.usage for e in opened.answers.charges)
    assert opened.stage.exchange.model == "mini"
    assert opened.stage.exchange.prompt_tokens == PROMPT
    assert [each.chosen for each in opened.answers.decisions] == ["mini"]
    opened.stage.check_settled()


@asynchronous
@pytest.mark.parametrize(("takeover", "sent"), [("ready", 2), ("tokens", 3), ("sentence", 3)])
async def test_each_declared_point_is_kept(takeover: str, sent: int) -> None:
    ready = asyncio.Event()

    def small() -> list[Line]:
        return [token("a"), token(" b"), ready, token(" c"), token(" d"), token(" e"), ends(tokens=5)]

    opened = Opened(
        small(),
        words(" large"),
        ahead=[ready, *COMPUTED],
        config=replace(OPENING, takeover=takeover, tokens=3),
        asked=asked_for(stream=True, max_tokens=10, min_tokens=4),
    )
    await opened.answers.begin()
    running = asyncio.ensure_future(opened.answers.run(opened.client.take))
    await until(lambda: opened.client.texts.get(0) == "a b")
    ready.set()
    assert await running
    assert opened.client.texts[0] == "a b" + (" c" if sent == 3 else "") + " large"
    assert (opened.continued[0].max_tokens, opened.continued[0].min_tokens) == (10 - sent, 4 - sent)
    opened.answers.settle()
    opened.stage.check_settled()


@asynchronous
async def test_a_small_model_that_has_ended_waits_and_the_large_one_may_go_on() -> None:
    opened = Opened([token("Hello"), ends(" there", tokens=2)], [ends(tokens=0)])
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "Hello there"}
    assert opened.continued[0].begun == "Hello there"
    assert opened.note["why"] == "after the small model's answer"
    assert opened.charged[1] == ("mini", "answer", PROMPT, 0)


@asynchronous
@pytest.mark.parametrize("end", [ends(" end", finish="length"), replace(ends(" end"), stop="X")])
async def test_an_answer_at_its_limit_or_stop_string_is_not_continued(end: ChoiceDelta) -> None:
    opened = Opened([token("The"), replace(end, tokens=1)], words("never"))
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "The end"}
    assert not opened.continued
    assert opened.charged == [("draft", "answer", PROMPT, 2)]
    assert opened.client.told() == opened.stage.exchange.usage
    assert opened.note["continued_by"] is None
    opened.stage.check_settled()


@asynchronous
async def test_a_large_model_that_is_ready_first_answers_alone_without_a_charge_for_the_other() -> None:
    opened = Opened([asyncio.Event(), token("never")], words("All", " of it"), ahead=COMPUTED)
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "All of it"}
    assert opened.continued[0].begun == ""
    assert opened.charged == [("mini", "answer", PROMPT, 2)]
    assert opened.note == {}
    assert opened.answers.decisions[-1].why == "answers alone: because it was first"


@asynchronous
async def test_a_small_model_that_hangs_in_a_sentence_is_left_there() -> None:
    ready = asyncio.Event()
    opened = Opened(
        [token("It"), token(" is"), asyncio.Event()],
        words(" here"),
        ahead=[ready, *COMPUTED],
        config=replace(OPENING, within_s=0.01),
    )
    await opened.answers.begin()
    running = asyncio.ensure_future(opened.answers.run(opened.client.take))
    await until(lambda: opened.client.texts.get(0) == "It is")
    ready.set()
    assert await running
    assert opened.client.texts == {0: "It is here"}
    assert opened.note["why"] == "because the small model was late"


@asynchronous
@pytest.mark.parametrize("sent", [0, 1])
async def test_when_the_small_model_breaks_the_large_one_continues(sent: int) -> None:
    opened = Opened(
        [*(token("It") for _ in range(sent)), broken()], words(" goes on"), ahead=None if sent else COMPUTED
    )
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "It" * sent + " goes on"}
    assert "failed (engine_lost)" in opened.answers.decisions[-1].why or not sent
    opened.stage.check_settled()


@asynchronous
async def test_when_the_small_model_rejects_the_request_the_large_one_answers_it() -> None:
    opened = Opened([], words("All"), small_refused=broken("context_length_exceeded"))
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "All"}
    assert opened.charged == [("mini", "answer", PROMPT, 1)]


@asynchronous
@pytest.mark.parametrize("where", ["prompt", "rejected", "first output"])
async def test_when_the_large_model_breaks_before_its_text_the_small_one_answers_to_the_end(where: str) -> None:
    opened = Opened(
        [token("One"), token("."), token(" Two"), token("."), ends(tokens=4)],
        [broken()] if where == "first output" else words("never"),
        computed=[broken()] if where == "prompt" else COMPUTED,
        refused=broken("overloaded") if where == "rejected" else None,
        config=replace(OPENING, takeover="tokens", tokens=1),
    )
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "One. Two."}
    assert opened.charged == [("draft", "answer", PROMPT, 4)]
    assert opened.client.told() == opened.stage.exchange.usage
    assert opened.stage.exchange.model == "draft"
    assert opened.note["continued_by"] is None
    assert "the large model failed" in str(opened.note["why"])
    opened.stage.check_settled()


@asynchronous
async def test_a_large_model_that_breaks_in_its_text_is_an_error() -> None:
    opened = Opened([token("One"), ends(tokens=1)], [token(" two"), broken()])
    error = await opened.deliver()
    assert error is not None
    assert error.code == "engine_lost"
    assert opened.client.texts == {0: "One two"}
    opened.stage.check_settled()


@asynchronous
async def test_when_both_break_the_error_is_the_large_models() -> None:
    opened = Opened([broken("small_lost")], [], ahead=[broken("large_lost")])
    error = await opened.deliver()
    assert error is not None
    assert error.code == "large_lost"
    opened.stage.check_settled()


@asynchronous
async def test_a_client_may_pause_at_every_delta() -> None:
    opened = Opened(
        [token("One"), token("."), token(" Two"), ends(tokens=3)], words(" a", " b"), config=replace(OPENING, tokens=2)
    )
    opened.client.room = lambda: not opened.note_first()
    assert await opened.deliver() is None
    assert opened.client.texts == {0: "One. a b"}
    opened.stage.check_settled()


@asynchronous
async def test_a_client_that_leaves_ends_both_models() -> None:
    opened = Opened([token("One"), asyncio.Event()], [], ahead=[asyncio.Event()])
    await opened.answers.begin()
    running = asyncio.ensure_future(opened.answers.run(opened.client.take))
    await until(lambda: opened.client.texts.get(0) == "One")
    opened.answers.cancel()
    assert await running
    opened.answers.settle()
    assert all(part.gone for parts in opened.stage.made.values() for part in parts)
    assert opened.charged == [("draft", "opening", PROMPT, 1)]
    opened.stage.check_settled()


TOOL = Tool(name="look_up")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stream": False}, "not streamed"),
        ({"grammar": Grammar(kind="json_object")}, "grammar"),
        ({"tools": (TOOL,)}, "tools"),
        ({"n": 2}, "several answers"),
        ({"sampling": SamplingParams(logprobs=0)}, "log-probabilities"),
        ({"echo": True}, "log-probabilities"),
        ({"ignore_eos": True}, "fixed length"),
        ({"degrade": "off"}, "degradation"),
    ],
)
def test_requests_that_need_one_model_are_not_opened(changes: dict[str, object], why: str) -> None:
    assert why_not_opened(asked_for(stream=True)) is None
    assert why in (why_not_opened(asked_for(**{"stream": True, **changes})) or "")


def test_the_usage_of_an_empty_answer_is_empty() -> None:
    opened = Opened([], answer())
    assert opened.answers.charges == []
    assert sum_usage(()) == TokenUsage()
