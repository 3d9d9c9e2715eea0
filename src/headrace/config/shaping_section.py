"""Configuration of request shaping, degradation ladders and the fast profile.

headrace.gateway.degradation checks and applies it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Seconds, Section, Text

StepName = Literal["trim", "max_tokens", "variant", "stale", "extract", "refuse"]
DegradeMode = Literal["on", "off"] | list[StepName]  # which ladder steps a request or a tenant allows
SignalThresholds = tuple[float, ...]  # the step is entered at the first value and left at the second


class LadderStepConfig(Section, frozen=True):
    """A step is entered when any signal reaches its first threshold and left when all are at their second."""

    step: StepName
    queue_ms: SignalThresholds | None = None  # milliseconds until the first token
    memory_free: SignalThresholds | None = None  # free share of the KV cache
    slack_ms: SignalThresholds | None = None  # milliseconds left at the deadline
    budget_left: SignalThresholds | None = None  # share of the tenant's budget that is left
    history_tokens: Count = 1024  # trim: tokens of conversation to keep, without sources
    sources_tokens: Count = 512  # trim: tokens of sources to keep
    max_tokens: Count = 128  # max_tokens: output tokens, at most
    variants: tuple[Text, ...] = ("fast",)  # variant: names after the @; the first that the model has is used
    stale_s: Annotated[float, Meta(ge=0)] = 86_400.0  # stale: seconds since a cached response expired, at most


class LadderConfig(Section, frozen=True):
    """How a surface degrades. Without preset or steps it does not."""

    preset: bool = False  # true: use steps derived from patience_s instead of those below
    variants: tuple[Text, ...] = ()  # with preset: smaller variants to fall back to, such as "int4"
    steps: tuple[LadderStepConfig, ...] = ()
    dwell_s: Seconds = 2.0  # seconds on a step before moving to a milder one, at least
    hold_s: Seconds = 30.0  # seconds a step is kept while queue and memory are unknown


class ShapingConfig(Section, frozen=True):
    overflow: Literal["refuse", "drop", "summarise"] = "refuse"  # for conversations longer than the context
    answer_tokens: Count = 256  # tokens reserved for the output when a request sets no limit
    summary_tokens: Count = 160  # tokens of a summary
    summary_s: Seconds = 2.0  # seconds a summary may take
    summary_model: str = ""  # model that writes summaries; empty: the request's own
    sources: Count = 32  # sources per request
    source_tokens: Count = 512  # tokens per source
    sources_tokens: Count = 2048  # tokens of all sources
    sources_place: Literal["user", "system"] = "user"


class ProfileConfig(Section, frozen=True):
    """What the fast profile changes in a request."""

    max_tokens: Count = 160
    temperature: Annotated[float, Meta(ge=0)] = 0.3  # highest temperature
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.9  # highest top_p
    think: bool = False  # whether models reason first when the request does not say


class ProfilesConfig(Section, frozen=True):
    fast: ProfileConfig = msgspec.field(default_factory=ProfileConfig)
