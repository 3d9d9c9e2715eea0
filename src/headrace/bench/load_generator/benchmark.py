"""Runs one benchmark: prepare, warm up, run the stages, check token counts, collect the result.

Owns the order of these steps only; other modules do each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Final

import msgspec
import uvloop

from headrace.bench.client.http_client import HttpClient, Target
from headrace.bench.load_generator.arrivals import Arrivals
from headrace.bench.load_generator.benchmark_options import MOST_REQUESTS, BenchmarkOptions, LoadTenant
from headrace.bench.load_generator.load_driver import LoadDriver, StageLimits, TenantLoad
from headrace.bench.load_generator.preparation import Preparation, prepare, server_error
from headrace.bench.load_generator.request_builder import CHAT, COMPLETIONS, PrebuiltRequests
from headrace.bench.load_generator.result_warnings import collect_warnings
from headrace.bench.load_generator.sweep import RateSearch, shortfall
from headrace.bench.load_generator.token_check import check_tokens
from headrace.bench.load_generator.trace_reader import read_trace
from headrace.bench.load_generator.workloads import UniformLengths, Workload, sessions
from headrace.bench.results.benchmark_result import BenchmarkResult, RequestRow, RunSnapshot, StageResult
from headrace.bench.results.request_stats import compute_stats, stats_by, stats_by_length
from headrace.errors import RequestError
from headrace.version import __version__

DEFAULT_SECONDS: Final = 30.0  # per stage, if neither requests nor seconds are given
_WARMUP: Final = Workload(name="warm-up", own=UniformLengths(64), answer=UniformLengths(16))  # for traces
_RAMP_PARTS: Final = 10  # stages that a ramp is split into for the result
_WARMUP_CONCURRENCY: Final = 8
_SPARE_FILES: Final = 64  # file descriptors in addition to the connections


class _StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rate: float | None = None
    users: int | None = None  # closed loop
    most: int | None = None  # open loop: maximum concurrent requests
    last_rate: float | None = None  # ramp: the rate at its end


def run_benchmark(options: BenchmarkOptions, *, watch: Callable[[RunSnapshot], None] | None = None) -> BenchmarkResult:
    """Run a benchmark and block until it is done.

    Ctrl-C ends it early: the result then holds what was measured so far, and a warning. Raises RequestError for invalid
    options or requests, ConnectionError if the server cannot be reached or fails.
    """
    options.check()
    results: list[BenchmarkResult] = []

    async def main() -> None:
        # Not returned: on an interrupt asyncio.Runner would format the repr of a huge result for an unused error.
        results.append(await run_benchmark_async(options, watch=watch))

    with _process_limits(options), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return results[0]


async def run_benchmark_async(
    options: BenchmarkOptions, *, watch: Callable[[RunSnapshot], None] | None = None
) -> BenchmarkResult:
    client = HttpClient(
        Target.of(options.url),
        timeout=options.timeout,
        connect_timeout=options.connect_timeout,
        most_kept=options.running,
        insecure=options.insecure,
    )
    try:
        trace = None if options.trace is None else _Trace(options)
        prepared = await prepare(client, options, made=trace is None or trace.made)
        return await _Run(client, options, prepared, trace, watch).run()
    finally:
        client.close()


class _Trace:
    """The sessions of a trace file, checked as a whole first: an invalid last line must not spoil a run."""

    def __init__(self, options: BenchmarkOptions) -> None:
        assert options.trace is not None
        lines = read_trace(options.trace, form=options.trace_format, speed=options.speed)
        first = next(lines, None)
        if first is None:
            raise RequestError(f"{options.trace} contains no requests.", parameter="trace")
        for _ in lines:
            pass
        self.timed = first.at is not None
        if options.is_trace_timed and not self.timed:
            raise RequestError("The trace has no arrival times. Pass --rate or --concurrency.", parameter="rate")
        self.made = first.text is None
        self.sessions = read_trace(options.trace, form=options.trace_format, speed=options.speed)


class _Run:
    def __init__(
        self,
        client: HttpClient,
        options: BenchmarkOptions,
        prepared: Preparation,
        trace: _Trace | None,
        watch: Callable[[RunSnapshot], None] | None,
    ) -> None:
        self._client = client
        self._options = options
        self._prepared = prepared
        self._trace = trace
        self._driver = LoadDriver(
            client,
            prepared.prompts,
            stream=options.stream,
            seed=options.seed,
            keep_texts=options.texts,
            watch=watch,
        )
        self._stages: list[StageResult] = []
        self._warnings = list(prepared.warnings)
        self._knee: int | None = None
        self._tenants = options.tenants
        self._sources = self._open_sources()

    def _open_sources(self) -> list[tuple[LoadTenant, PrebuiltRequests]]:
        """Open one stream of requests per tenant for the whole run, so that no stage repeats another's requests."""
        prompts, seed = self._prepared.prompts, self._options.seed
        if self._trace is not None:
            return [(self._tenants[0], PrebuiltRequests(self._trace.sessions, prompts))]
        return [
            (
                tenant,
                PrebuiltRequests(sessions(tenant.mix, seed=seed, tenant=tenant.name, surface=tenant.surface), prompts),
            )
            for tenant in self._tenants
        ]

    async def run(self) -> BenchmarkResult:
        options = self._options
        began = datetime.now(UTC)
        await self._warm()
        try:
            if options.sweep is not None:
                await self._sweep()
            else:
                plans = self._plans()
                self._driver.stages = len(plans)
                for plan in plans:
                    await self._stage(plan)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.uncancel() > 0 or not self._driver.rows:
                raise
            self._warnings.append("The run was interrupted; this is what was measured until then.")
            number = len(self._stages)
            if rows := [row for row in self._driver.rows if row.stage == number]:
                stats = compute_stats("interrupted", rows, options.objectives)
                began_s = min(row.start for row in rows)
                self._stages.append(
                    StageResult(
                        name=stats.name, began=began_s, ended=began_s + stats.seconds, figures=stats, kept_up=False
                    )
                )
        return await self._result(began)

    def _plans(self) -> list[_StagePlan]:
        options = self._options
        if options.ramp is not None:
            low, high = options.ramp
            return [_StagePlan(name=f"{low:g} to {high:g} requests/s", rate=low, last_rate=high)]
        if options.rates:
            most = options.concurrency[0] if options.concurrency else None
            return [_StagePlan(name=_rate_name(rate), rate=rate, most=most) for rate in options.rates]
        if options.concurrency:
            return [_StagePlan(name=f"{users} at once", users=users) for users in options.concurrency]
        if options.is_trace_timed:
            return [_StagePlan(name="trace times")]
        if self._tenants[0].rate is not None or self._tenants[0].concurrency is not None:
            return [_StagePlan(name=f"{len(self._tenants)} tenants")]
        return [_StagePlan(name="1 at once", users=1)]

    # Stages

    async def _warm(self) -> None:
        """Send unmeasured requests from the run's own sessions, so that shared prefixes get cached."""
        options = self._options
        if not options.warmup:
            return
        if self._trace is None:
            sources = [ahead for _, ahead in self._sources]
        elif self._trace.made:
            warming = sessions([(_WARMUP, 1.0)], seed=options.seed, tenant="warm-up")
            sources = [PrebuiltRequests(warming, self._prepared.prompts)]
        else:
            return
        rows: list[RequestRow] = []
        for place, ahead in enumerate(sources):
            count = (options.warmup + len(sources) - 1 - place) // len(sources)
            if count:
                rows += await self._driver.warm(ahead, count, _WARMUP_CONCURRENCY, self._bounds())
        if rows and not any(row.ok for row in rows):
            row = rows[0]
            message = f"{self._client.target.url}: every warm-up request failed: {row.error}: {row.why}"
            raise server_error(message, row.status)

    async def _stage(self, plan: _StagePlan) -> StageResult:
        options, driver = self._options, self._driver
        number = len(self._stages)
        first_row = len(driver.rows)
        bounds = self._bounds()
        loads = [self._load(plan, tenant, ahead, number) for tenant, ahead in self._sources]
        expected = bounds.requests or 64
        if bounds.seconds is not None and plan.rate is not None and plan.rate < math.inf:
            expected = min(expected, math.ceil(bounds.seconds * max(plan.rate, plan.last_rate or 0.0)))
        for load in loads:
            load.ahead.fill(math.ceil(expected / len(loads)))
        await self._client.warm(min(sum(load.users or 0 for load in loads), options.running))
        began, last, ended = await driver.stage(number, plan.name, loads, bounds)
        rows = driver.rows[first_row:]
        if not rows:
            raise RequestError("The stage ended before it sent a request. Pass more --seconds.", parameter="seconds")
        stage = StageResult(
            name=plan.name,
            rate=plan.rate if plan.last_rate is None else None,
            concurrency=plan.users or plan.most,
            began=began,
            ended=ended,
            figures=compute_stats(plan.name, rows, options.objectives),
        )
        if options.sweep is not None:
            first = self._stages[0].figures if self._stages else None
            stage.why = shortfall(
                stage.figures,
                sending=last - began,
                first=first,
                objectives=options.objectives,
                good_share=options.sweep.good_share,
                latency=options.sweep.latency,
            )
            stage.kept_up = not stage.why
        self._stages.append(stage)
        if plan.last_rate is not None:
            self._split_ramp(stage)
        return stage

    def _load(self, plan: _StagePlan, tenant: LoadTenant, ahead: PrebuiltRequests, number: int) -> TenantLoad:
        options = self._options
        name = f"{options.seed} {tenant.name} {number} arrivals"
        share = 1.0 / len(self._sources)
        if plan.rate is not None:
            arrivals = Arrivals(
                rate=plan.rate * share,
                kind=tenant.arrivals,
                burstiness=tenant.burstiness,
                last_rate=None if plan.last_rate is None else plan.last_rate * share,
                seconds=options.seconds or 0.0,
            )
            return TenantLoad(ahead=ahead, times=arrivals.times(name), most=plan.most)
        if plan.users is not None:
            # Tenants get as even a number of users as possible.
            place = next(place for place, (each, _) in enumerate(self._sources) if each is tenant)
            count = len(self._sources)
            return TenantLoad(ahead=ahead, users=(plan.users + count - 1 - place) // count)
        if tenant.rate is not None:
            arrivals = Arrivals(rate=tenant.rate, kind=tenant.arrivals, burstiness=tenant.burstiness)
            return TenantLoad(ahead=ahead, times=arrivals.times(name))
        if tenant.concurrency is not None:
            return TenantLoad(ahead=ahead, users=tenant.concurrency)
        return TenantLoad(ahead=ahead, timed=True)

    def _bounds(self) -> StageLimits:
        options = self._options
        seconds = options.seconds
        if seconds is None and options.requests is None and self._trace is None:
            seconds = DEFAULT_SECONDS
        return StageLimits(
            requests=options.requests,
            seconds=seconds,
            drain=options.drain,
            running=options.running,
            rows=MOST_REQUESTS,
        )

    async def _sweep(self) -> None:
        sweep = self._options.sweep
        assert sweep is not None
        climb = RateSearch(low=sweep.low, high=sweep.high, factor=sweep.factor, refine=sweep.refine)
        while len(self._stages) < sweep.stages and (rate := climb.next()) is not None:
            stage = await self._stage(_StagePlan(name=_rate_name(rate), rate=rate))
            climb.note(rate, kept_up=stage.kept_up)
        good = [place for place, stage in enumerate(self._stages) if stage.kept_up]
        if good:
            self._knee = max(good, key=lambda place: self._stages[place].rate or 0.0)
            if not climb.bad:
                self._warnings.append("The server kept up with every rate of the sweep; its knee is higher.")
        else:
            self._warnings.append("The server kept up with no rate of the sweep; its knee is lower.")

    def _split_ramp(self, whole: StageResult) -> None:
        """Split a ramp's requests into stages by planned time, so that the result shows latency against load."""
        options = self._options
        assert options.ramp is not None
        assert options.seconds is not None
        low, high = options.ramp
        length = options.seconds / _RAMP_PARTS
        parts: list[list[RequestRow]] = [[] for _ in range(_RAMP_PARTS)]
        for row in self._driver.rows:
            parts[min(_RAMP_PARTS - 1, max(0, int((row.planned - whole.began) / length)))].append(row)
        self._stages.clear()
        for place, rows in enumerate(parts):
            if not rows:
                continue
            rate = low + (high - low) * (place + 0.5) / _RAMP_PARTS
            for row in rows:
                row.stage = len(self._stages)
            self._stages.append(
                StageResult(
                    name=_rate_name(rate),
                    rate=rate,
                    began=whole.began + place * length,
                    ended=whole.began + (place + 1) * length,
                    figures=compute_stats(_rate_name(rate), rows, options.objectives),
                )
            )

    # The result

    async def _result(self, began: datetime) -> BenchmarkResult:
        options, driver, prepared = self._options, self._driver, self._prepared
        ended = datetime.now(UTC)
        await self._count_uncounted()
        rows = sorted(driver.rows, key=lambda row: row.number)
        seconds = sum(stage.figures.seconds for stage in self._stages) if options.ramp is None else None
        total = compute_stats("all", rows, options.objectives, seconds=seconds)
        seconds = total.seconds
        result = BenchmarkResult(
            headrace=__version__,
            label=options.label,
            url=self._client.target.url,
            endpoint=CHAT if options.endpoint == "chat" else COMPLETIONS,
            model=prepared.model,
            tokenizer=prepared.lengths_by,
            streamed=options.stream,
            started_at=began.isoformat(timespec="milliseconds"),
            ended_at=ended.isoformat(timespec="milliseconds"),
            duration=seconds,
            seed=options.seed,
            nonce=prepared.nonce,
            workload=_workload_name(options),
            load=_load_name(options),
            arrivals=_arrivals_name(options),
            burstiness=self._tenants[0].burstiness,
            ramp=options.ramp,
            objectives=dict(options.objectives),
            figures=total,
            stages=self._stages,
            knee=self._knee,
            tenants=stats_by(rows, lambda row: row.tenant, options.objectives, seconds=seconds),
            surfaces=stats_by(rows, lambda row: row.surface, options.objectives, seconds=seconds),
            workloads=stats_by(rows, lambda row: row.workload, options.objectives, seconds=seconds),
            lengths=stats_by_length(rows, options.buckets, options.objectives, seconds=seconds),
            warmup=options.warmup,
            rows=rows,
            gaps_left_out=driver.gaps_left_out,
        )
        if prepared.counter is not None and options.mismatch != "off" and driver.sample.kept:
            try:
                result.token_check = await check_tokens(
                    driver.sample.kept,
                    prepared.counter,
                    self._client,
                    [prepared.prompts.build(session, 0, (), until_eos=True) for session in driver.first],
                    stream=options.stream,
                    past_ends=options.ignore_eos,
                )
            except ConnectionError as error:
                self._warnings.append(f"The server's token counts could not be checked: {error}")
        result.warnings = self._warnings + collect_warnings(
            result, most_lag=options.most_lag, ignore_eos=options.ignore_eos
        )
        return result

    async def _count_uncounted(self) -> None:
        """Count the output tokens of answers without usage."""
        uncounted = self._driver.uncounted
        if uncounted and self._prepared.counter is not None:
            try:
                for row, text in uncounted:
                    row.output_tokens, row.tokens_from = await self._prepared.counter.count(text), "text"
            except ConnectionError as error:
                self._warnings.append(f"Output tokens could not be counted: {error}")
            for place, stage in enumerate(self._stages):
                rows = [row for row in self._driver.rows if row.stage == place]
                stage.figures = compute_stats(stage.name, rows, self._options.objectives)


def _is_closed_loop(options: BenchmarkOptions) -> bool:
    if options.rates or options.ramp is not None or options.sweep is not None:
        return False
    return not options.is_trace_timed and all(tenant.rate is None for tenant in options.tenants)


def _load_name(options: BenchmarkOptions) -> str:
    if options.sweep is not None:
        return "sweep"
    if options.ramp is not None:
        return "ramp"
    return "trace" if options.is_trace_timed else "closed" if _is_closed_loop(options) else "open"


def _arrivals_name(options: BenchmarkOptions) -> str:
    if options.is_trace_timed:
        return "trace"
    return "" if _is_closed_loop(options) else options.tenants[0].arrivals


def _workload_name(options: BenchmarkOptions) -> str:
    if options.trace is not None:
        return f"trace {options.trace.name}"
    names = {", ".join(workload.name for workload, _ in tenant.mix) for tenant in options.tenants}
    return "; ".join(sorted(names))


def _rate_name(rate: float) -> str:
    return "all at once" if rate == math.inf else f"{rate:.4g} requests/s"


@contextlib.contextmanager
def _process_limits(options: BenchmarkOptions) -> Generator[None]:
    """Collect garbage rarely and allow as many open files as there may be connections."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.running + _SPARE_FILES
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard >= 0 else needed, hard))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
