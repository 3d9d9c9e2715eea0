"""Routes a request: applies rules, splits, cascades and chains, and avoids unhealthy variants.

Owns Router and RoutePlan. A decision reads the request, the configuration, and the variants' health and capacity; it
waits for nothing, explains itself, and changes nothing but what a chain in the order of capacity has placed. Does not
carry out the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import replace

from headrace.config.routing_section import (
    CascadeConfig,
    ChainConfig,
    OpeningConfig,
    RewriteConfig,
    RoutingConfig,
    StepConfig,
)
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.calibration import ALWAYS_LARGE, evaluate_threshold, fit_threshold, read_labelled
from headrace.gateway.routing.capacity_order import CapacityOrder, PromptLength
from headrace.gateway.routing.complexity import WEIGHTS
from headrace.gateway.routing.composite_answerer import RoutingDecision
from headrace.gateway.routing.opening import ROLE, why_not_opened
from headrace.gateway.routing.rules import RoutingFacts, Rule, first_match
from headrace.gateway.routing.splits import Split, conversation_key
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.prompt_length import estimated_prompt_tokens

HEADER: Final = "x-headrace-route"
_MAX_HEADER: Final = 512  # characters

WhyNot = Callable[[str], str | None]  # why a variant is unavailable, or None
WhyNotFor = Callable[[str, TextRequest], str | None]  # why a variant cannot take a request, or None


class RoutePlan(msgspec.Struct, frozen=True):
    """The variants that answer. With a cascade, its small model answers first and `variant` after it."""

    variant: str
    steps: tuple[StepConfig, ...] = ()  # tried after `variant`, in this order
    patience: float = 10.0  # seconds until a step's first output
    diverged: str = "error"
    cascade: CascadeConfig | None = None  # with its threshold resolved
    decisions: tuple[RoutingDecision, ...] = ()
    golden: str = ""  # variant that answers instead if the answer fails a check
    opening: OpeningConfig | None = None  # its small model begins the answer
    rewrite: RewriteConfig | None = None  # what these variants say is a draft, and is rewritten
    serves_draft: bool = False  # under pressure: it is not rewritten, but a rewritten answer of the cache is served
    arm: Literal["", "control", "candidate"] = ""  # of the canary that the request takes part in
    control: str = ""  # its control

    @property
    def small(self) -> str | None:
        part = self.opening if self.cascade is None else self.cascade
        return None if part is None else part.small

    @property
    def is_composed(self) -> bool:
        """True if two models take part in the answer by design."""
        return self.cascade is not None or self.opening is not None

    @property
    def recipe(self) -> str:
        """What makes its answers others than those of `variant`, for the caches' keys."""
        parts = [f"opening {self.opening}" if self.opening is not None else self.small or ""]
        if self.rewrite is not None:
            parts.append(f"rewrite {self.rewrite}")
        return "\n".join(parts)

    @property
    def variants(self) -> set[str]:
        """The variants whose answers are those of the plan, and not a fallback's."""
        return {self.variant, *self.further}

    @property
    def further(self) -> set[str]:
        """The variants that take part in its answers by design, beside `variant`."""
        named = (self.small, None if self.rewrite is None else self.rewrite.variant)
        return {name for name in named if name is not None}

    def headers(self, later: Sequence[RoutingDecision] = ()) -> dict[str, str]:
        """Return the header. `later`: decisions made while answering."""
        return route_headers((*self.decisions, *later))


def route_headers(decisions: Sequence[RoutingDecision]) -> dict[str, str]:
    text = "; ".join(f"{each.stage} {each.chosen} ({each.why})" for each in decisions)
    if not text:
        return {}
    shown = "".join(each if " " <= each <= "~" else "?" for each in text)
    return {HEADER: shown if len(shown) <= _MAX_HEADER else shown[: _MAX_HEADER - 3] + "..."}


class _Choice(msgspec.Struct):
    """The state of one decision."""

    variant: str
    exchange: Exchange
    decisions: list[RoutingDecision] = []
    chain: tuple[str, ChainConfig] | None = None
    cascade: str | None = None
    opening: str | None = None


