"""`headrace admin lengths`: how long answers are, what ends them, and whether the default lengths fit."""

from __future__ import annotations

from typing import Any, Final, Literal

from cyclopts import App

from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, request_json
from headrace.cli.admin.admin_output import print_list, print_one

_COLUMNS: Final = ("answers", "p50_tokens", "p95_tokens", "p99_tokens", "cut", "left", "unlimited", "unlimited_cut")


def add_commands(admin: App) -> None:
    admin.command(lengths)


def lengths(
    *, by: str = "surface", window: Literal["recent", "total"] = "total", to: AdminTarget = DEFAULT_TARGET
) -> None:
    """Print how long generated answers are, what ends them, and whether the default lengths fit.

    Columns: `cut` is the share that max_tokens, a deadline or a budget ended, `left` the share that readers did not
    wait for; `unlimited` counts requests without max_tokens.

    Parameters
    ----------
    by
        Dimensions to group by: model, surface, tenant, endpoint, length, route and profile, separated by commas.
    window
        recent: the last five minutes; total: since the server started.
    """
    found = request_json(to.url, "GET", "lengths", by=by, window=window)
    if to.json:
        print_one(found, as_json=True)
        return
    rows = [_row(each) for each in found["data"]]
    print_list({"data": rows}, (*found["by"], *_COLUMNS), as_json=False)
    for each in found["data"]:
        if each.get("advice"):
            print(each["advice"])


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        "cut": _percent(entry["cut_share"]),
        "left": _percent(entry["left_share"]),
        "unlimited": entry["without_max_tokens"],
        "unlimited_cut": _percent(entry["without_max_tokens_cut_share"]),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
