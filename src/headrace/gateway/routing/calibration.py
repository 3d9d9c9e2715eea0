"""From labelled answers of two models to the threshold of a cascade that keeps a wanted quality, and what it costs.

Owns Labelled (a question, how sure the small model was, how good both answers are and what each cost), the fit, the
curve, and the file of labelled answers. Costs are in whatever unit the file has; only their ratio matters. Knows no
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

ALWAYS_LARGE: Final = math.inf  # a threshold that no confidence reaches
MOST_LABELLED: Final = 200_000  # rows of a file
_ROUNDING: Final = 1e-12  # of means that are equal


class CalibrationError(HeadraceError):
    """A file of labelled answers that cannot be read."""


class LabelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question that both models answered."""

    confidence: dict[str, float]  # the small model's, by measure
    small: float  # how good its answer is, 0 to 1
    large: float
    small_cost: float  # of its answer, as far as it is needed for the confidence
    large_cost: float


class CurvePoint(msgspec.Struct, frozen=True):
    """What a threshold would have done with labelled questions."""

    threshold: float
    share: float  # answered by the small model
    quality: float  # mean of the answers served
    cost: float  # beside that of the large model alone


def read_labelled(path: Path) -> list[LabelledAnswer]:
    """CalibrationError with the line for what is wrong."""
    found: list[LabelledAnswer] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number > MOST_LABELLED:
                    raise CalibrationError(f"{path}: more than {MOST_LABELLED} lines")
                try:
                    found.append(msgspec.json.decode(line, type=LabelledAnswer))
                except msgspec.MsgspecError as error:
                    raise CalibrationError(f"{path}: line {number}: {error}") from None
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from None
    if not found:
        raise CalibrationError(f"{path}: there are no labelled answers")
    return found


def write_labelled(path: Path, labelled: Iterable[LabelledAnswer]) -> None:
    encoder = msgspec.json.Encoder(order="deterministic")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encoder.encode(each) + b"\n" for each in labelled))


def fit_threshold(
    target_quality: float, labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean", sure: float = 0.0
) -> float:
    """The lowest threshold at which the answers served are as good as that on average.

    `sure`: so many standard errors better than needed, as a fit on few questions flatters itself. ALWAYS_LARGE where no
    threshold is good enough.
    """
    ordered = sorted(labelled, key=lambda each: -each.confidence[measure])
    count = len(ordered)
    gained, squares = 0.0, 0.0  # over the large model's quality, by those that the small one would answer
    base = sum(each.large for each in ordered) / count
    best = ALWAYS_LARGE
    for place, each in enumerate(ordered):
        difference = each.small - each.large
        gained += difference
        squares += difference * difference
        threshold = each.confidence[measure]
        if place + 1 < count and ordered[place + 1].confidence[measure] == threshold:
            continue  # these come together
        mean = gained / count
        error = math.sqrt(max(0.0, squares / count - mean * mean) / count)
        if base + mean - sure * error >= target_quality - _ROUNDING:
            best = threshold
    return best


def evaluate_threshold(
    threshold: float, labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean"
) -> CurvePoint:
    taken, quality, cost, alone = 0, 0.0, 0.0, 0.0
    for each in labelled:
        alone += each.large_cost
        cost += each.small_cost
        if each.confidence[measure] >= threshold:
            taken += 1
            quality += each.small
        else:
            quality += each.large
            cost += each.large_cost
    count = len(labelled)
    return CurvePoint(threshold, taken / count, quality / count, cost / alone if alone else 0.0)


def curve(labelled: Sequence[LabelledAnswer], *, measure: Measure = "mean", points: int = 11) -> list[CurvePoint]:
    """From the large model alone to the small one alone, the small one's share in even steps."""
    ordered = sorted((each.confidence[measure] for each in labelled), reverse=True)
    thresholds = [ALWAYS_LARGE]
    for step in range(1, points):
        place = round(step * len(ordered) / (points - 1)) - 1
        threshold = ordered[max(place, 0)]
        if threshold != thresholds[-1]:
            thresholds.append(threshold)
    return [evaluate_threshold(threshold, labelled, measure=measure) for threshold in thresholds]
