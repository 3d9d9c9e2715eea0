"""Asks a chat model whether two questions ask the same, before the semantic cache answers one as it did the other.

The model gets both questions, in both orders, and says yes or no: one token, whose probability is the score. What it
computes is the caller's work and is charged to the caller. Does not know entries or thresholds.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

import msgspec

from headrace.config.cache_section import ANSWERING_MODEL
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.accounts.access import allows_model
from headrace.gateway.caches.semantic.hit_verifier import HitVerifier, RerankerVerifier
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import Choice, TextRequest, TokenUsage
from headrace.gateway.routing.composite_answerer import derive_exchange, sum_usage
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.served_variant import ServedVariant

_TOP: Final = 20  # likeliest first tokens among which yes and no are looked for; upstreams give no more
_ENGINE_SHARE: Final = 0.9  # of the time that a verification may take
# The questions come last, so that the rest of the prompt is in the prefix cache from the second pair on.
_INSTRUCTION: Final = """\
Decide whether two questions ask for exactly the same thing, so that one answer is right for both. Different words for \
the same thing are fine. If anything differs that could change the answer, they do not ask the same: who does it and \
to whom, from where to where, what comes first, how much, when, which one, a condition, a denial, or whether it asks \
what, why, when or how.

First: "How do I reset my password?"
Second: "What do I do to reset my password?"
Same: yes

First: "How do I move a file from the server to my laptop?"
Second: "How do I move a file from my laptop to the server?"
Same: no

First: "Why is my parcel late?"
Second: "What is the reason for the delay of my parcel?"
Same: yes

First: "What does the warranty cover?"
Second: "What does the warranty not cover?"
Same: no

Now decide about these. Reply with one word, yes or no.

"""


class ModelVerifier:
    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        served: ServedVariant,
        *,
        least: float = 0.5,
        wait_s: float | None = None,
    ) -> None:
        """`least`: a lower score refuses the pair, so the second order is not asked after it. `wait_s`: seconds that
        a score may take; the engine ends a little earlier by itself, and says what it has computed."""
        self.variant = served.name
        self._least = least
        self._due = None if wait_s is None else time.monotonic() + wait_s * _ENGINE_SHARE
        self._services = services
        self._exchange = exchange
        self._served = served
        self._parts: list[Exchange] = []

    @property
    def usage(self) -> TokenUsage:
        return sum_usage(part.usage for part in self._parts)

    async def score(self, one: str, other: str) -> float:
        """Return the lower probability of yes of both orders. ValueError if the model says neither yes nor no."""
        first = await self._ask(one, other)
        return first if first < self._least else min(first, await self._ask(other, one))

    async def _ask(self, first: str, second: str) -> float:
        text_request = TextRequest(
            model=self._served.name,
            messages=verification_messages(first, second),
            sampling=SamplingParams(temperature=0.0, logprobs=_TOP),
            max_tokens=1,
            think=False,
            surface=self._exchange.surface,
            deadline_s=self._deadline_s(),
        )
        part = derive_exchange(self._exchange, self._served, text_request)
        part.prompts = {}
        self._parts.append(part)
        return probability_of_yes((await self._services.dispatcher.generate(part))[0])

    def _deadline_s(self) -> float | None:
        """Return the seconds from the request's arrival until the engine is to end."""
        ends = [each for each in (self._due, self._exchange.deadline) if each is not None]
        return min(ends) - self._exchange.arrival if ends else None


def verification_messages(first: str, second: str) -> list[dict[str, Any]]:
    """Return the chat whose answer begins with yes or no."""
    shown = [msgspec.json.encode(text).decode() for text in (first, second)]  # a quote in a question does not end it
    return [{"role": "user", "content": f"{_INSTRUCTION}First: {shown[0]}\nSecond: {shown[1]}\nSame:"}]


def probability_of_yes(choice: Choice) -> float:
    """Return the probability of yes, against that of no, as the first token of an answer.

    ValueError if neither is among the likeliest tokens or, without log-probabilities, in the text.
    """
    sums = {"yes": 0.0, "no": 0.0}
    for token in (choice.logprobs or [])[:1]:
        for text, _, logprob in token.top or [(token.text, token.bytes, token.logprob or 0.0)]:
            if (word := _word(text)) in sums:
                sums[word] += math.exp(logprob)
    if not choice.logprobs and (word := _word(choice.content)) in sums:
        sums[word] = 1.0
    total = sums["yes"] + sums["no"]
    if total <= 0.0:
        raise ValueError("The verifier said neither yes nor no.")
    return sums["yes"] / total


def _word(text: str) -> str:
    return text.strip(" \n\t\"'.,:*").lower()


def may_verify(state: FlowState) -> bool:
    """Return whether the caller may use the verifier, which gets its texts and is charged to it."""
    semantic = state.services.semantic
    name = "" if semantic is None else semantic.config.verify
    return name in ("", ANSWERING_MODEL) or allows_model(state.exchange.caller, name)


def verifier_for(state: FlowState) -> HitVerifier | None:
    """Return what verifies a hit of this exchange, as its caller's work; None without one that it may use."""
    exchange, services = state.exchange, state.services
    semantic = services.semantic
    if semantic is None or not (name := semantic.config.verify) or not may_verify(state):
        return None
    served = exchange.served if name == ANSWERING_MODEL else services.fleet.served[name]
    if served.ranking is not None:
        return RerankerVerifier(served, exchange.caller, surface=exchange.surface)
    config = semantic.config
    return ModelVerifier(services, exchange, served, least=config.verify_least, wait_s=config.verify_wait_ms / 1e3)
