"""`headrace admin workers` and `drain-worker`: the engines' workers, on the server's machine and on others."""

from __future__ import annotations

from cyclopts import App

from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, request_json
from headrace.cli.admin.admin_output import print_list, print_one


def add_commands(admin: App) -> None:
    for command in (workers, drain_worker):
        admin.command(command)


def workers(*, to: AdminTarget = DEFAULT_TARGET) -> None:
    """List the workers of each model, with their state and the requests that they have."""
    answer = request_json(to.url, "GET", "workers")
    print_list(answer, ("model", "address", "state", "preemptible", "requests", "reason"), as_json=to.json)


def drain_worker(address: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Ask a worker to finish its requests, take no new ones, and exit, because its host is going away.

    A worker of the server's own machine is started again.

    Parameters
    ----------
    address
        Address of the worker, as `headrace admin workers` lists it.
    """
    print_one(request_json(to.url, "POST", "workers/drain", {"address": address}), as_json=to.json)
