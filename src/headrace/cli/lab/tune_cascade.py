"""`headrace tune cascade`: fits a cascade, the complexity classifier and the semantic cache's bound to your traffic."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from headrace.cli.admin.admin_client import path_segment, request
from headrace.config.toml_text import toml_value
from headrace.errors import RequestError
from headrace.gateway.routing.calibration import write_labelled
from headrace.lab.answering.model_server import AnswererSpec, open_servers, parse_spec
from headrace.lab.cases.case import Case
from headrace.lab.cases.prompt_file import read_cases, read_recorded_cases
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.tuning.cascade_fit import CascadeFit, fit_cascade
from headrace.lab.tuning.judged_pair import JudgedPair, parse_pairs, read_pairs, write_pairs
from headrace.lab.tuning.pair_answering import answer_pairs
from headrace.lab.tuning.semantic_bound import MOST_QUESTIONS, SemanticBound, fit_semantic_bound

_COLUMNS: Final = 110


def cascade(
    *,
    small: str | None = None,
    large: str | None = None,
    prompts: Path | None = None,
    recorded: Path | None = None,
    pairs: Path | None = None,
    shadow: str | None = None,
    url: Annotated[str, Parameter(env_var=("HEADRACE_ADMIN_URL", "HEADRACE_URL"))] = "http://localhost:8000",
    out: Path = Path("cascade"),
    quality: float = 0.98,
    sure: float = 1.0,
    price_ratio: float | None = None,
    encoder: str | None = None,
    delta: float = 0.02,
    agree: float = 0.8,
    concurrency: Annotated[int, Parameter(name=["--concurrency", "-c"])] = 4,
    key_env: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Fit a cascade of two variants, the complexity classifier and the semantic cache's bound to your own traffic.

    Usage: headrace tune cascade --small draft --large mini --recorded acme.jsonl --out cascade

    Both variants answer your requests. Half of them fit the threshold and the classifier, and the printed numbers are
    of the other half. The folder --out gets pairs.jsonl, calibration.jsonl, complexity.json and cascade.toml.

    Parameters
    ----------
    small
        Small variant: a model (a folder, a GGUF file or a name, with a precision as in mini@int8), or URL#MODEL.
    large
        Large variant.
    prompts
        JSONL file of prompts, as for headrace gate. A good answer in `completion` is the reference; else the large
        variant's answer is.
    recorded
        A recording, as `headrace recordings export` writes it.
    pairs
        Judged pairs of an earlier run, in place of answers by --small and --large.
    shadow
        Shadow of a running server that double-checks a small variant and keeps `pairs`, in place of all these. The key
        of an administrator is read from HEADRACE_ADMIN_KEY.
    url
        With --shadow: URL of the server, or unix:PATH for its admin.socket. Default: $HEADRACE_ADMIN_URL or
        $HEADRACE_URL, else http://localhost:8000.
    out
        Folder for the results.
    quality
        Share of the large variant's quality to keep.
    sure
        Standard errors of margin, because a fit on few requests is too optimistic.
    price_ratio
        Price of the large variant's token by the small one's. Default: costs are the seconds of the answers.
    encoder
        Model that embeds questions, to fit the semantic cache's threshold, too.
    delta
        Highest share of wrong answers of the semantic cache.
    agree
        Similarity of two answers from which they count as the same, 0 to 1.
    concurrency
        Requests at once.
    key_env
        Environment variable with the servers' API key.
    json
        Print the result as JSON.
    """
    for name, value in (("quality", quality), ("agree", agree), ("delta", delta)):
        if not 0.0 < value <= 1.0:
            raise RequestError(f"{name} must be above 0 and at most 1, not {value:g}.", parameter=name)
    _check_sources({"prompts": prompts, "recorded": recorded, "pairs": pairs, "shadow": shadow})
    if shadow is not None:
        judged = _pairs_of(shadow, url)
    elif pairs is not None:
        judged = read_pairs(pairs)
    else:
        key = os.environ.get(key_env, "") if key_env is not None else ""
        judged = asyncio.run(_answer(_specs(small, large), _cases(prompts, recorded), key, concurrency, price_ratio))
    fit = fit_cascade(judged, keep=quality, sure=sure)
    bound = None if encoder is None else _semantic_bound(judged, encoder, delta, agree)
    names = small or "small", large or "large"
    _write(out, judged, fit, bound, names)
    if json:
        print(msgspec.json.encode({"cascade": fit, "pays": fit.pays, "semantic": bound}).decode())
    else:
        _show(fit, bound, out)


def _check_sources(sources: Mapping[str, object]) -> None:
    """RequestError for more than one source of pairs."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"Pass either --{given[0]} or --{given[1]}.", parameter=given[0])


def _pairs_of(shadow: str, url: str) -> list[JudgedPair]:
    """Return what a server's shadow has judged. Nothing is written here: an earlier pairs.jsonl outlives a failure."""
    judged = parse_pairs(request(url, "GET", f"shadows/{path_segment(shadow)}/pairs"))
    if not judged:
        raise RequestError(
            f"Shadow '{shadow}' has kept no judged pairs yet. It keeps those of tenants with record = true, whose "
            "requests its variants (`of`) have answered.",
            parameter="shadow",
        )
    return judged


