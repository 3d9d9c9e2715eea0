"""Simulates many canaries: false alarms between equal arms, and the power to find regressions by the requests it takes.

    python benchmarks/canary_trials.py [--equal 1000] [--trials 200] [--most 1000] [--out FILE]

Requests are drawn, half of them for each arm, and go into the evidence that a server keeps, with default tolerances:
TTFT, ITL and E2EL (log-normal, spread by 25 %), failures (1 %), cost, and the quality of every second request's pair
(0.85, spread by 10 points). The server's rule is applied every 50 requests: it rolls back on the first breach of any
measure. `benchmarks/canary.py` does the same on engines, and `tests/lab/online/test_canary_killed.py` with kill -9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests and benchmarks are no packages that are installed

from benchmarks.runs import commit, now
from headrace.lab.online.canary_evidence import Arm, CanaryBounds, CanaryEvidence

LOOK_EVERY: Final = 50  # requests of both arms
SPREAD: Final = 0.25
MEDIANS: Final = {"ttft": 0.2, "itl": 0.02, "e2e": 1.0}  # seconds
Z90: Final = 1.2816  # of the normal distribution: the slowest tenth lies above
AT: Final = (250, 500, 1000, 2000, 4000)  # requests of the candidate

Slowdown = Callable[[float], float]  # factor of a duration, by its place in the normal distribution


class Regression(msgspec.Struct, frozen=True):
    name: str
    about: str
    slowdown: Slowdown = lambda place: 1.0
    drop: float = 0.0  # of quality
    failures: float = 0.01
    cost: float = 1.0
    is_bad: bool = True
    times: int = 1  # as many requests as the others have


REGRESSIONS: Final = (
    Regression("equal", "both arms are equal", is_bad=False),
    Regression("faster", "20 % faster", lambda place: 0.8, is_bad=False),
    Regression("slower", "20 % slower", lambda place: 1.2),
    Regression("tail", "the slowest tenth 20 % slower: p95 alone", lambda place: 1.2 if place > Z90 else 1.0, times=4),
    Regression("quality", "5 points of quality less", drop=0.05),
    Regression("failing", "6 % of the requests fail, not 1 %", failures=0.06),
    Regression("dearer", "30 % dearer", cost=1.3),
)


LONGEST: Final = max(each.times for each in REGRESSIONS)


class Trial(msgspec.Struct, frozen=True):
    measures: tuple[str, ...]  # breached; none: the canary goes on
    requests: int  # of the candidate until then
    proven: int | None  # requests of the candidate after which every measure was within its tolerance


def simulate(regression: Regression, most: int, seed: int) -> Trial:
    random = Random(seed)
    evidence = CanaryEvidence("simulated", CanaryBounds())
    candidates, number, proven = 0, 0, None
    while candidates < most:
        number += 1
        arm: Arm = "candidate" if random.random() < 0.5 else "control"
        is_candidate = arm == "candidate"
        candidates += is_candidate
        failed = random.random() < (regression.failures if is_candidate else 0.01)
        evidence.note_rate(arm, "failures", float(failed))
        if not failed:
            for measure, median in MEDIANS.items():
                place = random.gauss(0.0, 1.0)
                factor = regression.slowdown(place) if is_candidate else 1.0
                evidence.note_seconds(arm, measure, median * factor * 2.718281828 ** (SPREAD * place))
            price = 1000.0 * random.lognormvariate(0.0, SPREAD) * (regression.cost if is_candidate else 1.0)
            evidence.note_answer(arm, output_tokens=100, micros=round(price))
        if number % 2:
            qualities = [min(1.0, max(0.0, random.gauss(0.85 - drop, 0.1))) for drop in (0.0, regression.drop)]
            evidence.note_quality(*qualities)
        if number % LOOK_EVERY == 0:
            if breaches := evidence.breaches():
                return Trial(tuple(each.measure for each in breaches), candidates, proven)
            if proven is None and evidence.is_proven:
                proven = candidates
    return Trial((), candidates, proven)


def row(regression: Regression, trials: Sequence[Trial], most: int) -> str:
    found = [trial for trial in trials if trial.measures]
    columns = [at for at in AT if at <= most]
    shares = [sum(trial.requests <= at for trial in found) / len(trials) for at in columns]
    reached = [at <= most // LONGEST * regression.times for at in columns]
    requests = [trial.requests for trial in found]
    proven = [trial.proven for trial in trials if trial.proven is not None]
    cells = [
        regression.about,
        str(len(trials)),
        *(f"{100 * share:.1f} %" if is_reached else "" for share, is_reached in zip(shares, reached, strict=True)),
        f"{statistics.median(requests):g}" if regression.is_bad and requests else "",
        str(max(requests)) if regression.is_bad and requests else "",
        ", ".join(sorted({measure for trial in found for measure in trial.measures})) or "none",
        f"{100 * len(proven) / len(trials):.0f} %, {statistics.median(proven):g} in the median" if proven else "0 %",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", type=int, default=1000, help="trials of equal arms")
    parser.add_argument("--trials", type=int, default=200, help="trials of each other kind")
    parser.add_argument("--most", type=int, default=1000, help="requests of the candidate after which a trial ends")
    parser.add_argument("--out", type=Path, help="Markdown file")
    given = parser.parse_args()
    began, load = time.process_time(), os.getloadavg()[0]
    columns = [f"by {at:,}" for at in AT if at <= given.most * LONGEST]
    head = ["candidate", "trials", *columns, "median", "most", "measures", "proven equal or better"]
    rows: list[str] = []
    for kind, regression in enumerate(REGRESSIONS):
        count = given.trials if kind else given.equal
        trials = [simulate(regression, given.most * regression.times, 1_000_000 * kind + seed) for seed in range(count)]
        rows.append(row(regression, trials, given.most * LONGEST))
        print(rows[-1], flush=True)
    lines = [
        "# Simulated canaries",
        "",
        f"`python benchmarks/canary_trials.py --equal {given.equal} --trials {given.trials} --most {given.most}`, "
        f"{now()}, commit {commit()}. {time.process_time() - began:.0f} s of processor time (load {load:.0f}); the "
        "numbers do not depend on the machine.",
        "",
        "Share of the canaries that were rolled back by so many requests of the candidate, half of the traffic; the "
        "requests until the rollback, in the median and at most, of those that were; the measures that were breached; "
        "and the share in which every measure was proven to be within its tolerance.",
        "",
        f"| {' | '.join(head)} |",
        f"|---|{'---:|' * (len(columns) + 3)}---|---|",
        *rows,
        "",
        "Tolerances are the defaults: 10 % slower or dearer, 2 points of quality, 1 point of failures; the level is "
        "5 % for all measures and looks together.",
        "",
        "`python benchmarks/canary.py` does the same with variants on engines. "
        "`tests/lab/online/test_canary_killed.py` kills a server's writer before and after each commit of a canary, "
        "and finds one truth each time.",
    ]
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
