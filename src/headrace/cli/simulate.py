"""`headrace simulate`: run the scheduler against a step-time model, with synthetic traffic or a trace.

Maps flags to a simulation and prints its tables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from headrace.bench.simulation.baseline_orders import ORDERS, Order
from headrace.bench.simulation.scenarios import (
    AbuseResult,
    ColdPrefixResult,
    OverloadResult,
    ScenarioSetup,
    abuse,
    capacity,
    cold,
    overload,
)
from headrace.bench.simulation.simulation_summary import GroupSummary, LatencyPercentiles, SimulationSummary
from headrace.bench.simulation.simulator import Hardware
from headrace.bench.simulation.synthetic_traffic import (
    SURFACE_PROFILES,
    LogNormalLengths,
    SimulatedRequest,
    SurfaceProfile,
    TrafficMix,
    generate,
    read_simulation_trace,
)
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.errors import RequestError
from headrace.variant import DEFAULT_KV_BLOCK

Question = Literal["run", "abuse", "cold", "overload"]


class SimulationReport(msgspec.Struct, frozen=True):
    """The output of --json."""

    capacity: float | None  # requests per second the machine can serve; None with a trace
    rate: float | None
    runs: list[SimulationSummary] = []
    abuse: list[AbuseResult] = []
    cold: list[ColdPrefixResult] = []
    overload: list[OverloadResult] = []


def simulate(
    *,
    trace: Path | None = None,
    ask: Annotated[list[Question] | None, Parameter(negative=())] = None,
    orders: Annotated[list[Order] | None, Parameter(name="--order", negative=())] = None,
    tenants: int = 50,
    seconds: float = 300.0,
    load: float = 0.7,
    rate: float | None = None,
    loads: Annotated[list[float] | None, Parameter(name="--overload", negative=())] = None,
    abuser: float = 100.0,
    surfaces: str | None = None,
    lengths: float = 1.0,
    prefixes: int = 2,
    cold_share: Annotated[float, Parameter(name="--cold")] = 0.05,
    bursts: float = 0.1,
    burst: int = 8,
    skew: float = 0.5,
    deadlines: bool = False,
    fixed_ms: float = 12.0,
    row_ms: float = 0.7,
    pair_ns: float = 30.0,
    noise: float = 0.05,
    kv_tokens: int = 131_072,
    kv_block: int = DEFAULT_KV_BLOCK,
    sequences: int = 32,
    max_rows: int = 512,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Simulate the scheduler under traffic larger than this machine could serve.

    Usage: headrace simulate --load 1.2 --ask run --ask overload

    It runs the engine's own scheduler against a model of step times, and compares it with two baselines: first come
    first served, and longest cached prefix first.

    Parameters
    ----------
    trace
        JSONL file of requests to replay instead of synthetic ones.
    ask
        What to show: run (latency, goodput and fairness by surface and tenant), abuse (one tenant sends many times its
        load), cold (prefixes sent for the first time), overload. Repeatable.
    orders
        Order to simulate: fair, fcfs, longest-prefix, or as references static (a batch starts when the one before has
        ended) and serial (one request at a time). Repeatable. Default: the first three.
    tenants
        Number of tenants.
    seconds
        Seconds during which requests arrive.
    load
        Request rate as a multiple of the machine's capacity.
    rate
        Requests per second; overrides --load.
    loads
        Load for the overload question. Repeatable.
    abuser
        The abuser's load, as a multiple of its usual load.
    surfaces
        Share of the requests by surface, such as chat=0.8,batch=0.2.
    lengths
        Factor for the length of prompts and answers.
    prefixes
        Shared prefixes per tenant and surface.
    cold_share
        Share of the requests with a unique prefix.
    bursts
        Share of the requests that arrive in bursts.
    burst
        Requests per burst.
    skew
        Inequality of tenants: tenant k has k to the power of -skew times the first tenant's load.
    deadlines
        Give requests a deadline for the whole answer.
    fixed_ms
        Milliseconds per step.
    row_ms
        Milliseconds per token of a step.
    pair_ns
        Nanoseconds per KV-cache token that a token of the step reads.
    noise
        Standard deviation of the logarithm of step times.
    kv_tokens
        Tokens that fit in the KV memory.
    kv_block
        Tokens of a block of KV, 1 to 1024. The engine has 16, 32, 64 and 128.
    sequences
        Maximum running sequences.
    max_rows
        Maximum tokens per step.
    seed
        Seed for traffic and noise.
    json
        Print one JSON object instead of the tables.
    """
    for name, value, least in (
        ("seconds", seconds, 1e-3),
        ("load", load, 1e-3),
        ("rate", 1.0 if rate is None else rate, 1e-6),
        ("lengths", lengths, 1e-3),
        ("fixed_ms", fixed_ms, 1e-6),
        ("row_ms", row_ms, 0.0),
        ("pair_ns", pair_ns, 0.0),
        ("noise", noise, 0.0),
        ("kv_tokens", kv_tokens, 1024),
        ("sequences", sequences, 1),
        ("max_rows", max_rows, 1),
        ("prefixes", prefixes, 1),
        ("skew", skew, 0.0),
    ):
        if not least <= value < math.inf:
            raise RequestError(f"{name} must be at least {least:g}, not {value}.", parameter=name)
    if not 1 <= kv_block <= 1024:
        raise RequestError(f"kv_block must be 1 to 1024, not {kv_block}.", parameter="kv_block")
    questions = ask or ["run"]
    chosen = orders or list(ORDERS)
    mix = TrafficMix(
        tenants=tenants,
        seconds=seconds,
        seed=seed,
        kinds=_kinds(surfaces, lengths),
        prefixes=prefixes,
        cold=cold_share,
        skew=skew,
        bursts=bursts,
        burst=burst,
        deadlines=deadlines,
    )
    mix.check()
    limits = SchedulerLimits(max_sequences=sequences, max_rows=max_rows, context=min(32_768, kv_tokens // 2))
    hardware = Hardware(
        fixed=fixed_ms / 1e3,
        per_row=row_ms / 1e3,
        per_pair=pair_ns / 1e9,
        noise=noise,
        blocks=kv_tokens // kv_block,
        block_tokens=kv_block,
    )

    def report_progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    setting = ScenarioSetup(
        mix=mix, hardware=hardware, limits=limits, policy=Policy(), orders=chosen, report_progress=report_progress
    )
    if trace is not None:
        if questions != ["run"]:
            raise RequestError(
                "A trace works only with --ask run: the other questions generate their own traffic.", parameter="ask"
            )
        calls = _read_calls(trace, seed, setting.policy)
        last = max(calls[-1].at, 1.0) if calls else 1.0
        setting = replace(setting, mix=replace(mix, seconds=last))
        report = SimulationReport(None, None, runs=_runs(setting, calls))
    else:
        report_progress("capacity")
        most = capacity(setting)
        setting = replace(setting, mix=replace(mix, rate=rate if rate is not None else load * most))
        report = SimulationReport(
            most,
            setting.mix.rate,
            runs=_runs(setting, list(generate(setting.mix))) if "run" in questions else [],
            abuse=abuse(setting, abuser) if "abuse" in questions else [],
            cold=cold(setting) if "cold" in questions else [],
            overload=overload(setting, loads or [1.0, 2.0], most) if "overload" in questions else [],
        )
    report_progress("")
    if json:
        print(msgspec.json.encode(_finite(msgspec.to_builtins(report))).decode())
    else:
        _show(Console(soft_wrap=True), report)


def _kinds(surfaces: str | None, lengths: float) -> dict[str, SurfaceProfile]:
    shares = {name: kind.share for name, kind in SURFACE_PROFILES.items()}
    if surfaces is not None:
        shares = {}
        for part in surfaces.split(","):
            name, _, share = part.partition("=")
            try:
                value = float(share)
            except ValueError:
                value = -1.0
            if name not in SURFACE_PROFILES or not 0.0 < value < math.inf:
                known = ", ".join(SURFACE_PROFILES)
                raise RequestError(
                    f"Invalid share '{part}' in surfaces. Expected NAME=SHARE,… with names from {known}.",
                    parameter="surfaces",
                )
            shares[name] = value

    def scaled(lengths_: LogNormalLengths) -> LogNormalLengths:
        return replace(lengths_, median=lengths_.median * lengths, most=max(1, round(lengths_.most * lengths)))

    return {
        name: replace(
            kind,
            share=shares[name],
            prefix=scaled(kind.prefix),
            own=scaled(kind.own),
            answer=scaled(kind.answer),
        )
        for name, kind in SURFACE_PROFILES.items()
        if name in shares
    }


def _read_calls(trace: Path, seed: int, policy: Policy) -> list[SimulatedRequest]:
    calls = list(read_simulation_trace(trace, seed=seed))
    for call in calls:
        if call.surface not in policy.surfaces:
            known = ", ".join(policy.surfaces)
            raise RequestError(
                f"{trace}: unknown surface '{call.surface}'. Expected one of {known}.", parameter="trace"
            )
    return calls


def _runs(setting: ScenarioSetup, calls: Sequence[SimulatedRequest]) -> list[SimulationSummary]:
    found: list[SimulationSummary] = []
    for order in setting.orders:
        setting.report_progress(f"run: {order}")
        found.append(setting.summary(setting.run(calls, order), order))
    return found


def _finite(value: object) -> object:
    """Replace infinity, which JSON lacks, by null: "never"."""
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list():
            return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case float() if math.isinf(value):
            return None
        case _:
            return value


def _show(console: Console, report: SimulationReport) -> None:
    if report.capacity is not None:
        console.print(
            f"Capacity for this traffic: {report.capacity:.2f} requests/s; "
            f"arriving: {report.rate or 0.0:.2f} requests/s.\n"
        )
    for summary in report.runs:
        _show_run(console, summary)
    if report.abuse:
        table = _table("One tenant sends many times its load: p99 TTFT of the other tenants' foreground requests")
        for heading in ("order", "times its load", "without", "with", "change", "abuser served"):
            table.add_column(heading, justify="left" if heading == "order" else "right")
        for row in report.abuse:
            change = f"{row.change:+.0%}" if row.change < math.inf else "never"
            served = f"{row.abuser_served:.0%}"
            table.add_row(row.order, f"{row.factor:g}", _seconds(row.before), _seconds(row.after), change, served)
        console.print(table)
    if report.cold:
        table = _table("TTFT of requests with a unique prefix, and of the rest")
        for heading in ("order", "requests", "p50", "p99", "longest", "rest p99", "rest longest"):
            table.add_column(heading, justify="left" if heading == "order" else "right")
        for row in report.cold:
            times = (row.p50, row.p99, row.most, row.rest_p99, row.rest_most)
            table.add_row(row.order, str(row.requests), *map(_seconds, times))
        console.print(table)
    if report.overload:
        table = _table("Requests that met every objective, per second")
        for heading in ("load", "order", "arrive/s", "goodput/s", "of capacity", "refused", "p99 TTFT", "longest"):
            table.add_column(heading, justify="left" if heading == "order" else "right")
        for row in report.overload:
            table.add_row(
                f"{row.load:g}",
                row.order,
                f"{row.rate:.2f}",
                f"{row.goodput:.2f}",
                f"{row.share:.0%}",
                f"{row.refused:.0%}",
                _seconds(row.p99),
                _seconds(row.most),
            )
        console.print(table)


def _show_run(console: Console, summary: SimulationSummary) -> None:
    console.print(
        f"[bold]{summary.order}[/bold]: {summary.all.requests:,} requests, {summary.rows:,} tokens computed in "
        f"{summary.steps:,} steps, {summary.seconds:,.0f} s, busy {summary.busy:.0%}; {summary.preempted} preempted; "
        f"{summary.wasted:.1%} of the KV held has no token; "
        f"fairness {summary.fairness:.3f}, worst tenant {summary.worst:.0%} good"
    )
    table = _table("")
    headings = (
        "",
        "requests",
        "refused",
        "cut",
        "TTFT p50",
        "p90",
        "p99",
        "longest",
        "ITL p50",
        "p99",
        "good",
        "goodput/s",
        "cached",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for group in (*summary.surfaces, summary.all, *summary.tenants):
        table.add_row(*_cells(group))
        if group is summary.all:
            table.add_section()
    console.print(table)


def _cells(group: GroupSummary) -> list[str]:
    ttft = group.ttft or LatencyPercentiles(math.inf, math.inf, math.inf, math.inf, math.inf)
    itl = group.itl
    return [
        group.name,
        f"{group.requests:,}",
        f"{group.refused:,}",
        f"{group.cut:,}",
        _seconds(ttft.p50),
        _seconds(ttft.p90),
        _seconds(ttft.p99),
        _seconds(math.inf if group.unfinished else ttft.most),
        _seconds(itl.p50) if itl else "",
        _seconds(itl.p99) if itl else "",
        f"{group.good / max(group.requests, 1):.0%}",
        f"{group.goodput:.2f}",
        f"{group.cached:.0%}",
    ]


def _table(title: str) -> Table:
    return Table(title=title or None, title_justify="left")


def _seconds(value: float) -> str:
    if value == math.inf:
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.1f} s"
