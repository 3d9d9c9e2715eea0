"""`headrace techniques`: prints which techniques may change an answer, and which of them a configuration uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.lab.techniques import TECHNIQUES
from headrace.server.config_checks import read_declared

_COLUMNS = 110


def techniques(
    *, config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None, json: bool = False
) -> None:
    """Print every technique, whether it is lossless, and whether a configuration uses it.

    Usage: headrace techniques

    Set `safety.lossless_only = true` to turn the lossy ones off.

    Parameters
    ----------
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    json
        Print the list as JSON.
    """
    declared = read_declared(config, environ=os.environ)
    only = declared.safety.lossless_only
    rows = [(each, each.used(declared)) for each in TECHNIQUES]
    if json:
        found = [
            {
                "name": each.name,
                "area": each.area,
                "lossless": each.lossless,
                "switch": each.switch,
                "about": each.about,
                "keys": keys,
                "turned_off": bool(keys) and only,
            }
            for each, keys in rows
        ]
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("technique", "area", "answers", "switch", "in this configuration"):
        table.add_column(heading)
    for each, keys in rows:
        state = "" if not keys else "turned off" if only else ", ".join(keys)
        table.add_row(each.name, each.area, "same" if each.lossless else "may change", each.switch, state)
    Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS).print(table)