def _specs(small: str | None, large: str | None) -> list[AnswererSpec]:
    if small is None or large is None:
        raise RequestError(
            "Name both variants with --small and --large, or pass --pairs or --shadow.", parameter="small"
        )
    return [parse_spec(small, parameter="small"), parse_spec(large, parameter="large")]


def _cases(prompts: Path | None, recorded: Path | None) -> list[Case]:
    if (prompts is None) == (recorded is None):
        raise RequestError("Pass either --prompts or --recorded.", parameter="prompts")
    return read_cases(prompts) if prompts is not None else read_recorded_cases(recorded or Path())


async def _answer(
    specs: list[AnswererSpec], cases: list[Case], key: str, concurrency: int, price_ratio: float | None
) -> list[JudgedPair]:
    async with open_servers(specs, key=key) as (small, large):
        return await answer_pairs(
            cases, small, large, concurrency=concurrency, price_ratio=price_ratio, progress=_progress
        )


def _semantic_bound(pairs: list[JudgedPair], encoder: str, delta: float, agree: float) -> SemanticBound:
    from headrace.llm import LLM

    asked = [pair for pair in pairs if pair.question.strip()][:MOST_QUESTIONS]
    questions = [pair.question for pair in asked]
    with LLM(encoder) as model:
        vectors = model.embed(questions, truncate=True)
    answers = [pair.answer for pair in asked]
    return fit_semantic_bound(
        questions, vectors, answers, lambda one, other: lexical_overlap(one, other) >= agree, delta=delta
    )


def _write(
    out: Path, pairs: list[JudgedPair], fit: CascadeFit, bound: SemanticBound | None, names: tuple[str, str]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_pairs(out / "pairs.jsonl", pairs)
    write_labelled(out / "calibration.jsonl", [pair.labelled() for pair in pairs])
    classifier = msgspec.json.format(msgspec.json.encode(fit.classifier), indent=2)
    (out / "complexity.json").write_bytes(classifier + b"\n")
    (out / "cascade.toml").write_text(cascade_toml(fit, bound, out, names), encoding="utf-8")


def cascade_toml(fit: CascadeFit, bound: SemanticBound | None, out: Path, names: tuple[str, str]) -> str:
    """Return the part of a configuration that uses the fit. What does not pay is commented out."""
    mark = "" if fit.pays else "# The cascade does not pay on your requests: it is not cheaper at this quality.\n"
    comment = "" if fit.pays else "#"
    lines = [
        f"[routing]\ncomplexity = {toml_value(str(out / 'complexity.json'))}\n",
        f"{mark}{comment}[routing.cascades.tuned]",
        f"{comment}small = {toml_value(names[0])}",
        f"{comment}large = {toml_value(names[1])}",
        f"{comment}measure = {toml_value(fit.measure)}",
        f"{comment}threshold = {min(1.0, fit.threshold):g}\n",
    ]
    if fit.most_complexity is not None:
        lines.append(
            f"# A rule may send requests to {names[0]} alone: when = {{ most_complexity = {fit.most_complexity:g} }}\n"
        )
    if bound is not None and bound.threshold is not None:
        lines.append(f"[cache.semantic]\nthreshold = {bound.threshold:g}\n")
    return "\n".join(lines)


def _show(fit: CascadeFit, bound: SemanticBound | None, out: Path) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    table = Table(box=None, pad_edge=False, title=f"{fit.pairs} pairs; numbers of the half that was not fitted")
    for title in ("", "to the small one", "quality", "cost"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row("large alone", "0 %", f"{fit.large_quality:.3f}", "1.00")
    named = (
        (f"cascade, {fit.measure} ≥ {fit.threshold:.3f}", fit.held_out),
        (f"rule, complexity ≤ {fit.most_complexity or 0:.3f}", fit.by_rule),
        ("small alone", fit.points[-1]),
    )
    for name, point in named:
        table.add_row(name, f"{point.share * 100:.0f} %", f"{point.quality:.3f}", f"{point.cost:.2f}")
    console.print(table)
    console.print(f"The classifier ranks {fit.ranked * 100:.0f} of 100 pairs of a complex and a simple request right.")
    if not fit.pays:
        console.print("The cascade does not pay: it is not cheaper than the large variant at this quality.")
    if bound is not None and bound.threshold is not None:
        console.print(
            f"Semantic cache: threshold {bound.threshold:.3f} serves {bound.share * 100:.0f} % of {bound.questions} "
            f"questions; {bound.wrong * 100:.1f} % wrong, at most {bound.wrong_most * 100:.1f} %."
        )
    elif bound is not None:
        console.print("Semantic cache: no threshold keeps the bound on these questions.")
    console.print(f"Wrote {out / 'cascade.toml'}, complexity.json, calibration.jsonl and pairs.jsonl.")


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done} of {total}", end="" if done < total else "\n", file=sys.stderr, flush=True)
