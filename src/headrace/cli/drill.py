"""`headrace drill`: run a playbook's drill and print what happened beside what the playbook promises.

The drills are in headrace.bench.drills; docs/how-to/playbooks.md says what to do in a real incident.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.bench.drills import hostile_client, overload, postgres_down, redis_frozen, upstream_down, worker_crash
from headrace.bench.drills.promises import Promise

_TERMINATED: Final = 143  # 128 + SIGTERM, as shells count

DrillName = Literal["overload", "upstream-down", "redis-frozen", "postgres-down", "worker-crash", "hostile-client"]

FAULTS: Final[dict[DrillName, str]] = {
    "overload": "four times the load that the server can take",
    "upstream-down": "the server behind a variant goes away in the middle of answers, and comes back",
    "redis-frozen": "the Redis that limits are counted in stops answering; needs redis-server or valkey-server",
    "postgres-down": "the Postgres of two gateways' budgets is slow, frozen and flapping; needs postgres",
    "worker-crash": "the engine's process is killed",
    "hostile-client": "one key sends expensive requests while another one chats",
}
DRILLS: dict[DrillName, Callable[[], Coroutine[Any, Any, list[Promise]]]] = {
    "overload": overload.run,
    "upstream-down": upstream_down.run,
    "redis-frozen": redis_frozen.run,
    "postgres-down": postgres_down.run,
    "worker-crash": worker_crash.run,
    "hostile-client": hostile_client.run,
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
        redis-frozen: the Redis that counts limits stops answering. postgres-down: the Postgres of two gateways' budgets
        is slow, frozen and flapping. worker-crash: the engine's worker process dies.
        hostile-client: one key sends expensive requests while another one chats.
    json
        Print the promises as JSON.
    """
    try:
        promises = asyncio.run(_run(name))
    except asyncio.CancelledError:
        sys.exit(_TERMINATED)
    if json:
        shown = [{"promised": each.promised, "found": each.found, "kept": each.kept} for each in promises]
        print(msgspec.json.encode({"drill": name, "promises": shown}).decode())
    else:
        _print(name, promises)
    if not all(promise.kept for promise in promises):
        sys.exit(1)


async def _run(name: DrillName) -> list[Promise]:
    drilling = asyncio.ensure_future(DRILLS[name]())
    # SIGTERM reaches only this process, which must stop the servers that it started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drilling.cancel)
    return await drilling


def _print(name: str, promises: Sequence[Promise]) -> None:
    table = Table(title=f"drill: {name}", title_justify="left", show_lines=True)
    table.add_column("the playbook promises", ratio=5)
    table.add_column("what happened", ratio=5)
    table.add_column("kept")
    for promise in promises:
        table.add_row(promise.promised, promise.found, "[green]yes[/green]" if promise.kept else "[red]no[/red]")
    Console().print(table)
