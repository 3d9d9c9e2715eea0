"""`headrace tune`: measure a model under your traffic, try one level after the other, and keep what helps and passes.

Maps flags to a tuning, shows its progress and writes its results.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from headrace.bench.objectives import parse_objectives
from headrace.bench.results.formatting import milliseconds, number, share
from headrace.bench.tuning.bottleneck import Bottleneck
from headrace.bench.tuning.quality_gate import AnswersGate, GateRules
from headrace.bench.tuning.search import OUT_OF_TIME, LevelResult
from headrace.bench.tuning.tune_report import TuneReport, interval_text, tune_html, tuned_toml
from headrace.bench.tuning.tuning import Origin, TuneOptions
from headrace.bench.tuning.tuning import tune as run_tuning
from headrace.cli.lab.tune_cascade import cascade
from headrace.cli.output_path import check_output_folder
from headrace.errors import RequestError
from headrace.lab.tuning.answers_gate import answers_gate
from headrace.models.formats.atomic_file import new_file
from headrace.variant import DEFAULT_MODEL

_COLUMNS: Final = 120


tune = App(
    name="tune", help="Find the settings that serve your traffic fastest, or fit a cascade to it.", version_flags=[]
)
tune.command(cascade)


@tune.default
def tune_model(
    model: str = DEFAULT_MODEL,
    /,
    *,
    traffic: Path | None = None,
    workload: str = "chat",
    requests: int = 12,
    users: int = 4,
    scale: float = 1.0,
    slo: Annotated[list[str] | None, Parameter(negative=())] = None,
    prompts: Path | None = None,
    max_kl: float = 0.02,
    min_agreement: float = 0.95,
    max_perplexity: float = 0.02,
    gate_tokens: int = 2000,
    gate: Literal["likelihood", "answers"] = "likelihood",
    thresholds: Path | None = None,
    origin: Annotated[Origin, Parameter(name="--from")] = "defaults",
    draft: str | None = None,
    smaller: str | None = None,
    level: Annotated[list[str] | None, Parameter(negative=())] = None,
    minutes: float = 10.0,
    state: Path | None = None,
    price: float = 0.0,
    config: Path | None = None,
    html: Path | None = None,
    explain: bool = False,
    cache: bool = True,
    seed: int = 0,
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
) -> None:
    """Find the settings that serve your traffic fastest on this machine, and prove each.

    Usage: headrace tune mini --workload chat --slo ttft_p95=300ms --prompts questions.jsonl --config headrace.toml

    It runs your traffic on an engine in this process, never on a server. Each level is predicted, measured in pairs
    with the setting before it, and kept if the gain is above the noise. Levels that change the model come last, and
    are kept only if they pass the gate on your prompts.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name.
    traffic
        JSONL trace of requests: their lengths, shared prefixes, tenants and times.
    workload
        Workload in place of a trace: chat, rag, agent, summarise or extract.
    requests
        Requests in each measurement.
    users
        Requests at once, where the traffic has no times: each user sends the next when the last has ended.
    scale
        Multiply a workload's lengths: 0.25 makes measurements four times shorter.
    slo
        Objectives, such as ttft_p95=300ms,itl_p95=50ms. Missing one costs score, by how far it is missed.
    prompts
        Your own prompts: JSONL as for headrace evaluate, or a text. Needed by levels that change the model. Requests
        send the prompts of a JSONL file.
    max_kl
        The gate: KL divergence per token from the first setting, at most.
    min_agreement
        The gate: share of tokens with the same likeliest token, at least.
    max_perplexity
        The gate: relative rise of the perplexity, at most.
    gate_tokens
        Tokens that the gate scores.
    gate
        likelihood: compare predictions. answers: also pass `headrace gate`, which compares the answers themselves.
    thresholds
        TOML file with limits for --gate answers. Default: those of headrace gate --print-thresholds.
    origin
        Where to start: defaults (those of headrace serve) or naive (one thread, one request at a time, 32 bits).
    draft
        Draft model to try for speculation. Default: draft, for mini.
    smaller
        Smaller model with the same tokenizer to try in place of this one.
    level
        Try only this level. Repeatable.
    minutes
        Time for the levels. What is left is skipped.
    state
        File that keeps the results so far: run again with the same file to go on.
    price
        USD per hour of this machine, to show the cost per million tokens.
    config
        Write the commented configuration to this file.
    html
        Write a report with the waterfall to this file.
    explain
        Print the reason for every level.
    cache
        Keep the packed weights in the cache folder.
    seed
        Seed of traffic and texts.
    json
        Write the result to this file as JSON; `-` prints it.
    """
    for name, value, least, most in (
        ("requests", requests, 1, 10_000),
        ("users", users, 1, 1024),
        ("scale", scale, 1e-3, 100.0),
        ("max_kl", max_kl, 0.0, math.inf),
        ("min_agreement", min_agreement, 0.0, 1.0),
        ("max_perplexity", max_perplexity, -1.0, math.inf),
        ("gate_tokens", gate_tokens, 16, 10_000_000),
        ("minutes", minutes, 0.0, 100_000.0),
        ("price", price, 0.0, 1e6),
    ):
        if not least <= value <= most:
            raise RequestError(f"{name} must be {least:g} to {most:g}, not {value:g}.", parameter=name)
    for name, path in (("config", config), ("html", html), ("state", state), ("json", json)):
        check_output_folder(path, name)
    options = TuneOptions(
        trace=traffic,
        workload=workload,
        requests=requests,
        users=users,
        scale=scale,
        objectives=parse_objectives(slo),
        prompts=prompts,
        gate=GateRules(
            most_kl=max_kl, least_agreement=min_agreement, most_perplexity=max_perplexity, tokens=gate_tokens
        ),
        origin=origin,
        draft="draft" if draft is None and model == DEFAULT_MODEL else draft,
        smaller=smaller,
        levels=level or (),
        minutes=minutes,
        state=state,
        price=price,
        cache=cache,
        seed=seed,
    )
    judge: AnswersGate | None = None
    if gate == "answers":
        if prompts is None or prompts.suffix != ".jsonl":
            raise RequestError("--gate answers needs --prompts with a JSONL file.", parameter="gate")
        judge = answers_gate(prompts, thresholds)
    report = run_tuning(model, options, answers_gate=judge, report_progress=_progress, advise=_advise, on_result=_say)
    _progress("")
    if config is not None:
        _write(config, tuned_toml(report, model))
    if html is not None:
        _write(html, tune_html(report))
    if json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
        if str(json) == "-":
            print(encoded, end="")
            return
        _write(json, encoded)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    _show(report, console, explain=explain)
    for path in (config, html):
        if path is not None:
            console.print(f"Wrote {path}.")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _advise(text: str) -> None:
    _progress("")
    print(text, file=sys.stderr)


def _say(result: LevelResult) -> None:
    end = "" if sys.stderr.isatty() else "\n"
    print(f"{'' if end else chr(13) + chr(27) + '[K'}{result.level}: {result.outcome}", end=end, file=sys.stderr)


def _write(path: Path, text: str) -> None:
    with new_file(path) as file:
        file.write(text.encode())


def _show(report: TuneReport, console: Console, *, explain: bool) -> None:
    profile = report.profile
    how = f"{report.users} users" if report.users else "at the trace's times"
    console.print(
        f"[bold]{report.model}[/bold] under {report.traffic}: {report.requests} requests in each measurement, {how}; "
        f"{profile.prompt:,.0f} tokens in, {profile.answer:,.0f} out"
    )
    console.print(f"{report.cpu}, {report.isa}; {report.measurements} measurements, {report.seconds:.0f} s\n")
    if report.before is not None:
        _show_bound("Before", report.before, console)
    table = Table(title="Levels", title_justify="left")
    for heading in ("level", "choice", "outcome"):
        table.add_column(heading)
    for heading in ("predicted", "measured"):
        table.add_column(heading, justify="right")
    if explain:
        table.add_column("reason")
    for result in report.results:
        cells = [result.level, result.choice, result.outcome]
        cells += ["" if result.predicted is None else f"{result.predicted:.2f} x", interval_text(result)]
        table.add_row(*cells, *([result.reason] if explain else []), style=None if result.outcome == "kept" else "dim")
    console.print(table)
    overall = report.overall
    untried = sum(result.reason == OUT_OF_TIME for result in report.results)
    if untried:
        console.print(f"Out of time: {untried} of {len(report.results)} levels were not tried. Raise --minutes.")
    if overall is None:
        console.print("Nothing that was tried helps: the first setting stays.")
        return
    console.print(f"Together: [bold]{overall.gain:.2f} times[/bold] ({overall.low:.2f} to {overall.high:.2f})")
    for name in ("tokens_per_s", "ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "memory", "usd_per_million"):
        if name in overall.before and name in overall.after:
            show = {"tokens_per_s": number, "memory": _megabytes, "usd_per_million": _usd}.get(name, _seconds)
            console.print(f"  {name}: {show(overall.before[name])} -> {show(overall.after[name])}")
    if report.after is not None:
        _show_bound("After", report.after, console)


def _show_bound(when: str, found: Bottleneck, console: Console) -> None:
    total = sum(found.seconds.values()) or 1.0
    parts = ", ".join(f"{name} {share(each / total)}" for name, each in found.seconds.items())
    console.print(f"{when}, bound by [bold]{found.bound}[/bold]: {found.advice}.")
    console.print(f"  a request's time: {parts}")
    console.print(
        f"  prefill {number(found.prefill_tokens_per_s)} tokens/s, {share(found.prefill_share)} of the floor's speed; "
        f"decode {number(found.decode_tokens_per_s)} tokens/s, {share(found.decode_share)}; "
        f"{found.batch} streams {number(found.decode_batch_tokens_per_s)} tokens/s\n"
    )


def _seconds(value: float) -> str:
    return milliseconds(value * 1e3)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def _usd(value: float) -> str:
    return f"{value:,.3f} USD"
