"""`headrace admin adapters`, `load-adapter` and `unload-adapter`: LoRA adapters of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App

from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, path_segment, request_json
from headrace.cli.admin.admin_output import print_list, print_one


def add_commands(admin: App) -> None:
    for command in (adapters, load_adapter, unload_adapter):
        admin.command(command)


def adapters(model: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """List a model's LoRA adapters.

    Parameters
    ----------
    model
        Name of the model.
    """
    answer = request_json(to.url, "GET", _path(model))
    if not to.json:
        for each in answer["data"]:
            each["tenants"] = each["tenants"] or ["all"]
    print_list(answer, ("id", "source", "tenants", "digest", "path"), as_json=to.json)


def load_adapter(
    model: str, path: Path, /, *, name: str | None = None, tenants: str | None = None, to: AdminTarget = DEFAULT_TARGET
) -> None:
    """Serve a LoRA adapter as MODEL:NAME, beside the requests that run.

    Parameters
    ----------
    model
        Name of the model.
    path
        Folder of the adapter in PEFT's layout.
    name
        Name of the adapter. Default: that of the folder.
    tenants
        Tenants that may use it, separated by commas. Default: all.
    """
    folder = path.expanduser().absolute()
    body: dict[str, Any] = {"name": name or folder.name, "path": str(folder)}
    if tenants is not None:
        body["tenants"] = [each.strip() for each in tenants.split(",") if each.strip()]
    print_one(request_json(to.url, "POST", _path(model), body), as_json=to.json)


def unload_adapter(model: str, name: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Stop serving a LoRA adapter. Requests that run with it go on.

    Parameters
    ----------
    model
        Name of the model.
    name
        Name of the adapter.
    """
    print_one(request_json(to.url, "DELETE", f"{_path(model)}/{path_segment(name)}"), as_json=to.json)


def _path(model: str) -> str:
    return f"models/{path_segment(model)}/adapters"
