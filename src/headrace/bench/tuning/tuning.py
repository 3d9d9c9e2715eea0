"""Runs a tuning: the levels in order on the engine, the bottleneck before and after, and the first against the last."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

import headrace._core as _core
from headrace.bench.evaluation.documents import Document, read_documents
from headrace.bench.machine import bandwidth
from headrace.bench.tuning.bottleneck import Bottleneck, find_bottleneck
from headrace.bench.tuning.engine_machine import EngineMachine
from headrace.bench.tuning.levels import TuningInputs, default_setting, naive_setting, tuning_levels
from headrace.bench.tuning.quality_gate import AnswersGate, GateRules
from headrace.bench.tuning.remembered_machine import RememberedMachine, read_state, setting_key
from headrace.bench.tuning.search import (
    Level,
    LevelResult,
    Noise,
    Rules,
    Sample,
    Setting,
    SettingComparison,
    compare_settings,
    walk_levels,
)
from headrace.bench.tuning.tune_report import TuneReport, state_digest
from headrace.bench.tuning.tuning_traffic import TuningTraffic, tuning_traffic
from headrace.engine.executors.default_sizes import usable_cores
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import parse_plan
from headrace.models.prediction_module import has_prediction_module
from headrace.models.step_work import decode_bytes

Origin = Literal["defaults", "naive"]
_OVERALL: Final = Level(name="overall", what="", choices=())
_FEW_MEASUREMENTS: Final = 60  # a walk over the lossless levels alone needs about as many
_FIRST_NUMBER: Final = 1_000_000  # of the measurements of the whole, apart from those of the levels


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True):
    trace: Path | None = None
    workload: str = "chat"
    requests: int = 12
    users: int = 4
    scale: float = 1.0
    objectives: dict[str, float] = {}
    prompts: Path | None = None
    gate: GateRules = GateRules()
    origin: Origin = "defaults"
    draft: str | None = None
    smaller: str | None = None
    levels: Sequence[str] = ()  # empty: all
    minutes: float = 10.0
    state: Path | None = None
    price: float = 0.0
    cache: bool = True
    seed: int = 0
    rules: Rules = Rules()
    bottleneck: bool = True


def tune(
    model: str,
    options: TuneOptions,
    *,
    answers_gate: AnswersGate | None = None,
    report_progress: Callable[[str], None] = lambda _text: None,
    advise: Callable[[str], None] = lambda _text: None,
    on_result: Callable[[LevelResult], None] = lambda _result: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneReport:
    began = clock()
    folder = open_model(find_model(model))
    if folder.spec.kind != "decoder":
        raise RequestError(f"{folder.spec.architecture} generates no text. Tune a decoder.", parameter="model")
    traffic = tuning_traffic(
        options.trace,
        options.workload,
        requests=options.requests,
        users=options.users,
        scale=options.scale,
        seed=options.seed,
    )
    prompts = [] if options.prompts is None else read_documents(options.prompts)
    inputs = _tuning_inputs(folder, traffic, options, prompts)
    start = naive_setting(inputs) if options.origin == "naive" else default_setting(inputs)
    levels = _chosen(tuning_levels(inputs), options.levels)
    chats = prompts if options.prompts is not None and options.prompts.suffix == ".jsonl" else []
    machine = EngineMachine(
        model,
        traffic,
        objectives=options.objectives,
        reference=start,
        prompts=prompts,
        job_prompts=chats,
        prompts_name="" if options.prompts is None else options.prompts.name,
        rules=options.gate,
        answers_gate=answers_gate,
        cache=options.cache,
        price=options.price,
        seed=options.seed,
    )
    digest = _digest(folder, traffic, options, start, levels, answers=answers_gate is not None)
    state = read_state(options.state, digest)

    report_progress("the first setting")
    each = -clock()
    first = RememberedMachine(machine, state, options.state).measure(start, _FIRST_NUMBER)
    each += clock()
    if each * _FEW_MEASUREMENTS > 60.0 * options.minutes:
        advise(_too_slow(each, options.minutes))
    before = _bottleneck(machine, start, traffic, first) if options.bottleneck else None
    walk_began = clock()  # --minutes bounds the levels: however slow a start is, a walk that is run again gets further
    walked = RememberedMachine(
        machine, state, options.state, time_is_over=lambda: clock() - walk_began > 60.0 * options.minutes
    )
    report_progress("levels")
    results = walk_levels(start, levels, walked, options.rules, on_result=on_result)
    final = results[-1].setting if results else start
    overall: SettingComparison | None = None
    after = before
    if final != start:
        report_progress("the last setting against the first")
        whole = RememberedMachine(machine, state, options.state, purpose=f"overall {setting_key(final)} ")
        overall = _compare_whole(start, final, whole, options.rules)
        if options.bottleneck:
            after = _bottleneck(machine, final, traffic, whole.measure(final, _FIRST_NUMBER))
    return TuneReport(
        model=model,
        cpu=machine.cpu,
        isa=_core.isa_default(),
        traffic=traffic.name,
        profile=traffic.profile,
        requests=len(machine.jobs(0)),
        users=traffic.users,
        objectives=options.objectives,
        start=start,
        final=final,
        results=results,
        overall=overall,
        before=before,
        after=after,
        measurements=machine.measurements,
        seconds=clock() - began,
    )


def _tuning_inputs(
    folder: ModelFolder, traffic: TuningTraffic, options: TuneOptions, prompts: Sequence[Document]
) -> TuningInputs:
    return TuningInputs(
        spec=folder.spec,
        traffic=traffic.profile,
        cores=usable_cores(),
        stored=any(folder.weights.layout(part.name) is not None for part in folder.sources["layers.0.attn.o"]),
        gate=bool(prompts),
        users=traffic.at_once,
        draft=options.draft,
        has_module=has_prediction_module(folder),
        smaller=options.smaller,
    )


def _digest(
    folder: ModelFolder,
    traffic: TuningTraffic,
    options: TuneOptions,
    start: Setting,
    levels: Sequence[Level],
    *,
    answers: bool,
) -> str:
    """Identify what a state file may continue."""
    return state_digest(
        model=str(folder.path),
        traffic=traffic.name,
        profile=msgspec.to_builtins(traffic.profile),
        users=traffic.users,
        requests=options.requests,
        objectives=options.objectives,
        prompts=options.prompts,
        start=start,
        levels=msgspec.to_builtins(levels),
        gate=msgspec.to_builtins(options.gate),
        answers=answers,
        seed=options.seed,
    )


def _too_slow(seconds: float, minutes: float) -> str:
    return (
        f"One measurement takes {seconds:.1f} s, and a level needs 6 to 20 of them: about "
        f"{60.0 * minutes / seconds:.0f} fit into {minutes:g} minutes. Raise --minutes, or measure fewer (--requests) "
        "or shorter (--scale) requests. With --state, you can go on later."
    )


def _compare_whole(start: Setting, final: Setting, machine: RememberedMachine, rules: Rules) -> SettingComparison:
    rules = msgspec.structs.replace(rules, most_pairs=max(3, rules.least_pairs))
    return compare_settings(_OVERALL, start, final, machine, rules, itertools.count(_FIRST_NUMBER), Noise())


def _chosen(levels: list[Level], names: Sequence[str]) -> list[Level]:
    known = [level.name for level in levels]
    for name in names:
        if name not in known:
            raise RequestError(f"Unknown level '{name}'. Expected one of {', '.join(known)}.", parameter="level")
    return [level for level in levels if not names or level.name in names]


def _bottleneck(machine: EngineMachine, setting: Setting, traffic: TuningTraffic, sample: Sample) -> Bottleneck:
    variant = machine.variant(setting)
    plan = parse_plan(variant.weights, keep=variant.keep)
    folder = machine.folder_of(setting)
    size = decode_bytes(folder.spec, plan)
    pool = _core.Pool(usable_cores())
    return find_bottleneck(
        folder,
        variant,
        setting,
        machine.probes(),
        bandwidth(pool, size),
        machine.jobs(_FIRST_NUMBER),
        sample.figures,
        reused=traffic.profile.reused,
    )
