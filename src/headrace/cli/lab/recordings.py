"""`headrace recordings`: lists, exports and deletes what a server recorded. Works on the files, also while it runs."""

from __future__ import annotations

import json as json_format
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.errors import RequestError
from headrace.lab.recording.recorded_request import write_trace
from headrace.lab.recording.recorder import store_of
from headrace.lab.recording.recording_store import RecordingStore
from headrace.models.formats.atomic_file import new_file
from headrace.server.config_checks import load_config

recordings = App(
    name="recordings", help="List, export and delete what a server recorded of tenants that opted in.", version_flags=[]
)

ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"])]
NO_TENANT = "-"


def _store(config: Path | None) -> RecordingStore:
    return store_of(load_config(config, environ=os.environ), os.environ)


def _tenant(name: str) -> str:
    return "" if name == NO_TENANT else name


@recordings.command(name="list")
def list_recordings(*, config: ConfigFile = None, json: bool = False) -> None:
    """List the tenants with recordings, their size and their time span.

    Usage: headrace recordings list

    Parameters
    ----------
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    json
        Print the list as JSON.
    """
    found = _store(config).tenants()
    if json:
        print(json_format.dumps([msgspec.to_builtins(each) for each in found], indent=2))
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("tenant", "MB", "files", "from", "to", "encrypted"):
        table.add_column(heading, justify="right" if heading in ("MB", "files") else "left")
    for each in found:
        table.add_row(
            escape(each.tenant or NO_TENANT),
            f"{each.bytes / 1e6:,.1f}",
            str(each.segments),
            _time(each.first),
            _time(each.last),
            "yes" if each.encrypted else "no",
        )
    console = Console(highlight=False)
    console.print(table if found else "No recordings. Set record = true for a tenant to record its requests.")


@recordings.command
def export(
    tenant: str,
    /,
    *,
    config: ConfigFile = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"], allow_leading_hyphen=True)] = Path("-"),
    hours: float | None = None,
) -> None:
    """Write a tenant's recordings as JSON lines, decrypted, in the order of arrival.

    Usage: headrace recordings export acme --output acme.jsonl

    The file is a trace: `headrace bench --trace`, `headrace replay` and `headrace gate --recorded` read it.

    Parameters
    ----------
    tenant
        Tenant; `-` stands for requests without one.
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    output
        File to write; `-` prints the lines.
    hours
        Only requests of the last so many hours. Default: all.
    """
    store = _store(config)
    since = 0.0 if hours is None else datetime.now(UTC).timestamp() - hours * 3600.0
    records = list(store.read(_tenant(tenant), since=since))
    if not records:
        raise RequestError(
            f"There are no recordings of '{tenant}'. Run 'headrace recordings list'.", parameter="tenant"
        )
    if str(output) == "-":
        for line in write_trace(records):
            sys.stdout.write(line.decode())
        return
    with new_file(output) as file:
        for line in write_trace(records):
            file.write(line)
    output.chmod(0o600)
    print(f"{len(records):,} requests written to {output}.", file=sys.stderr)


@recordings.command
def delete(tenant: str, /, *, config: ConfigFile = None) -> None:
    """Delete everything that was recorded of a tenant.

    Usage: headrace recordings delete acme

    Deleting a tenant through the admin API deletes its recordings, too.

    Parameters
    ----------
    tenant
        Tenant; `-` stands for requests without one.
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    """
    if not _store(config).delete(_tenant(tenant)):
        raise RequestError(
            f"There are no recordings of '{tenant}'. Run 'headrace recordings list'.", parameter="tenant"
        )
    print(f"Recordings of '{tenant}' deleted.", file=sys.stderr)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
