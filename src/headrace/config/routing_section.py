"""Configuration of routing: rules, splits, cascades, fallback chains, hedges, breakers and health checks.

gateway.routing.routing_checks checks it and headrace.gateway.routing applies it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from headrace.config.breaker_section import BreakerConfig, PositiveShare
from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Share, Text

SharePercent = Annotated[float, Meta(gt=0, le=100)]
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: Final[tuple[Weekday, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
AfterBreak = Literal["continue", "restart", "error"]
Measure = Literal["mean", "least", "entropy"]  # confidence measure of a model


class RuleConditions(Section, frozen=True):
    """Conditions on a request. All must hold; of a list, one value must match."""

    models: tuple[Text, ...] = ()  # model names as clients send them; empty: names without a variant
    surfaces: tuple[Text, ...] = ()
    profiles: tuple[Text, ...] = ()  # empty: standard
    tenants: tuple[Text, ...] = ()
    languages: tuple[Text, ...] = ()  # language of the user's last message: "en", "de", ...; empty: any
    tags: dict[str, str] = field(default_factory=dict[str, str])  # metadata values; "*" matches any
    least_tokens: Count | None = None  # prompt tokens, at least
    most_tokens: Count | None = None
    least_characters: Count | None = None
    most_characters: Count | None = None
    least_complexity: Share | None = None
    most_complexity: Share | None = None
    tools: bool | None = None
    json: bool | None = None  # whether the response must be JSON
    streamed: bool | None = None
    hours: tuple[Text, ...] = ()  # times of day, such as "22:00-06:00"; empty: any
    days: tuple[Weekday, ...] = ()


class RuleConfig(Section, frozen=True):
    """A routing rule; the first that matches decides. Exactly one of the five targets is set."""

    name: Text
    when: RuleConditions = RuleConditions()
    variant: Text | None = None
    split: Text | None = None
    cascade: Text | None = None
    chain: Text | None = None
    opening: Text | None = None


class SplitConfig(Section, frozen=True):
    """Splits conversations between variants. A conversation stays with its variant."""

    percent: dict[str, SharePercent]  # percent by variant; the sum must be 100
    salt: str = ""  # splits with the same salt assign alike; empty: the split's name


class CascadeConfig(Section, frozen=True):
    """The small variant answers where it is confident enough, the large one otherwise."""

    small: Text
    large: Text
    measure: Measure = "mean"  # confidence measure: mean, least or entropy
    threshold: Share | None = None  # confidence at which the small variant's response is used, 0 to 1
    calibration: Text | None = None  # file of labelled responses to derive the threshold from
    quality: PositiveShare = 0.98  # with calibration: share of the large variant's quality to keep
    tokens: Annotated[int, Meta(ge=1, le=4096)] | None = None  # after which to decide; default: the whole response
    within_s: Seconds = 5.0  # seconds the small variant may take to decide


class OpeningConfig(Section, frozen=True):
    """The small variant begins a streamed answer, and the large one takes over and continues its text."""

    small: Text
    large: Text  # a model of this server with a prefix cache
    takeover: Literal["sentence", "ready", "tokens"] = "sentence"  # where the large variant takes over
    tokens: Annotated[int, Meta(ge=1, le=1024)] = 64  # of the small variant's text, at most
    within_s: Seconds = 2.0  # seconds the large variant waits for a sentence to end


class RewriteConfig(Section, frozen=True):
    """A sampled answer is a draft, which is rewritten at temperature 0 before it is cached and served."""

    surfaces: tuple[Text, ...] = ()  # whose requests are rewritten; empty: requests that name this rewrite
    variant: Text | None = None  # that rewrites; default: the one that wrote the draft
    above: Annotated[float, Meta(ge=0, le=2)] = 0.0  # temperature above which an answer is a draft
    instruction: Text = (
        "Rewrite your last answer in plain, neutral words. Keep every fact, name, number and citation, and add "
        "nothing. Reply with the rewritten answer only."
    )
    keep: tuple[Literal["numbers", "citations"], ...] = ("numbers", "citations")  # else the draft is served
    within_s: Seconds = 30.0  # seconds that draft and rewrite may take; the draft is served after it


class StepConfig(Section, frozen=True):
    variant: Text
    then: AfterBreak = "error"  # when a stream breaks after it began and this step takes over


class ChainConfig(Section, frozen=True):
    """Variants in the order to try. The chain also covers every request that goes to its first variant."""

    steps: tuple[StepConfig, ...]
    patience_s: Seconds = 10.0  # seconds a step may take to its first output before the next is tried
    diverged: Literal["restart", "error"] = "error"  # when a continuing step produces different text: restart or error
    order: Literal["listed", "capacity"] = "listed"  # capacity: the shortest predicted time to the first token first
    # With order = "capacity": a conversation stays with its home among the steps unless another is this much sooner
    home_ms: Milliseconds = 250.0


class HedgeConfig(Section, frozen=True):
    """Sends a second request when the first token is late and a replica is idle."""

    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.95  # of the time to first token
    share: Annotated[float, Meta(ge=0, le=0.5)] = 0.05  # share of requests that may be hedged, 0 to 0.5
    least_ms: Milliseconds = 50.0  # milliseconds to wait before hedging, at least
    most_ms: Milliseconds = 5000.0
    samples: Annotated[int, Meta(ge=20, le=4096)] = 256  # recent requests the quantile is computed from, 20 to 4096


class GoldenConfig(Section, frozen=True):
    """Answers again with the golden variant when a response fails an online check."""

    checks: tuple[Literal["json", "citations", "confidence"], ...] = ()  # empty: nothing is checked
    variant: Text | None = None  # that answers instead; default: MODEL@golden of the same model
    of: tuple[Text, ...] = ()  # variants whose responses are checked; empty: all with a golden variant
    confidence: Share = 0.3  # mean token probability below which the check `confidence` fails
    stream_tokens: Annotated[int, Meta(ge=1, le=256)] = 8  # tokens of a stream that are held and checked
    within_s: Seconds = 60.0  # seconds a response may take to be checked; a slower one is passed on
    hard_cases: Annotated[int, Meta(ge=0, le=100_000)] = 200  # failed requests to keep, of tenants that are recorded


class ShadowConfig(Section, frozen=True):
    """Answers copies of served requests with another variant, to compare. Copies are never charged."""

    variant: Text  # that answers the copies
    of: tuple[Text, ...] = ()  # variants whose requests are copied; empty: all others
    profile: Literal["standard", "fast"] = "standard"  # of the copies; fast: standard requests answered in fast
    share: Share = 0.01  # of requests to copy, 0 to 1
    tenants: tuple[Text, ...] = ()  # whose requests are copied; "-": requests without one; empty: all
    judge: Literal["served", "shadow"] = "served"  # whose response is the reference; shadow: a double-check of quality
    pairs: Annotated[int, Meta(ge=0, le=100_000)] = 0  # double-check: judged requests to keep for tune cascade
    # Copies begin at any time, or only while this server runs no request; default: "idle" where an engine of this
    # machine answers them, else "always"
    when: Literal["always", "idle"] | None = None
    tokens_per_day: Count = 1_000_000  # tokens of copies per day (UTC); further copies are dropped
    concurrent: Annotated[int, Meta(ge=1, le=64)] = 1  # copies at once
    queue: Annotated[int, Meta(ge=1, le=4096)] = 32  # copies that wait; further ones are dropped
    timeout_s: Seconds = 60.0  # seconds a copy may take


class VariantHealthConfig(Section, frozen=True):
    """Health checks of a variant."""

    every_s: Seconds = 5.0
    within_s: Seconds = 2.0
    fall: Count = 3  # failed checks in a row after which a variant counts as down
    rise: Count = 2  # successful checks in a row after which it counts as up


class RoutingConfig(Section, frozen=True):
    conversation: Text = "conversation"  # key of the metadata that names a request's conversation
    timezone: Text = "UTC"  # of the rules' hours and days
    complexity: Text | None = None  # file of a complexity classifier; default: the bundled one
    rules: tuple[RuleConfig, ...] = ()
    splits: dict[str, SplitConfig] = field(default_factory=dict[str, SplitConfig])
    cascades: dict[str, CascadeConfig] = field(default_factory=dict[str, CascadeConfig])
    openings: dict[str, OpeningConfig] = field(default_factory=dict[str, OpeningConfig])
    rewrites: dict[str, RewriteConfig] = field(default_factory=dict[str, RewriteConfig])
    chains: dict[str, ChainConfig] = field(default_factory=dict[str, ChainConfig])
    hedges: dict[str, HedgeConfig] = field(default_factory=dict[str, HedgeConfig])  # by variant
    golden: GoldenConfig = GoldenConfig()
    shadows: dict[str, ShadowConfig] = field(default_factory=dict[str, ShadowConfig])
    breaker: BreakerConfig = BreakerConfig()
    health: VariantHealthConfig = VariantHealthConfig()
