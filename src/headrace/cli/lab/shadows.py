"""`headrace shadows`: prints what the shadows of a running server have found."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.admin.admin_client import path_segment, printable, request_json

_WIDTH = 110


def shadows(
    name: str | None = None,
    /,
    *,
    url: Annotated[str, Parameter(env_var=("HEADRACE_ADMIN_URL", "HEADRACE_URL"))] = "http://localhost:8000",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Print how the answers of shadows differ from the served ones.

    Usage: headrace shadows
           headrace shadows candidate

    The key of an administrator is read from HEADRACE_ADMIN_KEY. A server without keys needs none on its own machine.

    Parameters
    ----------
    name
        A shadow of [routing.shadows]; its routes are listed, too. Default: all shadows.
    url
        URL of the server, or unix:PATH for its admin.socket. Default: $HEADRACE_ADMIN_URL or $HEADRACE_URL, else
        http://localhost:8000.
    json
        Print the response as JSON.
    """
    if name is None:
        found = request_json(url, "GET", "shadows")
        shown = found["data"]
    else:
        found = request_json(url, "GET", f"shadows/{path_segment(name)}")
        shown = [found]
    if json:
        print(json_text.dumps(found))
        return
    console = Console(highlight=False, width=None if Console().is_terminal else _WIDTH)
    if not shown:
        console.print(Text("No shadows are configured. Add [routing.shadows.NAME] to headrace.toml."))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("shadow", "variant", "compared", "exact", "similarity", "length", "p95 served", "p95 shadow", "lost"):
        table.add_column(title, justify="left" if title in ("shadow", "variant") else "right")
    for each in shown:
        outcomes = each["outcomes"]
        lost = sum(outcomes.get(outcome, 0) for outcome in ("failed", "timeout", "queue_full", "budget"))
        table.add_row(*_cells(each["name"], each["variant"], each["differences"], str(lost)))
        for route in each["routes"] if name is not None else ():
            table.add_row(*_cells(f"  {route['variant']}", route["route"], route, ""))
    console.print(table)


def _cells(name: str, variant: str, found: dict[str, Any], lost: str) -> tuple[Text, ...]:
    cells = (
        name,
        variant,
        str(found["compared"]),
        _percent(found["exact_share"]),
        _similarity(found),
        "-" if found["length_ratio"] is None else f"{found['length_ratio']:.2f}",
        _p95(found["served"]["e2e"]),
        _p95(found["other"]["e2e"]),
        lost,
    )
    return tuple(Text(printable(cell)) for cell in cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def _similarity(found: dict[str, Any]) -> str:
    if found["similarity"] is None:
        return "-"
    error = found["similarity_error"]
    return f"{found['similarity']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _p95(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{times['p95_ms']:.0f} ms"
