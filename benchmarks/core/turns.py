"""Runs one engine's turn (start, warm up, time, stop) and the rounds of turns.

Only one engine runs at a time, every engine takes its turn before any takes its next, and a probe runs before and after
every timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from child import Child, EngineError
from engines import Engine
from probes import Prober
from summary import HIGHER_IS_BETTER, OURS
from workloads import FIRST_PROMPT, Prompts, Workload, measure

FAILURES_ALLOWED: Final = 2  # of one engine on one shape, before it gets no more turns
BEHIND: Final = 3.0  # times the best peer's best: a peer that is further behind is not asked for the same again

Record = dict[str, Any]


@dataclass(slots=True)
class Entrant:
    """An engine and its converted model."""

    engine: Engine
    model: Path
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """What all turns of one shape share."""

    shape: str
    workloads: list[Workload]
    kinds: list[str]
    prober: Prober
    prompts: Prompts
    timings: list[Record]
    failures: list[Record]
    facts: dict[str, Any]
    save: Callable[[], None]


def play_round(stage: Stage, entrants: list[Entrant], number: int) -> None:
    """Give every engine a turn; each round starts one engine later, so that no engine always follows the same one."""
    shift = number % len(entrants) if entrants else 0
    for entrant in entrants[shift:] + entrants[:shift]:
        if entrant.failures >= FAILURES_ALLOWED or _is_hopeless(stage, entrant.engine):
            continue
        started = time.monotonic()
        try:
            _take_turn(stage, entrant, number)
        except EngineError as failure:
            entrant.failures += 1
            record = {
                "round": number,
                "shape": stage.shape,
                "peer": entrant.engine.peer,
                "engine": entrant.engine.name,
                "reason": str(failure),
            }
            stage.failures.append(record)
            print(f"  {entrant.engine.name}: failed: {failure}", flush=True)
        stage.save()
        print(f"  {entrant.engine.name}: turn of {time.monotonic() - started:.0f} s", flush=True)


def warm(stage: Stage, entrants: list[Entrant]) -> None:
    """Start each engine once, untimed, so that packed weights and compiled models exist."""
    for entrant in entrants:
        try:
            with _child(entrant, f"warm-{stage.shape}") as child:
                child.wait_ready()
                child.generate(stage.prompts.draw(1, FIRST_PROMPT), 2)
        except EngineError as failure:
            print(f"  {entrant.engine.name}: first start failed: {failure}", flush=True)


def _asked_of(stage: Stage, engine: Engine) -> list[Workload]:
    """Return the workloads of an engine's turn: all in the first round, later those where it may be the best peer.

    The slowest take most of a run's time, and their first number says all that a comparison with the best needs.
    """
    mine = _workloads(stage, engine)
    return mine if engine.peer in OURS else [each for each in mine if not _far_behind(stage, engine, each)]


def _is_hopeless(stage: Stage, engine: Engine) -> bool:
    return bool(_workloads(stage, engine)) and not _asked_of(stage, engine)


def _workloads(stage: Stage, engine: Engine) -> list[Workload]:
    return [each for each in stage.workloads if each.kind in stage.kinds and each.kind in engine.kinds]


def _far_behind(stage: Stage, engine: Engine, workload: Workload) -> bool:
    def best(of_engine: bool) -> float | None:
        values = [
            timing["value"]
            for timing in stage.timings
            if (timing["shape"], timing["precision"], timing["metric"])
            == (stage.shape, engine.precision, workload.name)
            and (timing["engine"] == engine.name if of_engine else timing["peer"] not in OURS)
        ]
        return choose(values, default=None)

    choose = max if workload.name in HIGHER_IS_BETTER else min
    own, peers = best(True), best(False)
    if own is None or peers is None:
        return False
    return (peers / own if choose is max else own / peers) > BEHIND


def _take_turn(stage: Stage, entrant: Entrant, number: int) -> None:
    engine = entrant.engine
    before = stage.prober.probe()

    def note(metric: str, value: float, probes: list[Any]) -> None:
        stage.timings.append(
            {
                "round": number,
                "shape": stage.shape,
                "peer": engine.peer,
                "engine": engine.name,
                "precision": engine.precision,
                "metric": metric,
                "value": value,
                "probes": probes,
            }
        )
        print(f"  {engine.name:22} {metric:20} {value:12.5g}", flush=True)

    with _child(entrant, f"run-{stage.shape}") as child:
        ready = child.wait_ready()
        child.generate(stage.prompts.draw(1, FIRST_PROMPT), 1)
        first = time.perf_counter() - child.started
        stage.facts[f"{stage.shape} {engine.name}"] = child.facts
        after = stage.prober.probe()
        if "start" in stage.kinds and "start" in engine.kinds:
            note("start-ready", ready, [before, after])
            note("start-first-token", first, [before, after])
        single = True
        for workload in _asked_of(stage, engine):
            if workload.kind == "batch" and single:
                single = False
                _note_memory(note, child, "memory", engine)
            child.generate(stage.prompts.draw(workload.sequences, workload.prompt), workload.warm_up)
            before = stage.prober.probe()
            found = measure(workload, stage.prompts, child.generate)
            after = stage.prober.probe()
            for metric, value in found.items():
                note(metric, value, [before, after])
        _note_memory(note, child, "memory" if single else "memory-batch", engine)


def _note_memory(note: Callable[[str, float, list[Any]], None], child: Child, metric: str, engine: Engine) -> None:
    """Record the peak memory after the single streams, before the batches."""
    if metric == "memory-batch" or "decode" in engine.kinds:
        note(metric, float(child.peak_memory()), [])


def _child(entrant: Entrant, log: str) -> Child:
    launch = entrant.engine.launch(entrant.model)
    return Child(launch.command, env=launch.env, log=f"{log}-{entrant.engine.name}".replace(" ", "-"))