class Router:
    def __init__(
        self,
        config: RoutingConfig,
        why_not: WhyNot | None = None,
        *,
        why_not_for: WhyNotFor | None = None,
        order: CapacityOrder | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """CalibrationError if the labelled answers of a cascade cannot be read. `why_not_for`: what a variant lacks for
        a request; by default nothing. `order`: of chains by capacity; by default it is unknown. `wall`: seconds since
        1970."""
        self.config = config
        self._why_not = why_not or _always_available
        self._lacks = why_not_for or _lacks_nothing
        self._order = order
        self._wall = wall
        self._zone = ZoneInfo(config.timezone)
        self._weights = WEIGHTS if config.complexity is None else Path(config.complexity).expanduser()
        self._rules = tuple(map(Rule.of, config.rules))
        conditions = [rule.when for rule in config.rules]
        self._counts_tokens = any((each.least_tokens, each.most_tokens) != (None, None) for each in conditions)
        self._splits = {name: Split.of(name, each.percent, each.salt) for name, each in config.splits.items()}
        self._cascades = {name: resolve_cascade(each) for name, each in config.cascades.items()}
        self._chain_of: dict[str, tuple[str, ChainConfig]] = {}  # by its first variant
        for name, chain in config.chains.items():
            self._chain_of.setdefault(chain.steps[0].variant, (name, chain))

    @property
    def idle(self) -> bool:
        """True if nothing is configured: every request goes to the variant that it names."""
        return not self._rules and not self._chain_of

    @property
    def counts_tokens(self) -> bool:
        """True if a rule looks at the tokens of prompts, so that they must be counted before."""
        return self._counts_tokens

    def route(self, exchange: Exchange) -> RoutePlan:
        choice = _Choice(exchange.served.name, exchange)
        facts = RoutingFacts(exchange, self._wall, self._zone, self._weights)
        rule = first_match(self._rules, facts)
        if rule is not None:
            self._follow(rule, facts, choice)
        if choice.cascade is not None:
            plan = self._with_cascade(choice.cascade, choice, exchange.text_request)
            if plan is not None:
                return plan
        opening = None if choice.opening is None else self._opening(choice.opening, choice, exchange.text_request)
        plan = self._with_chain(choice)
        return plan if opening is None or plan.variant != opening.large else replace(plan, opening=opening)

    def _follow(self, rule: Rule, facts: RoutingFacts, choice: _Choice) -> None:
        config = rule.config
        if config.split is not None:
            target = f"split {config.split}"
        elif config.chain is not None:
            target = f"chain {config.chain}"
        elif config.opening is not None:
            target = f"opening {config.opening}"
        else:
            target = f"cascade {config.cascade}" if config.cascade is not None else config.variant or ""
        choice.decisions.append(RoutingDecision("rule", config.name, f"to {target}"))
        if config.variant is not None:
            if (lacks := self._lacks(config.variant, facts.text_request)) is not None:
                choice.decisions.append(RoutingDecision("unfit", choice.variant, f"{config.variant}: {lacks}"))
            else:
                choice.variant = config.variant
        elif config.split is not None:
            self._split(config.split, facts.exchange, choice)
        elif config.chain is not None:
            choice.chain = config.chain, self.config.chains[config.chain]
            choice.variant = choice.chain[1].steps[0].variant
        elif config.cascade is not None:
            choice.cascade = config.cascade
            choice.variant = self.config.cascades[config.cascade].large
        elif config.opening is not None:
            choice.opening = config.opening
            choice.variant = self.config.openings[config.opening].large

    def _why_not_for(self, choice: _Choice, variant: str) -> str | None:
        """Return why a variant cannot answer the request now; None if it can."""
        return self._lacks(variant, choice.exchange.text_request) or self._why_not(variant)

    def _split(self, name: str, exchange: Exchange, choice: _Choice) -> None:
        split = self._splits[name]
        variant = split.choose(conversation_key(exchange, self.config.conversation))
        choice.decisions.append(RoutingDecision("split", variant, f"the conversation's share of {name}"))
        reason = self._why_not_for(choice, variant)
        if reason is not None and variant not in self._chain_of:
            # While a variant is unavailable, its traffic goes to the largest available share.
            others = sorted(self.config.splits[name].percent.items(), key=lambda each: -each[1])
            available = (other for other, _ in others if self._why_not_for(choice, other) is None)
            substitute = next((other for other in available if other != variant), None)
            if substitute is not None:
                choice.decisions.append(RoutingDecision("health", substitute, f"{variant}: {reason}"))
                variant = substitute
        choice.variant = variant

    def _with_cascade(self, name: str, choice: _Choice, text_request: TextRequest) -> RoutePlan | None:
        """Return None if the large model must answer alone."""
        cascade = self._cascades[name]
        why = _why_no_cascade(text_request)
        if why is not None:
            choice.decisions.append(RoutingDecision("cascade", cascade.large, why))
            return None
        reason = self._why_not_for(choice, cascade.small)
        if reason is not None:
            choice.decisions.append(RoutingDecision("health", cascade.large, f"{cascade.small}: {reason}"))
            return None
        rest = self._with_chain(choice)
        return RoutePlan(
            rest.variant,
            rest.steps,
            patience=rest.patience,
            diverged=rest.diverged,
            cascade=cascade,
            decisions=rest.decisions,
        )

    def _opening(self, name: str, choice: _Choice, text_request: TextRequest) -> OpeningConfig | None:
        """Return None if the large model must answer alone."""
        opening = self.config.openings[name]
        why = why_not_opened(text_request)
        if why is not None:
            choice.decisions.append(RoutingDecision(ROLE, opening.large, f"answers alone: {why}"))
            return None
        reason = self._why_not_for(choice, opening.small)
        if reason is not None:
            choice.decisions.append(RoutingDecision("health", opening.large, f"{opening.small}: {reason}"))
            return None
        choice.decisions.append(RoutingDecision(ROLE, opening.small, f"begins, {opening.large} takes over"))
        return opening

    def _with_chain(self, choice: _Choice) -> RoutePlan:
        named = choice.chain or self._chain_of.get(choice.variant)
        if named is None:
            return RoutePlan(choice.variant, decisions=tuple(choice.decisions))
        name, chain = named
        ordered, why = self._ordered(chain, choice.exchange)
        steps: list[StepConfig] = []
        for place, step in enumerate(ordered):
            reason = self._why_not_for(choice, step.variant)
            if reason is None:
                steps.append(step)
            else:
                after = ordered[place + 1].variant if place + 1 < len(ordered) else "no other"
                choice.decisions.append(RoutingDecision("health", after, f"{step.variant}: {reason}"))
        if not steps:
            steps = list(ordered)  # none is available: try them all, and report their errors
        if why and self._order is not None:
            conversation = conversation_key(choice.exchange, self.config.conversation)
            self._order.place(steps[0].variant, chain.steps, conversation, _prompt_length(choice.exchange))
            if steps[0] is ordered[0]:
                choice.decisions.append(RoutingDecision("capacity", steps[0].variant, why))
        if len(steps) > 1 or steps[0].variant != choice.variant:
            after = ", ".join(step.variant for step in steps[1:]) or "no other"
            choice.decisions.append(RoutingDecision("chain", steps[0].variant, f"{name}, then {after}"))
        return RoutePlan(
            steps[0].variant,
            tuple(steps[1:]),
            patience=chain.patience_s,
            diverged=chain.diverged,
            decisions=tuple(choice.decisions),
        )

    def _ordered(self, chain: ChainConfig, exchange: Exchange) -> tuple[Sequence[StepConfig], str]:
        """Return a chain's steps in its order, and why the first one is first; "" if they are as listed."""
        if chain.order == "listed" or self._order is None:
            return chain.steps, ""
        conversation = conversation_key(exchange, self.config.conversation)
        length = _prompt_length(exchange)
        return self._order.sort(chain.steps, exchange.effective_surface, conversation, chain.home_ms / 1e3, length)


def _prompt_length(exchange: Exchange) -> PromptLength:
    """Return the prompt's tokens, estimated if they were not counted. The home of a conversation has computed all but
    the messages after its last answer."""
    text_request = exchange.text_request
    whole = exchange.prompt_tokens or estimated_prompt_tokens(text_request)
    messages = text_request.messages or []
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return PromptLength(whole, whole)
    fresh = estimated_prompt_tokens(text_request.but(messages=messages[answers[-1] + 1 :]))
    return PromptLength(whole, min(fresh, whole))


def _always_available(variant: str) -> None:
    """Without health information every variant counts as available."""


def _lacks_nothing(variant: str, text_request: TextRequest) -> None:
    """By default every variant can take every request."""


def _why_no_cascade(text_request: TextRequest) -> str | None:
    if text_request.echo or text_request.prompt_logprobs is not None:
        return "prompt log-probabilities are requested"
    if text_request.ignore_eos:
        return "ignore_eos is set"
    return None


def resolve_cascade(config: CascadeConfig) -> CascadeConfig:
    """Return the cascade with a threshold, fitted to its file of labelled answers if it has one."""
    if config.threshold is not None:
        return config
    assert config.calibration is not None
    labelled = read_labelled(Path(config.calibration).expanduser())
    large = evaluate_threshold(ALWAYS_LARGE, labelled, measure=config.measure)
    threshold = fit_threshold(config.quality * large.quality, labelled, measure=config.measure)
    return replace(config, threshold=threshold)
