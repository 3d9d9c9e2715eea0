"""`headrace advise`: read a running server's admin API and say what to change, with the gain and the command."""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.advice import LEAST_REQUESTS, Observed
from headrace.bench.advice import advise as advise_on
from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, printable, request_json

_COLUMNS: Final = 100


def advise(*, target: AdminTarget = DEFAULT_TARGET) -> None:
    """Look at a running server's figures and say what to change.

    Usage: headrace advise --url http://localhost:8000

    It reads the live state and the latencies since the server started, changes nothing, and prints for each finding
    the change, the gain that the figures promise, and the command. It needs HEADRACE_ADMIN_KEY with the right to read,
    or unix:PATH of the server's admin.socket.
    """
    found = observe(target.url)
    advice = advise_on(found)
    if target.json:
        print(msgspec.json.encode(advice).decode())
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    requests = sum(row.get("requests", 0) for row in found.by_model)
    if requests < LEAST_REQUESTS:
        console.print(f"{requests} requests so far: too few to advise. Ask again after {LEAST_REQUESTS}.")
        return
    if not advice:
        console.print(f"{requests:,} requests, and nothing stands out.")
        return
    for each in advice:
        table = Table(show_header=False, title=each.subject, title_justify="left", box=None, padding=(0, 1))
        table.add_column(style="dim")
        table.add_column()
        for name in ("finding", "change", "gain", "command"):
            table.add_row(name, Text(printable(getattr(each, name))))
        console.print(table)
        console.print()


def observe(url: str) -> Observed:
    def rows(by: str) -> list[dict[str, Any]]:
        return request_json(url, "GET", "latency", by=by, window="total")["data"]

    return Observed(
        live=request_json(url, "GET", "live"),
        by_model=rows("model"),
        by_surface=rows("surface"),
        by_tenant=rows("tenant"),
        by_length=rows("length"),
    )
