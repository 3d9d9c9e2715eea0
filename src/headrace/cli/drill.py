"""`headrace drill`: runs a playbook on a server of its own, and prints what happened beside what was promised.

Owns the command and its table. The drills are headrace.bench.drills's; what to do when it is no drill is in
docs/how-to/playbooks.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.bench.drills import overload, redis_frozen, upstream_down, worker_crash
from headrace.bench.drills.promises import Promise

Name = Literal["overload", "upstream-down", "redis-frozen", "worker-crash"]

DRILLS: dict[str, Callable[[], Awaitable[list[Promise]]]] = {
    "overload": overload.run,
    "upstream-down": upstream_down.run,
    "redis-frozen": redis_frozen.run,
    "worker-crash": worker_crash.run,
}


def drill(name: Name, /, *, json: bool = False) -> None:
    """Hold a drill: a server of its own, a fault, and whether the playbook's promises hold.

    It listens on 127.0.0.1 on a free port, serves the bundled model, and ends with the drill. A promise that was not
    kept is exit code 1.

    Parameters
    ----------
    name
        overload: four times the load that the server can take. upstream-down: the server behind a variant goes away.
        redis-frozen: the Redis that limits are counted in stops answering. worker-crash: the engine's process dies.
    json
        Print the promises as JSON.
    """
    promises = asyncio.run(_held(DRILLS[name]))
    if json:
        print(msgspec.json.encode({"drill": name, "promises": promises}).decode())
    else:
        _print(name, promises)
    if not all(promise.kept for promise in promises):
        sys.exit(1)


async def _held(run: Callable[[], Awaitable[list[Promise]]]) -> list[Promise]:
    return await run()


def _print(name: str, promises: Sequence[Promise]) -> None:
    table = Table(title=f"drill: {name}", title_justify="left", show_lines=True)
    table.add_column("the playbook promises", ratio=5)
    table.add_column("what happened", ratio=5)
    table.add_column("kept")
    for promise in promises:
        table.add_row(promise.promised, promise.found, "[green]yes[/green]" if promise.kept else "[red]no[/red]")
    Console().print(table)
