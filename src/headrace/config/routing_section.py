"""What the configuration can say of routing: rules, splits, cascades, chains, hedges and health checks.

Owns the shapes and their defaults. What must hold between them is checks's; what they mean is the other modules'.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from headrace.config.breaker_section import BreakerConfig, _PositiveShare
from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Share, Text

SharePercent = Annotated[float, Meta(gt=0, le=100)]
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: Final[tuple[Weekday, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
AfterBreak = Literal["continue", "restart", "error"]
Measure = Literal["mean", "least", "entropy"]  # of how sure a model was


class RuleConditions(Section, frozen=True):
    """What a request must be like; all that is said must hold, and of a list one."""

    models: tuple[Text, ...] = ()  # as the client names them; without, those that name no variant
    surfaces: tuple[Text, ...] = ()
    profiles: tuple[Text, ...] = ()  # without, the standard one
    tenants: tuple[Text, ...] = ()
    languages: tuple[Text, ...] = ()  # en, de, ...; what is too short to tell is none of them
    tags: dict[str, str] = field(default_factory=dict[str, str])  # of the request's metadata; "*" is any value
    least_tokens: Count | None = None  # of the prompt
    most_tokens: Count | None = None
    least_characters: Count | None = None
    most_characters: Count | None = None
    least_complexity: Share | None = None
    most_complexity: Share | None = None
    tools: bool | None = None
    json: bool | None = None  # the answer is to be JSON
    streamed: bool | None = None
    hours: tuple[Text, ...] = ()  # "22:00-06:00", in the routing's time zone
    days: tuple[Weekday, ...] = ()


class RuleConfig(Section, frozen=True):
    """The first rule that holds decides. Of the four after `when`, one is given."""

    name: Text
    when: RuleConditions = RuleConditions()
    variant: Text | None = None
    split: Text | None = None
    cascade: Text | None = None
    chain: Text | None = None


class SplitConfig(Section, frozen=True):
    """Conversations in shares, each of which stays where it is."""

    percent: dict[str, SharePercent]  # by variant; 100 together
    salt: str = ""  # the split's name by default; with another one, other conversations


class CascadeConfig(Section, frozen=True):
    """The small model answers where it is sure enough, the large one the rest."""

    small: Text
    large: Text
    measure: Measure = "mean"  # what of the small one's log-probabilities says how sure it is
    threshold: Share | None = None  # from which the small one's answer is taken; or else `calibration`
    calibration: Text | None = None  # a file of labelled answers, from which the threshold is found
    quality: _PositiveShare = 0.98  # with `calibration`: of the large model's quality, what is to be kept
    tokens: Annotated[int, Meta(ge=1, le=4096)] | None = None  # after which it is decided; the whole answer by default
    within_s: Seconds = 5.0  # that the small model has until then


class StepConfig(Section, frozen=True):
    variant: Text
    then: AfterBreak = (
        "error"  # what becomes of a stream that broke after it had begun, when this step is to go on with it
    )


class ChainConfig(Section, frozen=True):
    """Variants in the order in which they are tried. A chain is also that of every request that is for its first."""

    steps: tuple[StepConfig, ...]
    patience_s: Seconds = 10.0  # that a step has for its first piece, where there is another after it
    diverged: Literal["restart", "error"] = "error"  # where a step that was to continue says something else


class HedgeConfig(Section, frozen=True):
    """A second request where the first is slower than nearly all, and a replica idles."""

    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.95  # of the times to the first token
    share: Annotated[float, Meta(ge=0, le=0.5)] = 0.05  # of the requests that may be asked twice
    least_ms: Milliseconds = 50.0  # bounds of the wait for the first
    most_ms: Milliseconds = 5000.0
    samples: Annotated[int, Meta(ge=20, le=4096)] = 256  # latest times that the quantile is taken over


class VariantHealthConfig(Section, frozen=True):
    """Questions to a variant whether it is there."""

    every_s: Seconds = 5.0
    within_s: Seconds = 2.0
    fall: Count = 3  # failures in a row after which it counts as gone
    rise: Count = 2  # successes in a row after which it counts as there again


class RoutingConfig(Section, frozen=True):
    conversation: Text = "conversation"  # key of the metadata that names a request's conversation
    timezone: Text = "UTC"  # of the rules' hours and days
    rules: tuple[RuleConfig, ...] = ()
    splits: dict[str, SplitConfig] = field(default_factory=dict[str, SplitConfig])
    cascades: dict[str, CascadeConfig] = field(default_factory=dict[str, CascadeConfig])
    chains: dict[str, ChainConfig] = field(default_factory=dict[str, ChainConfig])
    hedges: dict[str, HedgeConfig] = field(default_factory=dict[str, HedgeConfig])  # by variant
    breaker: BreakerConfig = BreakerConfig()
    health: VariantHealthConfig = VariantHealthConfig()
