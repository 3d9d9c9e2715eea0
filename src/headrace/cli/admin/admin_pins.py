"""`headrace admin pins`, `create-pin`, `delete-pin` and `reload`: what the engines keep, and their replacement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, path_segment, request_json
from headrace.cli.admin.admin_output import print_list, print_one
from headrace.errors import RequestError


def add_commands(admin: App) -> None:
    for command in (pins, create_pin, delete_pin, reload):
        admin.command(command)


def pins(*, to: AdminTarget = DEFAULT_TARGET) -> None:
    """List pinned prompts with their state in each variant."""
    answer = request_json(to.url, "GET", "pins")
    if to.json:
        print_list(answer, (), as_json=True)
        return
    rows = [
        {**pin, "tenant": "*" if pin["public"] else pin["tenant"], **variant}
        for pin in answer["data"]
        for variant in pin["variants"]
    ]
    columns = ("id", "name", "variant", "tenant", "source", "status", "tokens", "reason")
    print_list({**answer, "data": rows}, columns, as_json=False)


def create_pin(
    name: str,
    /,
    *,
    model: str,
    system: str | None = None,
    text: str | None = None,
    file: Path | None = None,
    tenant: str | None = None,
    public: Annotated[bool, Parameter(negative=())] = False,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Compute a prompt's beginning and keep it in memory, so that requests that begin with it start faster.

    Parameters
    ----------
    name
        Name, shown in lists and logs.
    model
        Model, which includes its variants, or one variant.
    system
        System message of chats.
    text
        Beginning of a completion's prompt.
    file
        UTF-8 file with the system message.
    tenant
        Tenant whose requests find it.
    public
        Requests of all tenants find it.
    """
    if sum(each is not None for each in (system, text, file)) != 1:
        raise RequestError("Set exactly one of --system, --text and --file.")
    if file is not None:
        try:
            system = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"Cannot read {file}: {error}.") from None
    body: dict[str, Any] = {"name": name, "model": model, "system": system, "text": text, "tenant": tenant}
    body = {key: value for key, value in body.items() if value is not None}
    print_one(request_json(to.url, "POST", "pins", {**body, "public": public}), as_json=to.json)


def delete_pin(pin: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Stop keeping a pinned prompt.

    Parameters
    ----------
    pin
        Id of the pin.
    """
    print_one(request_json(to.url, "DELETE", f"pins/{path_segment(pin)}"), as_json=to.json)


def reload(model: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Replace a variant's engine by one that reads the model's files again. No request fails.

    Parameters
    ----------
    model
        Model or variant.
    """
    print_one(request_json(to.url, "POST", "reload", {"model": model}), as_json=to.json)
