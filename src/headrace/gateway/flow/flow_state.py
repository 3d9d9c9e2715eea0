"""FlowState: one exchange with the result of each stage, and the Outcome that settling reads. Decides nothing."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import AnswerSource, ExactLookup
from headrace.gateway.degradation.ladder.ladder_steps import DegradationPlan, DegradationRecord
from headrace.gateway.degradation.ladder.levels import PressureSignals
from headrace.gateway.degradation.ladder.pressure import WaitTicket
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.sources import SelectedSources
from headrace.gateway.flow.answer_observer import ObservedAnswer
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.shared_generation import SharedGeneration
from headrace.gateway.limits.rate_limiter import Reservation
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage
from headrace.gateway.routing.composite_answerer import Answerer, CompositeAnswerer, VariantCharge
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

if TYPE_CHECKING:
    from headrace.gateway.caches.semantic.semantic_cache import SemanticLookup


class Degradation(msgspec.Struct):
    """Result of `degrade`."""

    record: DegradationRecord = msgspec.field(default_factory=DegradationRecord)
    plan: DegradationPlan | None = None
    signals: PressureSignals = msgspec.field(default_factory=PressureSignals)
    scope: str = ""  # the ladder state that applies: variant and tenant
    original: Exchange | None = None  # the exchange before it was degraded


class Shaping(msgspec.Struct):
    """Result of `identify` and `shape`."""

    changes: list[ShapingChange] = []  # beside those that the ladder made
    sources: SelectedSources | None = None
    prompt_limit: int | None = None  # tokens, set by fast mode
    charges: list[VariantCharge] = []  # what a summary of the conversation has cost, which is charged already


class Admission(msgspec.Struct):
    """Result of `admit`."""

    reservation: Reservation | None = None
    has_ledger_hold: bool = False  # the ledger waits for a charge or a release


class Lookups(msgspec.Struct):
    """Result of `recall`."""

    exact: ExactLookup | None = None
    reads_exact: bool | None = None  # whether there may be one; None: not known yet
    semantic: SemanticLookup | None = None
    charges: list[VariantCharge] = []  # what verifying a hit has cost, whether it became one or not


class Delivery(msgspec.Struct):
    """Progress of `deliver`."""

    is_inspected: bool = False  # every delta passes through `deliver`; otherwise they go straight to the client
    sets_timestamps: bool = False  # the deltas come from a cache or a shared generation, which set none here
    held: ChoiceDelta | None = None  # not delivered until the limits allow it
    extension: asyncio.Future[bool] | None = None  # of the reservation, awaited for `held`
    timeout: asyncio.Timeout | None = None  # of the wait for the first token
    tokens: int = 0  # delivered
    sent: int = 0  # of them, taken by the client's connection
    tokens_by_choice: dict[int, int] = {}
    usages: dict[int, TokenUsage] = {}  # of the choices that have ended
    first_choice: list[ChoiceDelta] = []  # kept where its text is needed afterwards


class Origin(enum.Enum):
    """Where an answer came from, which decides who pays."""

    NONE = enum.auto()  # nothing was done, so nothing is charged
    GENERATED = enum.auto()  # computed for this exchange, which pays
    CACHED = enum.auto()
    EXTRACTED = enum.auto()  # from the request's own sources
    SHARED = enum.auto()  # another exchange's generation, which pays
    HANDED_OVER = enum.auto()  # its own generation; it left, and another exchange has paid since


class Ending(enum.Enum):
    COMPLETE = enum.auto()
    CUT = enum.auto()  # by a limit or a budget
    CLIENT_GONE = enum.auto()
    FAILED = enum.auto()


class Outcome(msgspec.Struct, frozen=True):
    origin: Origin
    ending: Ending
    label: str  # for metrics and the ledger: finished, limited, deadline, gone, or the kind of error

    @property
    def has_all_choices(self) -> bool:
        return self.ending in (Ending.COMPLETE, Ending.CUT)


class FlowState(msgspec.Struct):
    """All of it belongs to one event loop."""

    exchange: Exchange
    services: Services
    plan: RoutePlan
    requested: str  # the variant that would answer if nothing were routed
    degradation: Degradation = msgspec.field(default_factory=Degradation)
    shaping: Shaping = msgspec.field(default_factory=Shaping)
    admission: Admission = msgspec.field(default_factory=Admission)
    lookups: Lookups = msgspec.field(default_factory=Lookups)
    answer: AnswerSource | None = None  # set by `recall` or `generate`
    own_generation: Answerer | None = None  # set by `generate`, unless it may be shared
    observed: ObservedAnswer | None = None  # the answer, collected for observers
    wait: WaitTicket | None = None  # for the first token
    delivery: Delivery = msgspec.field(default_factory=Delivery)
    running: asyncio.Future[Any] | None = None  # work beside the answer, which ends where the client leaves
    is_client_gone: bool = False
    ended_by: ApiError | None = None  # ended from outside, with this error for the client
    outcome: Outcome | None = None  # set by `settle`

    @property
    def is_stopped(self) -> bool:
        """True if the answer ends here, because the client has left or may not have it any more."""
        return self.is_client_gone or self.ended_by is not None

    def is_only_work_cancelled(self, work: asyncio.Future[Any]) -> bool:
        """True if a CancelledError is from work that ended with the answer, and the request's own task goes on."""
        task = asyncio.current_task()
        return self.is_stopped and work.cancelled() and (task is None or task.cancelling() == 0)

    @property
    def reads_exact(self) -> bool:
        """True if the request looks into the exact cache."""
        found, exact, exchange = self.lookups.reads_exact, self.services.exact, self.exchange
        if found is None:
            tenant, requested = exchange.caller.tenant, exchange.text_request.cache
            found = exact is not None and exact.modes.access(tenant, requested=requested).reads
            self.lookups.reads_exact = found
        return found

    @property
    def shared_generation(self) -> SharedGeneration | None:
        source = None if self.answer is None else self.answer.source
        return source if isinstance(source, SharedGeneration) else None

    @property
    def generation(self) -> Answerer | None:
        """The generation of the answer, for this exchange or for several."""
        return self.own_generation if (shared := self.shared_generation) is None else shared.answerer

    @property
    def first_tries(self) -> list[VariantCharge]:
        """A cascade's tries, an opening or a draft before the answer; the exchange pays for them too."""
        generation = self.generation
        charges = generation.charges if isinstance(generation, CompositeAnswerer) else []
        return [charge for charge in charges if charge.charged and charge.role in ("first try", "opening", "draft")]
