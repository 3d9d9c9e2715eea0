"""`headrace admin cache-trial`: how often the semantic cache would have been wrong, and the threshold to set."""

from __future__ import annotations

from cyclopts import App

from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, request_json
from headrace.cli.admin.admin_output import print_list, print_one


def add_commands(admin: App) -> None:
    admin.command(cache_trial)


def cache_trial(*, days: int = 7, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Print how often the semantic cache's answers would have been wrong at each threshold, and which one to set.

    Parameters
    ----------
    days
        Days up to now that count, 1 to 31.
    """
    found = request_json(to.url, "GET", "cache/trial", days=days)
    if to.json:
        print_one(found, as_json=True)
        return
    from headrace.lab.online.semantic_trial import shown_thresholds

    columns = ("threshold", "share", "served", "wrong", "wrong_share", "wrong_most")
    print_list({"data": shown_thresholds(found)}, columns, as_json=False)
    print(found["advice"])
