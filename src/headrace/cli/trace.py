"""`headrace trace`: prints where the time of one request of a running server went."""

from __future__ import annotations

import json as json_text
import os
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.admin.admin_client import path_segment, printable, request_json

_BAR: Final = 40  # characters of the whole request


def trace(
    id: str,
    /,
    *,
    url: Annotated[str, Parameter(env_var="HEADRACE_URL")] = "http://localhost:8000",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Print the waterfall of a recent request of a running server.

    Usage: headrace trace chatcmpl-Bq3…

    Your tenant's requests are found with the key in OPENAI_API_KEY, those of all tenants with the key of an
    administrator in HEADRACE_ADMIN_KEY, or by the server's admin.socket.

    Parameters
    ----------
    id
        The id of a response, or its x-request-id header.
    url
        URL of the server, or unix:PATH for its admin.socket. Default: $HEADRACE_URL, else http://localhost:8000.
    json
        Print the response as JSON.
    """
    path = f"requests/{path_segment(id)}"
    if url.startswith("unix:") or os.environ.get("HEADRACE_ADMIN_KEY"):
        found = request_json(url, "GET", path)
    else:
        found = request_json(url, "GET", path, root="/v1/", key_variable="OPENAI_API_KEY")
    if json:
        print(json_text.dumps(found))
    else:
        print_waterfall(found)


def print_waterfall(found: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if Console().is_terminal else 110)
    named = (("request", "request_id"), ("id", "id"), ("trace", "trace_id"), ("tenant", "tenant"))
    for title, name in named:
        if found.get(name):
            console.print(Text(f"{title:<8} {printable(str(found[name]))}"))
    error = f" ({found['error']})" if found.get("error") else ""
    total = float(found["duration_ms"])
    console.print(Text(f"{'answer':<8} {found['endpoint']} {found['status']}{error}, {total:.2f} ms\n"))
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("start ms", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("")
    table.add_column("")
    for span in found["spans"]:
        table.add_row(*_row(span, total, ""))
        for part in span.get("parts", ()):
            table.add_row(*_row(part, total, "  "))
    console.print(table)


def _row(span: dict[str, Any], total: float, indent: str) -> tuple[Text, ...]:
    start, duration = float(span["start_ms"]), float(span["duration_ms"])
    before = min(_BAR - 1, round(start / total * _BAR)) if total else 0
    length = max(1, round(duration / total * _BAR)) if total else 1
    bar = " " * before + ("─" if indent else "█") * min(length, _BAR - before)
    known = " ".join(f"{name}={value}" for name, value in span.get("attributes", {}).items())
    cells = (indent + span["name"], f"{start:.3f}", f"{duration:.3f}", f"{bar:<{_BAR}}", known)
    return tuple(Text(printable(each)) for each in cells)
