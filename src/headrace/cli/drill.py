"""`headrace drill`: run a playbook's drill and print what happened beside what the playbook promises.

The drills are in headrace.bench.drills; docs/how-to/playbooks.md says what to do in a real incident.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.bench.drills import overload, redis_frozen, upstream_down, worker_crash
from headrace.bench.drills.promises import Promise

DrillName = Literal["overload", "upstream-down", "redis-frozen", "worker-crash"]

DRILLS: dict[str, Callable[[], Coroutine[Any, Any, list[Promise]]]] = {
    "overload": overload.run,
    "upstream-down": upstream_down.run,
    "redis-frozen": redis_frozen.run,
    "worker-crash": worker_crash.run,
}


def drill(name: DrillName, /, *, json: bool = False) -> None:
    """Start a server, cause a failure, and check that the playbook's promises hold.

    Usage: headrace drill worker-crash

    The server listens on 127.0.0.1 on a free port, serves the bundled model, and stops after the drill. The exit code
    is 1 if a promise is broken.

    Parameters
    ----------
    name
        overload: four times the load that the server can take. upstream-down: an upstream goes away and comes back.
        redis-frozen: the Redis that counts limits stops answering. worker-crash: the engine's worker process dies.
    json
        Print the promises as JSON.
    """
    promises = asyncio.run(DRILLS[name]())
    if json:
        shown = [{"promised": each.promised, "found": each.found, "kept": each.kept} for each in promises]
        print(msgspec.json.encode({"drill": name, "promises": shown}).decode())
    else:
        _print(name, promises)
    if not all(promise.kept for promise in promises):
        sys.exit(1)


def _print(name: str, promises: Sequence[Promise]) -> None:
    table = Table(title=f"drill: {name}", title_justify="left", show_lines=True)
    table.add_column("the playbook promises", ratio=5)
    table.add_column("what happened", ratio=5)
    table.add_column("kept")
    for promise in promises:
        table.add_row(promise.promised, promise.found, "[green]yes[/green]" if promise.kept else "[red]no[/red]")
    Console().print(table)
