"""Where a request goes: rules, then a split, a cascade, a chain or one variant, past what is not well.

Owns Router and Plan. A decision reads the request, the configuration and the health of the variants, changes nothing,
waits for nothing, and says why it is what it is. What is done with a Plan is compose's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from headrace.config.routing_section import CascadeConfig, ChainConfig, RoutingConfig, StepConfig
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.calibration import ALWAYS_LARGE, evaluate_threshold, fit_threshold, read_labelled
from headrace.gateway.routing.cascade import Cascade
from headrace.gateway.routing.composite_answerer import RoutingDecision
from headrace.gateway.routing.rules import RoutingFacts, Rule, first_match
from headrace.gateway.routing.splits import Split, conversation_key
from headrace.gateway.serving.exchange import Exchange

HEADER: Final = "x-headrace-route"
_MOST_HEADER: Final = 512  # characters

WhyNot = Callable[[str], str | None]  # why a variant is to be left alone now; None where it is well


class RoutePlan(msgspec.Struct, frozen=True):
    """Who is to answer. Without a cascade, `variant` does; with one, its small model does first and `variant` after."""

    variant: str
    steps: tuple[StepConfig, ...] = ()  # that are tried after `variant`, in this order
    patience: float = 10.0  # seconds that a step has for its first piece
    diverged: str = "error"
    small: str | None = None
    cascade: Cascade | None = None
    decisions: tuple[RoutingDecision, ...] = ()

    def headers(self, later: Sequence[RoutingDecision] = ()) -> dict[str, str]:
        """`later`: what was decided while it was answered."""
        return route_headers((*self.decisions, *later))


def route_headers(decisions: Sequence[RoutingDecision]) -> dict[str, str]:
    text = "; ".join(f"{each.stage} {each.chosen} ({each.why})" for each in decisions)
    if not text:
        return {}
    shown = "".join(each if " " <= each <= "~" else "?" for each in text)
    return {HEADER: shown if len(shown) <= _MOST_HEADER else shown[: _MOST_HEADER - 3] + "..."}


class _Choice(msgspec.Struct):
    """What a decision has come to so far."""

    variant: str
    decisions: list[RoutingDecision] = []
    chain: tuple[str, ChainConfig] | None = None
    cascade: str | None = None


class Router:
    def __init__(
        self,
        config: RoutingConfig,
        why_not: WhyNot | None = None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """CalibrationError for a cascade whose labelled answers cannot be read. `wall`: seconds since 1970."""
        self.config = config
        self._why_not = why_not or _well
        self._wall = wall
        self._zone = ZoneInfo(config.timezone)
        self._rules = tuple(map(Rule.of, config.rules))
        self._splits = {name: Split.of(name, each.percent, each.salt) for name, each in config.splits.items()}
        self._cascades = {name: resolve_cascade(each) for name, each in config.cascades.items()}
        self._chain_of: dict[str, tuple[str, ChainConfig]] = {}  # by its first variant
        for name, chain in config.chains.items():
            self._chain_of.setdefault(chain.steps[0].variant, (name, chain))

    @property
    def idle(self) -> bool:
        """Nothing is declared: every request goes to the variant that it names."""
        return not self._rules and not self._chain_of

    def route(self, exchange: Exchange) -> RoutePlan:
        choice = _Choice(exchange.served.name)
        facts = RoutingFacts(exchange, self._wall, self._zone)
        rule = first_match(self._rules, facts)
        if rule is not None:
            self._follow(rule, facts, choice)
        if choice.cascade is not None:
            plan = self._with_cascade(choice.cascade, choice, exchange.asked)
            if plan is not None:
                return plan
        return self._with_chain(choice)

    def _follow(self, rule: Rule, facts: RoutingFacts, choice: _Choice) -> None:
        config = rule.config
        if config.split is not None:
            target = f"split {config.split}"
        elif config.chain is not None:
            target = f"chain {config.chain}"
        else:
            target = f"cascade {config.cascade}" if config.cascade is not None else config.variant or ""
        choice.decisions.append(RoutingDecision("rule", config.name, f"to {target}"))
        if config.variant is not None:
            choice.variant = config.variant
        elif config.split is not None:
            self._split(config.split, facts.exchange, choice)
        elif config.chain is not None:
            choice.chain = config.chain, self.config.chains[config.chain]
            choice.variant = choice.chain[1].steps[0].variant
        elif config.cascade is not None:
            choice.cascade = config.cascade
            choice.variant = self.config.cascades[config.cascade].large

    def _split(self, name: str, exchange: Exchange, choice: _Choice) -> None:
        split = self._splits[name]
        variant = split.choose(conversation_key(exchange, self.config.conversation))
        choice.decisions.append(RoutingDecision("split", variant, f"the conversation's part of {name}"))
        reason = self._why_not(variant)
        if reason is not None and variant not in self._chain_of:
            # A share that is not well goes to the largest that is, until it is again.
            others = sorted(self.config.splits[name].percent.items(), key=lambda each: -each[1])
            well = next((other for other, _ in others if other != variant and self._why_not(other) is None), None)
            if well is not None:
                choice.decisions.append(RoutingDecision("health", well, f"{variant}: {reason}"))
                variant = well
        choice.variant = variant

    def _with_cascade(self, name: str, choice: _Choice, asked: TextRequest) -> RoutePlan | None:
        """None where the large model is to answer alone."""
        config, cascade = self.config.cascades[name], self._cascades[name]
        why = _why_no_cascade(asked)
        if why is not None:
            choice.decisions.append(RoutingDecision("cascade", config.large, why))
            return None
        reason = self._why_not(config.small)
        if reason is not None:
            choice.decisions.append(RoutingDecision("health", config.large, f"{config.small}: {reason}"))
            return None
        rest = self._with_chain(choice)
        return RoutePlan(
            rest.variant,
            rest.steps,
            patience=rest.patience,
            diverged=rest.diverged,
            small=config.small,
            cascade=cascade,
            decisions=rest.decisions,
        )

    def _with_chain(self, choice: _Choice) -> RoutePlan:
        found = choice.chain or self._chain_of.get(choice.variant)
        if found is None:
            return RoutePlan(choice.variant, decisions=tuple(choice.decisions))
        name, chain = found
        steps: list[StepConfig] = []
        for place, step in enumerate(chain.steps):
            reason = self._why_not(step.variant)
            if reason is None:
                steps.append(step)
            else:
                after = chain.steps[place + 1].variant if place + 1 < len(chain.steps) else "nobody"
                choice.decisions.append(RoutingDecision("health", after, f"{step.variant}: {reason}"))
        if not steps:
            steps = list(chain.steps)  # none is well: they are tried all the same, and say themselves what is wrong
        if len(steps) > 1 or steps[0].variant != choice.variant:
            after = ", ".join(step.variant for step in steps[1:]) or "nobody"
            choice.decisions.append(RoutingDecision("chain", steps[0].variant, f"{name}, then {after}"))
        return RoutePlan(
            steps[0].variant,
            tuple(steps[1:]),
            patience=chain.patience_s,
            diverged=chain.diverged,
            decisions=tuple(choice.decisions),
        )


def _well(variant: str) -> None:
    """Where nobody says that it is not."""


def _why_no_cascade(asked: TextRequest) -> str | None:
    if asked.echo or asked.prompt_logprobs is not None:
        return "the prompt is to be measured"
    if asked.ignore_eos:
        return "the answer is to go on past its end"
    return None


def resolve_cascade(config: CascadeConfig) -> Cascade:
    """With a threshold from labelled answers where there is a file of them."""
    threshold = config.threshold
    if threshold is None:
        assert config.calibration is not None
        labelled = read_labelled(Path(config.calibration).expanduser())
        alone = evaluate_threshold(ALWAYS_LARGE, labelled, measure=config.measure)
        threshold = fit_threshold(config.quality * alone.quality, labelled, measure=config.measure)
    return Cascade(threshold=threshold, measure=config.measure, tokens=config.tokens, within=config.within_s)


def variants_in(config: RoutingConfig) -> Mapping[str, None]:
    """All that are named, in order."""
    found: dict[str, None] = {}
    for rule in config.rules:
        if rule.variant is not None:
            found[rule.variant] = None
    for split in config.splits.values():
        found |= dict.fromkeys(split.percent)
    for cascade in config.cascades.values():
        found |= {cascade.small: None, cascade.large: None}
    for chain in config.chains.values():
        found |= {step.variant: None for step in chain.steps}
    return found
