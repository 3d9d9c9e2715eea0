"""Rewrites: when the rewrite is served and when the draft is, what the client is told, and who is charged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.config.routing_section import GoldenConfig, RewriteConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, RestartDelta, TextRequest, TokenUsage, Tool
from headrace.gateway.routing.golden import GoldenAnswerer
from headrace.gateway.routing.rewrite import (
    RewriteAnswerer,
    choose_rewrite,
    lost_in_rewriting,
    rewrite_request,
    why_not_rewritten,
    with_draft_seed,
)
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import (
    PROMPT,
    Client,
    Line,
    Stage,
    answer,
    asked_for,
    broken,
    deliver,
    ends,
    exchange_of,
    said,
)

REWRITE = RewriteConfig()
WARM = SamplingParams(temperature=0.9)


class Rewritten:
    """A rewrite over scripts: of the draft and of the rewriter."""

    def __init__(
        self,
        draft: Sequence[Line],
        rewrite: Sequence[Line] = (),
        *,
        config: RewriteConfig = REWRITE,
        asked: TextRequest | None = None,
        refused: ApiError | None = None,
        took_s: float = 1.0,
    ) -> None:
        self.stage = Stage(exchange_of(asked or asked_for(sampling=WARM)))
        self.client = Client()
        times = iter((0.0, 0.0))
        base = self.stage.exchange.arrival
        self.answers = RewriteAnswerer(
            self.stage.exchange,
            self.stage.plays("mini", draft),
            self.stage.plays("calm", rewrite, refused),
            config,
            clock=lambda: base + next(times, took_s),
        )

    async def run(self) -> ApiError | None:
        error = await deliver(self.answers, self.client)
        self.stage.check_settled()
        return error

    @property
    def charged(self) -> list[tuple[str, str, int]]:
        return [(each.variant, each.role, each.usage.output_tokens) for each in self.answers.charges if each.charged]


@asynchronous
async def test_the_rewrite_is_served_and_both_passes_are_charged() -> None:
    served = Rewritten(answer("It costs ", "5 euros!!"), answer("It costs 5 euros."))
    assert await served.run() is None
    assert served.client.texts[0] == "It costs 5 euros."
    assert served.charged == [("mini", "draft", 2), ("calm", "answer", 1)]
    told = served.client.told()
    assert (told.prompt_tokens, told.output_tokens) == (2 * PROMPT, 3)
    exchange = served.stage.exchange
    assert (exchange.served.name, exchange.usage.output_tokens, exchange.finish) == ("calm", 3, "stop")
    assert exchange.notes["rewrite"] == {
        "variant": "calm",
        "draft_variant": "mini",
        "draft_tokens": 2,
        "draft_temperature": 0.9,
    }
    (asked,) = [part.exchange.text_request for part in served.stage.made["calm"]]
    assert asked.sampling.temperature == 0.0
    assert [message["role"] for message in asked.messages or ()] == ["user", "assistant", "user"]
    assert (asked.messages or [])[1]["content"] == asked.prediction == "It costs 5 euros!!"


@pytest.mark.parametrize(
    ("draft", "rewrite", "why"),
    [
        ([said("It is"), ends(tokens=1, finish="length")], answer("It is."), "the draft ended early (length)"),
        ([said("It is"), ends(tokens=1, finish="deadline")], answer("It is."), "the draft ended early (deadline)"),
        (answer(" "), answer("It is."), "the draft is empty"),
        (answer("It costs 5."), [said("It"), ends(tokens=1, finish="length")], "the rewrite ended early (length)"),
        (answer("It costs 5."), answer("It costs 6."), "the rewrite changes numbers"),
        (answer("It is so [2]."), answer("It is so."), "the rewrite changes citations"),
        (answer("It is."), answer(" "), "the rewrite is empty"),
        (answer("It is."), [said("It"), broken()], "the rewriter failed (engine_lost)"),
    ],
)
@asynchronous
async def test_the_draft_is_served_where_the_rewrite_cannot_be(
    draft: list[Line], rewrite: list[Line], why: str
) -> None:
    served = Rewritten(draft, rewrite)
    assert await served.run() is None
    assert served.client.texts[0] == "".join(getattr(line, "content", "") for line in draft)
    assert served.stage.exchange.notes["rewrite"] == {"kept_draft": why}
    assert served.charged == [("mini", "answer", 1)]  # what was in vain is not charged
    assert served.client.told().output_tokens == 1


@asynchronous
async def test_a_rewriter_that_rejects_the_request_leaves_the_draft() -> None:
    refused = ApiError("too long", kind="invalid_request_error", code="context_length_exceeded")
    served = Rewritten(answer("It is."), refused=refused)
    assert await served.run() is None
    assert served.client.texts[0] == "It is."
    assert served.stage.exchange.notes["rewrite"] == {"kept_draft": "the rewriter failed (context_length_exceeded)"}


@pytest.mark.parametrize(("took_s", "is_rewritten"), [(0.9, True), (1.1, False)])
@asynchronous
async def test_a_rewrite_starts_only_if_the_deadline_has_the_drafts_time_left(
    took_s: float, is_rewritten: bool
) -> None:
    served = Rewritten(answer("a!"), answer("a"), asked=asked_for(deadline_s=2.0), took_s=took_s)
    assert await served.run() is None
    assert served.client.texts[0] == ("a" if is_rewritten else "a!")
    assert ("calm" in served.stage.made) is is_rewritten


@asynchronous
async def test_a_late_rewrite_is_dropped_and_a_late_draft_is_passed_on() -> None:
    late_rewrite = Rewritten(answer("a!"), [asyncio.Event()], config=RewriteConfig(within_s=0.05), took_s=0.04)
    assert await late_rewrite.run() is None
    assert late_rewrite.client.texts[0] == "a!"
    note = late_rewrite.stage.exchange.notes["rewrite"]
    assert note == {"kept_draft": "the rewrite was not there after 0.05 s"}
    more = asyncio.Event()
    late_draft = Rewritten([said("a"), more, *answer("!")], config=RewriteConfig(within_s=0.05))

    def has_something() -> bool:
        more.set()  # the rest comes once the client has the beginning
        return True

    late_draft.client.room = has_something
    assert await late_draft.run() is None
    assert late_draft.client.texts[0] == "a!"
    assert late_draft.stage.exchange.notes["rewrite"] == {"kept_draft": "the draft took more than 0.05 s"}


@asynchronous
async def test_a_golden_fallback_that_waits_no_longer_interrupts_the_rewrite_and_gets_the_draft() -> None:
    inner = Rewritten(answer("It ", "is."), [said("It"), asyncio.Event()])
    stage, client = inner.stage, Client()
    golden = GoldenAnswerer(
        stage.exchange,
        lambda _: inner.answers,
        stage.plays("gold"),
        GoldenConfig(checks=("json",), within_s=0.02),
        None,
    )
    assert await deliver(golden, client) is None
    stage.check_settled()
    assert client.texts[0] == "It is."
    (rewriter,) = stage.made["calm"]
    assert rewriter.gone
    assert "gold" not in stage.made
    assert stage.exchange.notes["rewrite"] == {"kept_draft": "the rewrite was interrupted"}
    charges = [(each.variant, each.role, each.usage.output_tokens, each.charged) for each in golden.charges]
    assert charges == [("mini", "answer", 2, True), ("calm", "broken", 1, False)]


@asynchronous
async def test_a_draft_that_begins_anew_is_rewritten_from_its_new_beginning() -> None:
    served = Rewritten([said("Wrong 7"), RestartDelta(0), *answer("Right 5")], answer("Right: 5"))
    assert await served.run() is None
    assert served.client.texts[0] == "Right: 5"
    assert served.client.restarts == []


@asynchronous
async def test_a_client_that_leaves_during_the_draft_starts_no_rewrite() -> None:
    served = Rewritten([said("a"), asyncio.Event()], answer("b"))
    running = asyncio.ensure_future(served.run())
    for _ in range(5):
        await asyncio.sleep(0)
    served.answers.cancel()
    assert await running is None
    assert "calm" not in served.stage.made
    assert served.client.texts == {}


def test_what_a_rewrite_must_keep_can_be_chosen() -> None:
    assert lost_in_rewriting("5 of 7 [1]", "five [1]", RewriteConfig(keep=("citations",))) is None
    assert lost_in_rewriting("5 of 7 [1]", "5 of 7", RewriteConfig(keep=("numbers",))) is None
    assert lost_in_rewriting("1,000.5 at 10:30", "At 10:30 it was 1,000.5", REWRITE) is None
    assert lost_in_rewriting("It is.", "It is 1.", REWRITE) == "the rewrite changes numbers"
    assert lost_in_rewriting("5", "nothing", RewriteConfig(keep=())) is None


TOOL = Tool(name="look")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"tools": (TOOL,), "choosing": "none"}, None),
        ({"messages": None, "prompts": ["Hello"]}, "the prompt is not a chat"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "the answer continues a text"),
        ({"grammar": Grammar("json_object")}, "the answer has a grammar"),
        ({"tools": (TOOL,)}, "the model may call tools"),
        ({"n": 2}, "there are several answers"),
        ({"sampling": SamplingParams(logprobs=1)}, "log-probabilities are requested"),
        ({"ignore_eos": True}, "the answer has a fixed length"),
    ],
)
def test_which_requests_are_rewritten(changes: dict[str, object], why: str | None) -> None:
    assert why_not_rewritten(asked_for(**changes)) == why


def test_a_rewrite_is_chosen_by_name_by_surface_and_by_temperature() -> None:
    rewrites = {"calm": RewriteConfig(above=0.5), "steady": RewriteConfig(surfaces=("chat",))}

    def chosen(sampling: SamplingParams = WARM, **changes: object) -> str | None:
        exchange = exchange_of(asked_for(sampling=sampling, **changes))
        exchange.surface = "chat"
        found = choose_rewrite(rewrites, exchange)
        return None if found is None else found[0]

    assert chosen() == "steady"
    assert chosen(rewrite="none") is None
    assert chosen(rewrite="calm") == "calm"
    assert chosen(rewrite="calm", sampling=SamplingParams(temperature=0.5)) is None
    assert chosen(sampling=SamplingParams(temperature=0.0)) is None
    with pytest.raises(ApiError, match="Unknown rewrite 'clam'") as raised:
        chosen(rewrite="clam")
    assert raised.value.parameter == "rewrite"


def test_a_drafts_seed_follows_from_the_request() -> None:
    first, again = (with_draft_seed(asked_for(sampling=SamplingParams(seed=seed))) for seed in (1, 2))
    assert first == again
    assert first.seeded
    assert with_draft_seed(asked_for("Bye")).sampling.seed != first.sampling.seed
    own = asked_for(seeded=True, sampling=SamplingParams(seed=7))
    assert with_draft_seed(own) is own


def test_a_rewrite_is_not_much_longer_than_its_draft_nor_than_the_request_allows() -> None:
    draft = Choice(0, "It is.", usage=TokenUsage(output_tokens=10))
    asked = asked_for(min_tokens=5, sampling=SamplingParams(temperature=0.9, logit_bias={3: -100.0}))
    made = rewrite_request(asked, draft, REWRITE)
    assert (made.max_tokens, made.min_tokens, made.sampling.logit_bias) == (84, 0, {3: -100.0})
    assert rewrite_request(asked.but(max_tokens=20), draft, REWRITE).max_tokens == 20
    assert replace(made.sampling, temperature=0.9).top_p == 1.0
