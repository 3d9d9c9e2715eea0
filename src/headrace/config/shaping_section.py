"""What is done to a request so that it fits, and how service becomes less under pressure.

Owns these sections with their defaults. What they mean is gateway.shaping's and gateway.ladder's; what must hold
between a ladder's steps is gateway.ladder.declared's.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Seconds, Section, Text

StepName = Literal["trim", "max_tokens", "variant", "stale", "extract", "refuse"]
DegradeMode = Literal["on", "off"] | list[StepName]  # what a request or a tenant lets happen to it
MillisecondRange = tuple[float, ...]  # where a step is entered, and where it is left again


class LadderStepConfig(Section, frozen=True):
    """A step is entered as soon as one of its signals is at its first number, and left when all are at the second."""

    step: StepName
    queue_ms: MillisecondRange | None = None  # until a first token would come
    memory_free: MillisecondRange | None = None  # share of the KV blocks that are free
    slack_ms: MillisecondRange | None = None  # that would be left at the deadline
    budget_left: MillisecondRange | None = None  # share of the tenant's budget
    history_tokens: Count = 1024  # trim: the conversation without its sources
    sources_tokens: Count = 512  # trim: the sources
    max_tokens: Count = 128  # max_tokens: of an answer
    variants: tuple[Text, ...] = ("fast",)  # variant: MODEL@NAME, the first that is there
    stale_s: Annotated[float, Meta(ge=0)] = 86_400.0  # stale: most seconds since a cached answer expired


class LadderConfig(Section, frozen=True):
    """How a surface degrades. Without preset and steps it never does."""

    preset: bool = False  # steps by the surface's patience
    variants: tuple[Text, ...] = ()  # with preset: smaller ones that may answer
    steps: tuple[LadderStepConfig, ...] = ()
    dwell_s: Seconds = 2.0  # least time before a milder step
    hold_s: Seconds = 30.0  # that a step is kept while nothing is known


class ShapingConfig(Section, frozen=True):
    overflow: Literal["refuse", "drop", "summarise"] = "refuse"  # of a conversation that the context has no room for
    answer_tokens: Count = 256  # that are left for the answer then, where a request names no most
    summary_tokens: Count = 160  # of a summary
    summary_s: Seconds = 2.0  # that it may take
    summary_model: str = ""  # that writes it; the request's own by default
    sources: Count = 32  # of one request
    source_tokens: Count = 512  # of each
    sources_tokens: Count = 2048  # of all together
    sources_place: Literal["user", "system"] = "user"


class ProfileConfig(Section, frozen=True):
    """What the fast profile makes of a request."""

    max_tokens: Count = 160
    temperature: Annotated[float, Meta(ge=0)] = 0.3  # at most
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.9  # at most
    think: bool = False  # whether a model that can reason first does, where the caller does not say


class ProfilesConfig(Section, frozen=True):
    fast: ProfileConfig = msgspec.field(default_factory=ProfileConfig)
