"""`headrace canary`: starts, shows, promotes and rolls back canaries of a running server."""

from __future__ import annotations

from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.admin.admin import DEFAULT_TARGET, AdminTarget
from headrace.cli.admin.admin_client import printable, request_json
from headrace.cli.admin.admin_output import print_json

_WIDTH = 100

canary = App(
    name="canary",
    help="Give a candidate a share of a variant's requests, compare both, and promote it or roll it back.",
    version_flags=[],
)


@canary.command
def start(
    candidate: str,
    /,
    *,
    control: str | None = None,
    stages: str | None = None,
    unit: str | None = None,
    auto: bool | None = None,
    reason: str | None = None,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Start a canary.

    Parameters
    ----------
    candidate
        Variant that takes a share of the requests, such as mini@int8.
    control
        Variant whose requests it takes. Default: the candidate's model.
    stages
        Percentages of the requests, such as 5,25,50. Default: canary.stages.
    unit
        What stays with its variant: conversation or tenant. Default: canary.unit.
    auto
        Advance through the stages without an administrator. Default: canary.promote.
    reason
        Reason, written to the audit log.
    """
    body: dict[str, Any] = {"candidate": candidate, "control": control, "unit": unit, "reason": reason}
    if stages is not None:
        body["stages"] = [_number(each) for each in stages.split(",")]
    if auto is not None:
        body["promote"] = "auto" if auto else "manual"
    found = request_json(to.url, "POST", "canary", {name: each for name, each in body.items() if each is not None})
    _print([found], found, as_json=to.json)


@canary.command
def status(*, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Show canaries: both arms side by side, and the evidence of each measure."""
    found = request_json(to.url, "GET", "canary")
    _print(found["data"], found, as_json=to.json)


@canary.command
def promote(control: str | None = None, /, *, reason: str | None = None, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Send all of the control's requests to the candidate.

    Parameters
    ----------
    control
        Whose canary is meant. Default: the only one that runs.
    reason
        Reason, written to the audit log.
    """
    _end("promote", control, reason, to)


@canary.command
def rollback(control: str | None = None, /, *, reason: str | None = None, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Send all requests to the control again, also after a promotion.

    Parameters
    ----------
    control
        Whose canary is meant. Default: the only one that runs.
    reason
        Reason, written to the audit log.
    """
    _end("rollback", control, reason, to)


def _end(how: str, control: str | None, reason: str | None, to: AdminTarget) -> None:
    given = {"control": control, "reason": reason}
    body = {name: each for name, each in given.items() if each is not None}
    found = request_json(to.url, "POST", f"canary/{how}", body)
    _print([found], found, as_json=to.json)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # the server says what is wrong with it


def _print(canaries: list[dict[str, Any]], whole: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(whole)
        return
    console = Console(highlight=False, width=None if Console().is_terminal else _WIDTH)
    if not canaries:
        console.print("There is no canary. Start one with: headrace canary start CANDIDATE")
    for each in canaries:
        stage = f", stage {each['stage']} of {len(each['stages'])}" if each["phase"] == "running" else ""
        line = f"{each['candidate']} for {each['control']}: {each['phase']}, {each['percent']:g} %{stage}"
        console.print(Text(printable(line)))
        if each["reason"]:
            console.print(Text(printable(f"  {each['reason']}")))
        if each["evidence"] is not None:
            console.print(_arms(each["evidence"]))


def _arms(evidence: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("measure", "control", "candidate", "verdict", "against", "for"):
        table.add_column(title, justify="left" if title in ("measure", "verdict") else "right")
    verdicts = {each["measure"]: each for each in evidence["measures"]}
    arms = evidence["control"], evidence["candidate"]
    rows: list[tuple[str, str, list[str]]] = [
        ("requests", "", [str(arm["requests"]) for arm in arms]),
        ("failures", "failures", [_share(arm["failures"]) for arm in arms]),
        ("failed checks", "checks", [_share(arm["failed_checks"]) for arm in arms]),
        ("quality", "quality", [_plain(arm["quality"]) for arm in arms]),
        ("feedback", "feedback", [_plain(arm["feedback"]) for arm in arms]),
    ]
    rows += [(f"{name} p95", name, [_p95(arm["latency"].get(name)) for arm in arms]) for name in ("ttft", "itl", "e2e")]
    rows.append(("micros per request", "cost", [_plain(arm["micros_per_request"]) for arm in arms]))
    for title, measure, (control, candidate) in rows:
        verdict = verdicts.get(measure)
        cells = (
            ("", "", "")
            if verdict is None
            else (verdict["verdict"], f"{verdict['breach_evidence']:g}", f"{verdict['proof_evidence']:g}")
        )
        table.add_row(*(Text(printable(each)) for each in (title, control, candidate, *cells)))
    table.caption = f"A verdict needs evidence of {evidence['needed_evidence']:g}."
    table.caption_justify = "left"
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _p95(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{times['p95_ms']:.1f} ms"
