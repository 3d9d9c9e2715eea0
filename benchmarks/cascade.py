"""Measures what a cascade from draft to mini saves and what it costs in quality, on the held-out questions.

    python benchmarks/cascade.py [--sample N] [--answers FILE] [--labelled FILE] [--out benchmarks/cascade/results.md]

Both models answer the questions greedily. Thresholds are fitted on one half of the questions, for each measure of the
log-probabilities and each decision point; the tables show the other half. A cost is tokens times the bytes of weights
that each token reads; an abandoned answer counts up to its end. `--labelled` writes the rows of the first half as a
cascade's `calibration` file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from headrace.gateway.routing.calibration import (
    ALWAYS_LARGE,
    CurvePoint,
    LabelledAnswer,
    curve,
    evaluate_threshold,
    fit_threshold,
    write_labelled,
)
from headrace.gateway.routing.confidence import MEASURES, Measure
from headrace.models.model_folder import BUNDLED
from training.routing import Pair, Pairs, answers_from

TARGETS: Final = (0.99, 0.98, 0.95, 0.9, 0.8)  # of mini's quality
CHOSEN_AT: Final = 0.98  # the target by whose cost, on the first half, a measure is chosen for the curve
AFTER: Final = (None, 16)  # tokens after which it is decided; None: the whole answer
SURE: Final = 1.0  # standard errors to spare, in the fit that says so


def labelled_of(pairs: Pairs, half: Sequence[Pair], after: int | None) -> list[LabelledAnswer]:
    small, large = (pairs.weight_bytes[name] for name in ("draft", "mini"))
    found: list[LabelledAnswer] = []
    for pair in half:
        confidence = pair.draft.confidence(after)
        written = min(pair.draft.output_tokens, after or pair.draft.output_tokens)
        found.append(
            LabelledAnswer(
                confidence={measure: confidence.value(measure) for measure in MEASURES},
                small=float(pair.draft.right),
                large=float(pair.mini.right),
                small_cost=(pair.draft.prompt_tokens + written) * small,
                large_cost=(pair.mini.prompt_tokens + pair.mini.output_tokens) * large,
            )
        )
    return found


def with_whole_answers(
    pairs: Pairs, half: Sequence[Pair], labelled: Sequence[LabelledAnswer], point: CurvePoint, measure: Measure
) -> CurvePoint:
    """Like the early decision, plus the cost of completing the accepted answers."""
    small = pairs.weight_bytes["draft"]
    rest, alone = 0.0, 0.0
    for pair, each in zip(half, labelled, strict=True):
        alone += each.large_cost
        if each.confidence[measure] >= point.threshold:
            rest += (pair.draft.prompt_tokens + pair.draft.output_tokens) * small - each.small_cost
    return CurvePoint(point.threshold, point.share, point.quality, point.cost + (rest / alone if alone else 0.0))


def named(after: int | None) -> str:
    return "whole answer" if after is None else f"after {after} tokens"


def report(pairs: Pairs, command: str) -> str:
    first, second = pairs.half(), pairs.half(other=True)
    fits = {after: labelled_of(pairs, first, after) for after in AFTER}
    shown = {after: labelled_of(pairs, second, after) for after in AFTER}
    mini = evaluate_threshold(ALWAYS_LARGE, shown[None]).quality
    mini_first = evaluate_threshold(ALWAYS_LARGE, fits[None]).quality
    draft = sum(each.small for each in shown[None]) / len(second)
    either = sum(max(each.small, each.large) for each in shown[None]) / len(second)
    lost = sum(each.large > each.small for each in shown[None])
    lines = [
        "# Cascade: draft, then mini",
        "",
        f"`{command}`",
        "",
        f"{len(pairs.pairs)} held-out questions of all tasks, greedy answers, {pairs.weights} weights, {pairs.isa}. "
        f"Digests of the weights: {', '.join(f'{name} {digest}' for name, digest in pairs.models.items())}. "
        f"Thresholds are fitted on {len(first)} of them; all numbers are of the other {len(second)}.",
        "",
        "| who answers | right |",
        "|---|---:|",
        f"| draft alone | {draft:.1%} |",
        f"| mini alone | {mini:.1%} |",
        f"| whichever is right, if one knew | {either:.1%} |",
        "",
        f"Of {len(second)} questions, {lost} are right with mini and wrong with draft.",
        "",
        "## Thresholds for a quality target",
        "",
        "`kept` is the quality beside mini's alone, `cost` the cost beside it, draft's answers included: below 1 the",
        f"cascade saves something. `spare` fits with {SURE:g} standard error to spare.",
        "",
        "| decided | measure | target | threshold | by draft | kept | cost | spare: by draft | kept | cost |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for after in AFTER:
        for measure in MEASURES:
            for target in TARGETS:
                cells: list[str] = []
                for sure in (0.0, SURE):
                    threshold = fit_threshold(target * mini_first, fits[after], measure=measure, sure=sure)
                    point = evaluate_threshold(threshold, shown[after], measure=measure)
                    point = with_whole_answers(pairs, second, shown[after], point, measure)
                    if not sure:
                        cells.append("never" if threshold == ALWAYS_LARGE else f"{threshold:.4f}")
                    cells += [f"{point.share:.1%}", f"{point.quality / mini if mini else 0.0:.1%}", f"{point.cost:.3f}"]
                lines.append(f"| {named(after)} | `{measure}` | {target:.0%} | {' | '.join(cells)} |")
    after, measure = chosen(fits, mini_first)
    lines += [
        "",
        f"## The curve of `{measure}`, {named(after)}",
        "",
        f"The cheapest on the first half at {CHOSEN_AT:.0%}.",
        "",
        "| threshold | by draft | right | kept | cost |",
        "|---:|---:|---:|---:|---:|",
    ]
    for point in curve(shown[after], measure=measure):
        point = with_whole_answers(pairs, second, shown[after], point, measure)
        shown_as = "never" if point.threshold == ALWAYS_LARGE else f"{point.threshold:.4f}"
        kept = point.quality / mini if mini else 0.0
        lines.append(f"| {shown_as} | {point.share:.1%} | {point.quality:.1%} | {kept:.1%} | {point.cost:.3f} |")
    return "\n".join(lines) + "\n"


def chosen(fits: dict[int | None, list[LabelledAnswer]], quality: float) -> tuple[int | None, Measure]:
    def cost(each: tuple[int | None, Measure]) -> float:
        after, measure = each
        labelled = fits[after]
        return evaluate_threshold(
            fit_threshold(CHOSEN_AT * quality, labelled, measure=measure), labelled, measure=measure
        ).cost

    return min(((after, measure) for after in AFTER for measure in MEASURES), key=cost)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost and the quality of a cascade from draft to mini.")
    parser.add_argument("--models", type=Path, default=BUNDLED, help="holds mini and draft")
    parser.add_argument("--sample", type=int, help="questions of each task; all by default")
    parser.add_argument("--answers", type=Path, help="keeps the models' answers, and takes them from there")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--labelled", type=Path, help="writes the first half's labelled answers there")
    parser.add_argument("--out", type=Path, help="writes the tables there too")
    options = parser.parse_args()
    pairs = answers_from(
        options.answers, options.models, options.sample, weights=options.weights, threads=options.threads
    )
    text = report(pairs, f"python benchmarks/cascade.py {shlex.join(sys.argv[1:])}".strip())
    print(text, end="")
    if options.labelled is not None:
        write_labelled(options.labelled, labelled_of(pairs, pairs.half(), None))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
