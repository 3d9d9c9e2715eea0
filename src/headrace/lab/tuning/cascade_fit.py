"""Fits a cascade and the complexity classifier to judged pairs, and measures both on pairs that were not fitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.config.routing_section import Measure
from headrace.errors import RequestError
from headrace.gateway.routing.calibration import (
    ALWAYS_LARGE,
    CurvePoint,
    LabelledAnswer,
    curve,
    evaluate_threshold,
    fit_threshold,
)
from headrace.gateway.routing.complexity import Classifier
from headrace.gateway.routing.confidence import MEASURES
from headrace.lab.tuning.classifier_fit import fit_classifier, ranked, scores_of
from headrace.lab.tuning.judged_pair import JudgedPair

LEAST_PAIRS: Final = 20
_WORSE: Final = 0.1  # quality by which the small answer must be worse for the request to count as complex


class CascadeFit(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are of the half that the fit has not seen. Costs are relative to the large variant alone."""

    pairs: int
    small_quality: float
    large_quality: float
    measure: Measure
    threshold: float  # ALWAYS_LARGE: no threshold keeps the quality
    held_out: CurvePoint
    points: tuple[CurvePoint, ...]  # from the large variant alone to the small one alone
    classifier: Classifier
    ranked: float  # share of pairs of a complex and a simple request that the classifier orders right
    most_complexity: float | None  # of requests that a rule may send to the small variant alone; None: of none
    by_rule: CurvePoint

    @property
    def pays(self) -> bool:
        """True if the cascade is cheaper than the large variant alone and keeps the quality on unseen pairs."""
        return self.threshold != ALWAYS_LARGE and self.held_out.cost < 1.0


def fit_cascade(pairs: Sequence[JudgedPair], *, keep: float = 0.98, sure: float = 1.0) -> CascadeFit:
    """`keep`: share of the large variant's quality to keep. `sure`: standard errors of margin. RequestError if there
    are too few pairs."""
    seen = [each for each in pairs if not each.is_second_half]
    unseen = [each for each in pairs if each.is_second_half]
    if len(pairs) < LEAST_PAIRS or not seen or not unseen:
        raise RequestError(
            f"{len(pairs)} judged pairs are too few. Pass at least {LEAST_PAIRS} different prompts; some hundreds give "
            "a useful fit.",
            parameter="prompts",
        )
    measure, threshold = _best_threshold(seen, keep, sure)
    labels = np.array([float(each.small < each.large - _WORSE) for each in seen])
    features = [each.features for each in seen]
    made = {"by": "headrace tune cascade", "requests": len(seen), "complex": int(labels.sum())}
    classifier = fit_classifier(features, labels, made)
    other_labels = np.array([float(each.small < each.large - _WORSE) for each in unseen])
    quality_to_keep = keep * _mean(each.large for each in seen)
    by_rule = fit_threshold(quality_to_keep, _by_rule(seen, classifier), sure=sure)
    held_out = [each.labelled() for each in unseen]
    return CascadeFit(
        pairs=len(pairs),
        small_quality=_mean(each.small for each in unseen),
        large_quality=_mean(each.large for each in unseen),
        measure=measure,
        threshold=threshold,
        held_out=evaluate_threshold(threshold, held_out, measure=measure),
        points=tuple(curve(held_out, measure=measure)),
        classifier=classifier,
        ranked=ranked(scores_of(classifier, [each.features for each in unseen]), other_labels),
        most_complexity=None if by_rule == ALWAYS_LARGE else round(1.0 - by_rule, 4),
        by_rule=_rule_point(by_rule, unseen, classifier),
    )


def _best_threshold(pairs: Sequence[JudgedPair], keep: float, sure: float) -> tuple[Measure, float]:
    """Return the measure and threshold of the lowest cost on the seen pairs."""
    labelled = [each.labelled() for each in pairs]
    target = keep * _mean(each.large for each in pairs)
    found: list[tuple[float, Measure, float]] = []
    for measure in MEASURES:
        threshold = fit_threshold(target, labelled, measure=measure, sure=sure)
        found.append((evaluate_threshold(threshold, labelled, measure=measure).cost, measure, threshold))
    _, measure, threshold = min(found, key=lambda each: each[0])
    return measure, threshold


def _by_rule(pairs: Sequence[JudgedPair], classifier: Classifier) -> list[LabelledAnswer]:
    """Return the pairs as a rule sees them: it knows the complexity before either variant answers."""
    scores = scores_of(classifier, [each.features for each in pairs])
    return [
        LabelledAnswer(
            confidence={"mean": 1.0 - float(score)},
            small=each.small,
            large=each.large,
            small_cost=each.small_cost,
            large_cost=each.large_cost,
        )
        for each, score in zip(pairs, scores, strict=True)
    ]


def _rule_point(threshold: float, pairs: Sequence[JudgedPair], classifier: Classifier) -> CurvePoint:
    """Return the effect of a rule. Unlike in a cascade, only one variant answers each request."""
    scores = scores_of(classifier, [each.features for each in pairs])
    small = [1.0 - float(score) >= threshold for score in scores]
    quality = _mean(each.small if is_small else each.large for each, is_small in zip(pairs, small, strict=True))
    cost = sum(each.small_cost if is_small else each.large_cost for each, is_small in zip(pairs, small, strict=True))
    large_cost = sum(each.large_cost for each in pairs)
    return CurvePoint(threshold, sum(small) / len(pairs), quality, cost / large_cost if large_cost else 0.0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
