"""What the stages of one exchange leave for each other.

Owns no decision: each field is written by the stage that it stands under, and read by those after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from headrace.gateway.caches.exact.exact_cache import AnswerSource, ExactLookup
from headrace.gateway.caches.semantic.semantic_cache import SemanticLookup
from headrace.gateway.degradation.ladder import ladder_steps as ladder
from headrace.gateway.degradation.ladder.levels import PressureSignals
from headrace.gateway.degradation.ladder.pressure import WaitTicket
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.sources import SelectedSources
from headrace.gateway.flow.shared_generation import Shared, Take
from headrace.gateway.limits.rate_limiter import Reservation
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage
from headrace.gateway.routing.composite_answerer import Answerer, CompositeAnswerer, VariantCharge
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

if TYPE_CHECKING:
    from headrace.gateway.flow.services import Services


class Course(msgspec.Struct):
    """All of it belongs to one event loop."""

    exchange: Exchange
    services: Services
    plan: RoutePlan
    named: str  # the variant that would answer, had nothing been routed
    gone: bool = False  # the client has left

    # prepare
    telling: ladder.DegradationRecord = msgspec.field(default_factory=ladder.DegradationRecord)  # what the ladder did
    shaped: list[ShapingChange] = []  # what shaping did beside it
    degraded: ladder.DegradationPlan | None = None
    whole: Exchange | None = None  # as it was before it was degraded
    signals: PressureSignals = msgspec.field(default_factory=PressureSignals)
    standing: str = ""  # whose place on the ladder is its own
    selected: SelectedSources | None = None  # the sources, by their numbers
    most_prompt: int | None = None  # tokens, of fast mode

    # admit
    reservation: Reservation | None = None
    charged: bool = False  # the ledger expects to be told of it

    # recall
    looked: ExactLookup | None = None
    recall: SemanticLookup | None = None
    answer: AnswerSource | None = None

    # generate
    own: Answerer | None = None  # what generates, where nobody shares it
    follows: bool = False  # the pieces come from elsewhere, so what they say is noted here
    wait: WaitTicket | None = None  # before the first token

    # deliver
    looks: bool = False  # every piece is looked at
    held: ChoiceDelta | None = None  # that is not let out yet
    waits: asyncio.Future[bool] | None = None  # until it may be
    out: int = 0  # tokens let out
    bound: asyncio.Timeout | None = None  # of the wait for the first token
    usages: dict[int, TokenUsage] = {}  # of the choices that have ended
    tokens: dict[int, int] = {}  # let out, by choice
    said: list[ChoiceDelta] = []  # of the first choice, where what it says is needed

    # settle
    free: bool = False  # nothing was computed for it
    refused: bool = False  # nothing was done for it
    settled: bool = False

    @property
    def shared(self) -> Shared | None:
        """What generates the answer, where others may have it, too."""
        source = None if self.answer is None else self.answer.source
        return source if isinstance(source, Shared) else None

    @property
    def made(self) -> Answerer | None:
        """What generates the answer, for this one alone or for several."""
        return self.own if (shared := self.shared) is None else shared.answers

    def tried(self) -> list[VariantCharge]:
        """What was computed before the answer and is paid for, too."""
        made = self.made
        charges = made.charges if isinstance(made, CompositeAnswerer) else []
        return [charge for charge in charges if charge.charged and charge.role == "first try"]


__all__ = ["Course", "Take"]
