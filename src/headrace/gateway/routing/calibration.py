"""Finds the threshold of a cascade that keeps a target quality, from labelled answers of two models.

Owns the file of labelled answers, the fit and the cost curve. Costs are in any unit; only their ratio matters. Runs no
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.config.routing_section import Measure
from headrace.errors import HeadraceError

ALWAYS_LARGE: Final = math.inf  # no confidence reaches this threshold
MAX_LABELLED: Final = 200_000  # lines of a file
_ROUNDING: Final = 1e-12  # by which equal means may differ


class CalibrationError(HeadraceError):
    """A file of labelled answers cannot be read."""


class LabelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question that both models answered."""

    confidence: dict[str, float]  # the small model's, by measure
    small: float  # quality of its answer, 0 to 1
    large: float
    small_cost: float  # of the part of its answer that the confidence needs
    large_cost: float


class CurvePoint(msgspec.Struct, frozen=True):
    """The effect of a threshold on labelled questions."""

    threshold: float
    share: float  # answered by the small model
    quality: float  # mean of the served answers
    cost: float  # relative to the large model alone


def read_labelled(path: Path) -> list[LabelledAnswer]:
    """Read a file of labelled answers. CalibrationError names the wrong line."""
    labelled: list[LabelledAnswer] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number > MAX_LABELLED:
                    raise CalibrationError(f"{path}: The file has more than {MAX_LABELLED} lines.")
                try:
                    labelled.append(msgspec.json.decode(line, type=LabelledAnswer))
                except msgspec.MsgspecError as error:
                    raise CalibrationError(f"{path}: Line {number}: {error}") from None
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from None
    if not labelled:
        raise CalibrationError(f"{path}: The file has no labelled answers.")
    return labelled


def write_labelled(path: Path, labelled: Iterable[LabelledAnswer]) -> None:
    encoder = msgspec.json.Encoder(order="deterministic")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encoder.encode(each) + b"\n" for each in labelled))


def fit_threshold(
    target_quality: float, labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean", sure: float = 0.0
) -> float:
    """Return the lowest threshold at which the served answers reach the target quality on average.

    `sure`: standard errors of margin, because a fit on few questions is too optimistic. ALWAYS_LARGE if no threshold is
    good enough.
    """
    ordered = sorted(labelled, key=lambda each: -each.confidence[measure])
    count = len(ordered)
    gained, squares = 0.0, 0.0  # quality above the large model's, summed over the small model's answers
    base = sum(each.large for each in ordered) / count
    best = ALWAYS_LARGE
    for index, each in enumerate(ordered):
        difference = each.small - each.large
        gained += difference
        squares += difference * difference
        threshold = each.confidence[measure]
        if index + 1 < count and ordered[index + 1].confidence[measure] == threshold:
            continue  # equal confidences fall on the same side of any threshold
        mean = gained / count
        error = math.sqrt(max(0.0, squares / count - mean * mean) / count)
        if base + mean - sure * error >= target_quality - _ROUNDING:
            best = threshold
    return best


def evaluate_threshold(
    threshold: float, labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean"
) -> CurvePoint:
    small_answers, quality, cost, large_cost = 0, 0.0, 0.0, 0.0
    for each in labelled:
        large_cost += each.large_cost
        cost += each.small_cost
        if each.confidence[measure] >= threshold:
            small_answers += 1
            quality += each.small
        else:
            quality += each.large
            cost += each.large_cost
    count = len(labelled)
    return CurvePoint(threshold, small_answers / count, quality / count, cost / large_cost if large_cost else 0.0)


def curve(labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean", points: int = 11) -> list[CurvePoint]:
    """Return points from the large model alone to the small one alone, in even steps of the small one's share."""
    ordered = sorted((each.confidence[measure] for each in labelled), reverse=True)
    thresholds = [ALWAYS_LARGE]
    for step in range(1, points):
        index = round(step * len(ordered) / (points - 1)) - 1
        threshold = ordered[max(index, 0)]
        if threshold != thresholds[-1]:
            thresholds.append(threshold)
    return [evaluate_threshold(threshold, labelled, measure=measure) for threshold in thresholds]
