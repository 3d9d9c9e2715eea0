"""`headrace admin`: tenants, keys, fast mode, caches, usage and the audit log of servers that run.

Owns the commands and what they print. What can be done and by whom is the server's to say; asking it is admin_client's.

Exit codes are those of every command: 2 where the server refuses, or the audit log is not what it should be; 1 where
the server cannot be reached or has failed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from headrace.cli.admin_client import ask, asked, in_path, printable
from headrace.errors import HeadraceError, RequestError

_PAGE: Final = 1000  # rows of the audit log at a time
_PART: Final = 1024 * 1024  # characters of a file at a time
_SHORTER: Final = 51  # characters: one fewer than a secret has
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@Parameter(name="*")
@dataclass(frozen=True)
class To:
    """Where the server is, and how its answer is printed.

    Parameters
    ----------
    url
        The server's URL, or unix:PATH for the socket that its configuration names as admin.socket.
    json
        Print the server's answer as JSON.
    """

    url: str = "http://localhost:8000"
    json: Annotated[bool, Parameter(negative=())] = False


HERE: Final = To()
Values = Annotated[list[str] | None, Parameter(name="--set", negative=())]

admin = App(
    name="admin",
    help="Look after tenants, keys, fast mode, caches, usage and the audit log of a server that runs.",
    help_flags=["--help", "-h"],
    version_flags=[],
)


# What is printed


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(_cell, cast("list[Any]", value))) or "none"
        case dict():
            said = {name: each for name, each in cast("dict[str, Any]", value).items() if each is not None}
            return printable(json.dumps(said, ensure_ascii=False)) if said else "-"
        case float():
            return f"{value:g}"
        case _:
            return printable(str(value))


def _time(seconds: Any) -> str:
    if not isinstance(seconds, int):
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _shown(name: str, value: Any) -> str:
    if name == "secrets":
        return ", ".join(
            f"…{_cell(each['last_four'])} of {_time(each['created_at'])}"
            + ("" if each["expires_at"] is None else f" until {_time(each['expires_at'])}")
            for each in value
        )
    return _time(value) if name.endswith("_at") or name in ("at", "since", "until") else _cell(value)


def _print_table(table: Table) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as written:
        console.print(table)
    for line in written.get().splitlines():
        print(line.rstrip())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf")))


def _print_list(to: To, answer: Mapping[str, Any], columns: Sequence[str]) -> None:
    if to.json:
        _print_json(answer)
        return
    table = Table(*(column.removesuffix("_at").replace("_", " ") for column in columns), box=None, pad_edge=False)
    for item in answer["data"]:
        table.add_row(*(_shown(column, item.get(column)).replace("[", r"\[") for column in columns))
    _print_table(table)
    if answer.get("has_more"):
        print("There is more: --limit, or --after with the last of these.", file=sys.stderr)


def _print_one(to: To, answer: Mapping[str, Any]) -> None:
    if to.json:
        _print_json(answer)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in answer.items():
        if name not in ("object", "secret"):
            table.add_row(name.replace("_", " "), _shown(name, value).replace("[", r"\["))
    _print_table(table)
    if "secret" in answer:
        print("\nThe secret, which is shown this once:", file=sys.stderr)
        print(answer["secret"])


# What is given


def _given(values: Sequence[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for each in values or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise RequestError(f"expected NAME=VALUE, found '{each}'", parameter="set")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [each.strip() for each in text.split(",") if each.strip()]


def _seconds(text: str) -> float:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise RequestError(f"'{text}' is no time span; write 90s, 15m, 1h or 7d")
    return float(found[1]) * _UNITS[found[2]]


# Commands


@admin.command
def epoch(*, to: To = HERE) -> None:
    """Say how new the shared state is, and how new what this server has applied of it."""
    _print_one(to, asked(to.url, "GET", "epoch"))


@admin.command
def tenants(*, after: str | None = None, limit: int = 100, to: To = HERE) -> None:
    """List the tenants.

    Parameters
    ----------
    after
        The last one of the list before.
    limit
        Most of them to list.
    """
    answer = asked(to.url, "GET", "tenants", after=after, limit=limit)
    _print_list(to, answer, ("name", "source", "weight", "models", "surfaces", "profiles", "fail", "suspended"))


@admin.command
def tenant(name: str, /, *, to: To = HERE) -> None:
    """Show a tenant with all its settings."""
    _print_one(to, asked(to.url, "GET", f"tenants/{in_path(name)}"))


@admin.command
def create_tenant(name: str, /, *, values: Values = None, to: To = HERE) -> None:
    """Make a tenant.

    Parameters
    ----------
    name
        Its name.
    values
        SETTING=VALUE, where a value is JSON or a text, such as weight=2 or 'limits={"concurrent": 8}'.
    """
    _print_one(to, asked(to.url, "POST", "tenants", {"name": name, **_given(values)}))


@admin.command
def change_tenant(
    name: str,
    /,
    *,
    values: Values = None,
    unset: Annotated[list[str] | None, Parameter(negative=())] = None,
    to: To = HERE,
) -> None:
    """Change settings of a tenant, its limits and budgets among them.

    Parameters
    ----------
    name
        Its name.
    values
        SETTING=VALUE, where a value is JSON or a text, such as suspended=true.
    unset
        A setting that goes back to its default.
    """
    body = {**_given(values), **({"unset": unset} if unset else {})}
    if not body:
        raise RequestError("say what is to change with --set or --unset")
    _print_one(to, asked(to.url, "PATCH", f"tenants/{in_path(name)}", body))


@admin.command
def delete_tenant(name: str, /, *, to: To = HERE) -> None:
    """Remove a tenant and revoke its keys. Its name is not used again."""
    _print_one(to, asked(to.url, "DELETE", f"tenants/{in_path(name)}"))


@admin.command
def keys(*, tenant: str | None = None, after: str | None = None, limit: int = 100, to: To = HERE) -> None:
    """List the keys.

    Parameters
    ----------
    tenant
        Only this one's.
    after
        The last one of the list before.
    limit
        Most of them to list.
    """
    answer = asked(to.url, "GET", "keys", tenant=tenant, after=after, limit=limit)
    for key in answer["data"]:
        key["last_four"] = [each["last_four"] for each in key["secrets"]]
    columns = ("id", "name", "tenant", "status", "last_four", "admin", "created_at", "expires_at", "last_used_at")
    _print_list(to, answer, columns)


@admin.command
def create_key(
    name: str,
    /,
    *,
    tenant: str,
    models: str | None = None,
    surfaces: str | None = None,
    profiles: str | None = None,
    admin: Literal["read", "write"] | None = None,
    expires_in: str | None = None,
    values: Values = None,
    to: To = HERE,
) -> None:
    """Make a key, and print its secret: this once, on a line of its own.

    Parameters
    ----------
    name
        What it is for.
    tenant
        Whose it is.
    models
        Models that it may use, with commas between them; all of the tenant's by default.
    surfaces
        Surfaces, likewise.
    profiles
        Profiles, likewise.
    admin
        Rights on the admin API.
    expires_in
        After which it ends, such as 90d; never by default.
    values
        SETTING=VALUE of what has no flag here, such as 'limits={"concurrent": 8}'.
    """
    body: dict[str, Any] = {
        "name": name,
        "tenant": tenant,
        "models": _names(models),
        "surfaces": _names(surfaces),
        "profiles": _names(profiles),
        "admin": admin,
        "expires_in_s": None if expires_in is None else _seconds(expires_in),
    }
    body = {key: value for key, value in body.items() if value is not None} | _given(values)
    _print_one(to, asked(to.url, "POST", "keys", body))


@admin.command
def rotate_key(key: str, /, *, overlap: str = "1d", to: To = HERE) -> None:
    """Give a key a new secret, and print it.

    Parameters
    ----------
    key
        Its id.
    overlap
        That the old secret goes on being good for; 0s ends it at once.
    """
    _print_one(to, asked(to.url, "POST", f"keys/{in_path(key)}/rotate", {"overlap_s": _seconds(overlap)}))


@admin.command
def revoke_key(key: str, /, *, to: To = HERE) -> None:
    """End a key at once."""
    _print_one(to, asked(to.url, "DELETE", f"keys/{in_path(key)}"))


@admin.command
def usage(
    *,
    tenant: str | None = None,
    since: str | None = None,
    until: str | None = None,
    by: str | None = None,
    to: To = HERE,
) -> None:
    """Print what was used and what it cost: as CSV, or as JSON.

    Parameters
    ----------
    tenant
        Only this one's.
    since
        From this day on, such as 2026-01-31.
    until
        Up to this day, and with it.
    by
        What it is told apart by, with commas between: day, tenant, key, endpoint, model, variant, surface.
    """
    form = "json" if to.json else "csv"
    answer = ask(
        to.url,
        "GET",
        "usage",
        tenant=tenant,
        first_day=since,
        last_day=until,
        by=None if by is None else ",".join(_names(by) or ()),
        format=form,
    )
    sys.stdout.write(answer.decode("utf-8", "replace"))


@admin.command
def invalidate(
    *,
    tag: Annotated[list[str] | None, Parameter(negative=())] = None,
    event: Annotated[list[str] | None, Parameter(negative=())] = None,
    tenant: str | None = None,
    all: Annotated[bool, Parameter(negative=())] = False,
    to: To = HERE,
) -> None:
    """End entries of the caches of answers, in every gateway.

    Parameters
    ----------
    tag
        Entries with this tag; may be given several times.
    event
        Entries that this event of the configuration ends; may be given several times.
    tenant
        Only this tenant's.
    all
        Every entry, where no tag and no event is named.
    """
    body: dict[str, Any] = {"tags": tag or [], "events": event or [], "all": all, "tenant": tenant}
    _print_one(to, asked(to.url, "POST", "cache/invalidate", {k: v for k, v in body.items() if v is not None}))


@admin.command
def fast(
    state: Literal["show", "on", "off", "clear"] = "show",
    /,
    *,
    tenant: str | None = None,
    ttl: Annotated[str, Parameter(name="--for")] = "15m",
    reason: str | None = None,
    to: To = HERE,
) -> None:
    """Switch fast mode: on, off (for a tenant, while it is on for all), clear, or show where it is set.

    Parameters
    ----------
    state
        show, on, off or clear.
    tenant
        For this one; for all by default.
    ttl
        After which it ends by itself.
    reason
        Why; kept in the audit log. Needed for on and off.
    """
    path = "fast" if tenant is None else f"fast/{in_path(tenant)}"
    if state == "show":
        answer = asked(to.url, "GET", "fast")
        shown = {**answer, "data": [_of_all(each) for each in answer["data"]]}
        columns = ("tenant", "on", "seconds_left", "since", "until", "by", "reason")
        _print_list(to, answer if to.json else shown, columns)
        return
    if state == "clear":
        answer = asked(to.url, "DELETE", path)
    elif reason is None:
        raise RequestError("say why with --reason: it is kept in the audit log")
    else:
        answer = asked(to.url, "PUT", path, {"on": state == "on", "ttl_s": _seconds(ttl), "reason": reason})
    _print_one(to, answer if to.json else _of_all(answer))


def _of_all(switch: Mapping[str, Any]) -> dict[str, Any]:
    """With a `*`, which no tenant is called, where it is of all of them."""
    return {**switch, "tenant": "*" if switch.get("tenant") is None else switch["tenant"]}


@admin.command
def audit(
    *,
    after: int | None = None,
    limit: int = 50,
    verify: Annotated[bool, Parameter(negative=())] = False,
    head: str | None = None,
    to: To = HERE,
) -> None:
    """Show who changed what, the newest first; or verify that nobody has changed the log itself.

    Parameters
    ----------
    after
        The number of the last row of the list before.
    limit
        Most rows to show.
    verify
        Fetch the whole chain and compute each hash anew.
    head
        Head of an earlier time, as --verify printed it; verify that the chain still holds it.
    """
    if not verify and head is None:
        answer = asked(to.url, "GET", "audit", limit=limit, after=after)
        _print_list(to, answer, ("seq", "at", "who", "what", "target", "reason"))
        return
    if after is not None:
        raise RequestError("the log is verified as a whole: without --after")
    from headrace.gateway.accounts.audit_log import ChainPosition, ChainVerifier, parse_audit_row

    try:
        noted = None if head is None else ChainPosition.read(head)
    except ValueError as error:
        raise RequestError(f"--head: {error}") from None
    checking: ChainVerifier | None = None
    mark = ChainPosition()
    for page in _pages(to):
        try:
            checking = checking or ChainVerifier(ChainPosition.read(page["anchor"]), noted=noted)
            for row in page["data"]:
                checking.add(parse_audit_row(row))
            mark = ChainPosition.read(page["head"])
        except (KeyError, TypeError, ValueError) as error:
            raise HeadraceError(f"the audit log cannot be read: {printable(str(error))}") from None
    assert checking is not None
    verdict = checking.end(mark)
    if to.json:
        found = {"good": verdict.good, "rows": verdict.rows, "head": str(verdict.head), "broken_at": verdict.broken_at}
        _print_json({**found, "why": verdict.why})
    elif verdict.good:
        print(f"{verdict.rows} rows, and each is as it was written. Head: {verdict.head}")
    if not verdict.good:
        raise HeadraceError(f"the audit log was tampered with: {verdict.why}")


def _pages(to: To) -> Iterator[dict[str, Any]]:
    """All of the log from its beginning on."""
    after: int | None = None
    while True:
        page = asked(to.url, "GET", "audit", order="asc", limit=_PAGE, after=after)
        yield page
        if not page.get("has_more"):
            return
        after = page["data"][-1]["seq"]


@admin.command
def scan(*paths: Path) -> None:
    """Look for secrets of keys in files and folders. Asks no server: a secret is known by its checksum.

    Parameters
    ----------
    paths
        Files and folders to look through; the working folder by default.
    """
    from headrace.gateway.accounts.key_secrets import last_four

    count = 0
    for path in _files(paths or (Path(),)):
        try:
            for number, secret in _secrets_in(path):
                count += 1
                print(f"{printable(str(path))}:{number}: a key that ends in {last_four(secret)}")
        except OSError as error:
            print(f"{printable(str(path))}: {error.strerror or error}", file=sys.stderr)
    if count:
        raise HeadraceError(f"{count} {'secret' if count == 1 else 'secrets'} found: rotate or revoke these keys")
    print("No secrets of keys found")


def _secrets_in(path: Path) -> Iterator[tuple[int, str]]:
    """Each with the number of its line. A file may be of any length, and of one line."""
    from headrace.gateway.accounts.key_secrets import secrets_in

    lines, kept = 1, ""
    with path.open(encoding="latin-1", newline="") as file:
        while part := file.read(_PART):
            text = kept + part
            for found in secrets_in(text):
                yield lines + text.count("\n", 0, found.start()), found[1]
            # Too short for a secret, so none is found twice; one that is cut is found with the next part.
            kept = text[-_SHORTER:]
            lines += text.count("\n", 0, len(text) - len(kept))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for folder, _, names in os.walk(path):
                yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file())
        else:
            yield path
