"""`headrace admin`: manages tenants, keys, fast mode, caches, usage and the audit log of a running server.

Defines the commands; admin_client sends the requests and admin_output prints the responses.

Exit codes: 2 if the server rejects the request or the audit log fails verification, 1 if the server cannot be reached
or has failed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from headrace.cli.admin import admin_adapters, admin_lengths, admin_pins, admin_trial, admin_workers
from headrace.cli.admin.admin_client import DEFAULT_TARGET, AdminTarget, path_segment, printable, request, request_json
from headrace.cli.admin.admin_output import (
    print_budgets,
    print_feedback,
    print_json,
    print_list,
    print_one,
    print_usage,
)
from headrace.errors import HeadraceError, RequestError

_PAGE_ROWS: Final = 1000  # audit rows per request
_CHUNK_CHARACTERS: Final = 1024 * 1024  # of a file, read at a time
_OVERLAP_CHARACTERS: Final = 51  # one fewer than a key has
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


Settings = Annotated[list[str] | None, Parameter(name="--set", negative=())]

admin = App(
    name="admin",
    help="Manage a running server: tenants, keys, fast mode, caches, pins, adapters, workers, usage, the audit log.",
    version_flags=[],
)
admin_pins.add_commands(admin)
admin_adapters.add_commands(admin)
admin_workers.add_commands(admin)
admin_trial.add_commands(admin)
admin_lengths.add_commands(admin)


# Arguments


def _parse_settings(values: Sequence[str] | None) -> dict[str, Any]:
    """Parse NAME=VALUE pairs. A value that is not JSON is a string."""
    settings: dict[str, Any] = {}
    for each in values or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise RequestError(f"Expected NAME=VALUE, found '{each}'.", parameter="set")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _split_names(text: str | None) -> list[str] | None:
    return None if text is None else [each.strip() for each in text.split(",") if each.strip()]


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise RequestError(f"Invalid duration '{text}'. Write it as 90s, 15m, 1h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


# Commands


@admin.command
def epoch(*, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Show the version of the shared state and the version this server has applied."""
    print_one(request_json(to.url, "GET", "epoch"), as_json=to.json)


@admin.command
def tenants(*, after: str | None = None, limit: int = 100, to: AdminTarget = DEFAULT_TARGET) -> None:
    """List tenants.

    Parameters
    ----------
    after
        Continue after this entry, the last of the previous page.
    limit
        Entries to list, at most.
    """
    answer = request_json(to.url, "GET", "tenants", after=after, limit=limit)
    print_list(
        answer, ("name", "source", "weight", "models", "surfaces", "profiles", "fail", "suspended"), as_json=to.json
    )


@admin.command
def tenant(name: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Show a tenant and its settings."""
    print_one(request_json(to.url, "GET", f"tenants/{path_segment(name)}"), as_json=to.json)


@admin.command
def create_tenant(name: str, /, *, values: Settings = None, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Create a tenant.

    Parameters
    ----------
    name
        Name of the tenant.
    values
        SETTING=VALUE, such as weight=2 or 'limits={"concurrent": 8}'. The value is JSON or a plain string.
    """
    print_one(request_json(to.url, "POST", "tenants", {"name": name, **_parse_settings(values)}), as_json=to.json)


@admin.command
def change_tenant(
    name: str,
    /,
    *,
    values: Settings = None,
    unset: Annotated[list[str] | None, Parameter(negative=())] = None,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Change settings of a tenant, including its limits and budgets.

    Parameters
    ----------
    name
        Name of the tenant.
    values
        SETTING=VALUE, such as suspended=true. The value is JSON or a plain string.
    unset
        Reset this setting to its default.
    """
    body = {**_parse_settings(values), **({"unset": unset} if unset else {})}
    if not body:
        raise RequestError("Nothing to change. Use --set or --unset.")
    print_one(request_json(to.url, "PATCH", f"tenants/{path_segment(name)}", body), as_json=to.json)


@admin.command
def delete_tenant(name: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Delete a tenant and revoke its keys. Its name cannot be used again."""
    print_one(request_json(to.url, "DELETE", f"tenants/{path_segment(name)}"), as_json=to.json)


@admin.command
def keys(
    *, tenant: str | None = None, after: str | None = None, limit: int = 100, to: AdminTarget = DEFAULT_TARGET
) -> None:
    """List keys.

    Parameters
    ----------
    tenant
        Only entries of this tenant.
    after
        Continue after this entry, the last of the previous page.
    limit
        Entries to list, at most.
    """
    answer = request_json(to.url, "GET", "keys", tenant=tenant, after=after, limit=limit)
    for key in answer["data"]:
        key["last_four"] = [each["last_four"] for each in key["secrets"]]
    columns = ("id", "name", "tenant", "status", "last_four", "admin", "created_at", "expires_at", "last_used_at")
    print_list(answer, columns, as_json=to.json)


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
    values: Settings = None,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Create a key and print it. The key is shown only once.

    Parameters
    ----------
    name
        Name that says what the key is for.
    tenant
        Tenant that the key belongs to.
    models
        Models the key may use, comma-separated. Default: all of the tenant's.
    surfaces
        Surfaces the key may use, comma-separated.
    profiles
        Profiles the key may use, comma-separated.
    admin
        Access to the admin API.
    expires_in
        Lifetime, such as 90d. Default: the key does not expire.
    values
        SETTING=VALUE for settings without a flag, such as 'limits={"concurrent": 8}'.
    """
    body: dict[str, Any] = {
        "name": name,
        "tenant": tenant,
        "models": _split_names(models),
        "surfaces": _split_names(surfaces),
        "profiles": _split_names(profiles),
        "admin": admin,
        "expires_in_s": None if expires_in is None else _seconds(expires_in),
    }
    body = {key: value for key, value in body.items() if value is not None} | _parse_settings(values)
    print_one(request_json(to.url, "POST", "keys", body), as_json=to.json)


@admin.command
def rotate_key(key: str, /, *, overlap: str = "1d", to: AdminTarget = DEFAULT_TARGET) -> None:
    """Replace the secret of a key and print the new one.

    Parameters
    ----------
    key
        Id of the key.
    overlap
        How long the old secret stays valid; 0s revokes it at once.
    """
    print_one(
        request_json(to.url, "POST", f"keys/{path_segment(key)}/rotate", {"overlap_s": _seconds(overlap)}),
        as_json=to.json,
    )


@admin.command
def revoke_key(key: str, /, *, to: AdminTarget = DEFAULT_TARGET) -> None:
    """Revoke a key at once."""
    print_one(request_json(to.url, "DELETE", f"keys/{path_segment(key)}"), as_json=to.json)


@admin.command
def usage(
    *,
    tenant: str | None = None,
    since: str | None = None,
    until: str | None = None,
    by: str | None = None,
    csv: Annotated[bool, Parameter(negative=())] = False,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Show usage and cost in your currency.

    Parameters
    ----------
    tenant
        Only entries of this tenant.
    since
        First day, such as 2026-01-31.
    until
        Last day, inclusive.
    by
        Columns to group by, comma-separated: day, tenant, key, endpoint, model, variant, surface. Default: tenant and
        model, and with --csv or --json all but surface.
    csv
        Print the export as CSV, with amounts in micros, millionths of the currency.
    """
    if csv and to.json:
        raise RequestError("Set either --csv or --json, not both.")
    exact = csv or to.json
    if by is None and not exact:
        by = "tenant,model"
    answer = request(
        to.url,
        "GET",
        "usage",
        tenant=tenant,
        first_day=since,
        last_day=until,
        by=None if by is None else ",".join(_split_names(by) or ()),
        format="csv" if csv else "json",
    )
    if exact:
        sys.stdout.write(answer.decode("utf-8", "replace"))
    else:
        print_usage(json.loads(answer))


@admin.command
def budgets(
    *, tenant: str | None = None, after: str | None = None, limit: int = 100, to: AdminTarget = DEFAULT_TARGET
) -> None:
    """Show what is spent, reserved and left of budgets, in your currency.

    Parameters
    ----------
    tenant
        Only entries of this tenant.
    after
        Continue after this tenant, the last of the previous page.
    limit
        Tenants to list, at most.
    """
    answer = request_json(to.url, "GET", "budgets", tenant=tenant, after=after, limit=limit)
    print_budgets(answer, as_json=to.json)


@admin.command
def feedback(
    *,
    tenant: str | None = None,
    since: str | None = None,
    until: str | None = None,
    by: str = "outcome,model",
    csv: Annotated[bool, Parameter(negative=())] = False,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Show the outcomes that clients attached to their requests, beside latency and price.

    Parameters
    ----------
    tenant
        Only outcomes of this tenant.
    since
        First day, such as 2026-01-31.
    until
        Last day, inclusive.
    by
        Columns to group by, comma-separated: outcome, day, tenant, model, surface, endpoint, length, route.
    csv
        Print the export as CSV, with amounts in micros, millionths of the currency.
    """
    if csv and to.json:
        raise RequestError("Set either --csv or --json, not both.")
    answer = request(
        to.url,
        "GET",
        "feedback",
        tenant=tenant,
        first_day=since,
        last_day=until,
        by=",".join(_split_names(by) or ()),
        format="csv" if csv else "json",
    )
    if csv:
        sys.stdout.write(answer.decode("utf-8", "replace"))
    else:
        print_feedback(json.loads(answer), as_json=to.json)


@admin.command
def invalidate(
    *,
    tag: Annotated[list[str] | None, Parameter(negative=())] = None,
    event: Annotated[list[str] | None, Parameter(negative=())] = None,
    tenant: str | None = None,
    all: Annotated[bool, Parameter(negative=())] = False,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Invalidate entries of the response caches in every gateway.

    Parameters
    ----------
    tag
        Invalidate entries with this tag. Repeatable.
    event
        Invalidate entries with the tags of this configured event. Repeatable.
    tenant
        Only this tenant's.
    all
        Invalidate every entry; needed when neither tag nor event is given.
    """
    body: dict[str, Any] = {"tags": tag or [], "events": event or [], "all": all, "tenant": tenant}
    print_one(
        request_json(to.url, "POST", "cache/invalidate", {k: v for k, v in body.items() if v is not None}),
        as_json=to.json,
    )


@admin.command
def fast(
    state: Literal["show", "on", "off", "clear"] = "show",
    /,
    *,
    tenant: str | None = None,
    ttl: Annotated[str, Parameter(name="--for")] = "15m",
    reason: str | None = None,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Show or switch fast mode. `off` exempts a tenant while it is on for all; `clear` removes a switch.

    Parameters
    ----------
    state
        show, on, off or clear.
    tenant
        Tenant to switch. Default: all tenants.
    ttl
        How long the switch lasts.
    reason
        Reason, written to the audit log. Required for on and off.
    """
    path = "fast" if tenant is None else f"fast/{path_segment(tenant)}"
    if state == "show":
        answer = request_json(to.url, "GET", "fast")
        displayed = {**answer, "data": [_name_all_tenants(each) for each in answer["data"]]}
        columns = ("tenant", "on", "seconds_left", "since", "until", "by", "reason")
        print_list(answer if to.json else displayed, columns, as_json=to.json)
        return
    if state == "clear":
        answer = request_json(to.url, "DELETE", path)
    elif reason is None:
        raise RequestError("Missing --reason. The reason is written to the audit log.")
    else:
        answer = request_json(to.url, "PUT", path, {"on": state == "on", "ttl_s": _seconds(ttl), "reason": reason})
    print_one(answer if to.json else _name_all_tenants(answer), as_json=to.json)


def _name_all_tenants(switch: Mapping[str, Any]) -> dict[str, Any]:
    """Show a switch for all tenants as `*`, which is no tenant's name."""
    return {**switch, "tenant": "*" if switch.get("tenant") is None else switch["tenant"]}


@admin.command
def audit(
    *,
    after: int | None = None,
    limit: int = 50,
    verify: Annotated[bool, Parameter(negative=())] = False,
    head: str | None = None,
    to: AdminTarget = DEFAULT_TARGET,
) -> None:
    """Show the audit log, newest first, or verify that it was not tampered with.

    Parameters
    ----------
    after
        Continue after this row number, the last of the previous page.
    limit
        Rows to show, at most.
    verify
        Fetch the whole log and recompute every hash.
    head
        Head printed by an earlier --verify; verify that the log still contains it.
    """
    if not verify and head is None:
        answer = request_json(to.url, "GET", "audit", limit=limit, after=after)
        print_list(answer, ("seq", "at", "who", "what", "target", "reason"), as_json=to.json)
        return
    if after is not None:
        raise RequestError("--verify checks the whole log. Remove --after.")
    from headrace.gateway.accounts.audit_log import ChainPosition, ChainVerifier, parse_audit_row

    try:
        earlier_head = None if head is None else ChainPosition.read(head)
    except ValueError as error:
        raise RequestError(f"--head: {error}") from None
    verifier: ChainVerifier | None = None
    position = ChainPosition()
    for page in _pages(to):
        try:
            verifier = verifier or ChainVerifier(ChainPosition.read(page["anchor"]), noted=earlier_head)
            for row in page["data"]:
                verifier.add(parse_audit_row(row))
            position = ChainPosition.read(page["head"])
        except (KeyError, TypeError, ValueError) as error:
            raise HeadraceError(f"Cannot read the audit log: {printable(str(error))}.") from None
    assert verifier is not None
    result = verifier.end(position)
    if to.json:
        summary = {"good": result.good, "rows": result.rows, "head": str(result.head), "broken_at": result.broken_at}
        print_json({**summary, "why": result.why})
    elif result.good:
        print(f"{result.rows} rows verified. Head: {result.head}")
    if not result.good:
        raise HeadraceError(f"The audit log was tampered with: {result.why}.")


def _pages(to: AdminTarget) -> Iterator[dict[str, Any]]:
    """Fetch the whole log page by page, oldest first."""
    after: int | None = None
    while True:
        page = request_json(to.url, "GET", "audit", order="asc", limit=_PAGE_ROWS, after=after)
        yield page
        if not page.get("has_more"):
            return
        after = page["data"][-1]["seq"]


@admin.command
def scan(*paths: Path) -> None:
    """Find Headrace API keys in files and folders. Works offline: keys are recognised by their checksum.

    Parameters
    ----------
    paths
        Files and folders to scan. Default: the working folder.
    """
    from headrace.gateway.accounts.key_secrets import last_four

    count = 0
    for path in _files(paths or (Path(),)):
        try:
            for number, secret in _secrets_in(path):
                count += 1
                print(f"{printable(str(path))}:{number}: key that ends in {last_four(secret)}")
        except OSError as error:
            print(f"{printable(str(path))}: {error.strerror or error}", file=sys.stderr)
    if count:
        raise HeadraceError(
            f"Found {count} {'key' if count == 1 else 'keys'}. Rotate or revoke {'it' if count == 1 else 'them'}."
        )
    print("No keys found")


def _secrets_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and secret. Reads in chunks: a file may be of any length and consist of one line."""
    from headrace.gateway.accounts.key_secrets import secrets_in

    lines, tail = 1, ""
    with path.open(encoding="latin-1", newline="") as file:
        while chunk := file.read(_CHUNK_CHARACTERS):
            text = tail + chunk
            for match in secrets_in(text):
                yield lines + text.count("\n", 0, match.start()), match[1]
            # Shorter than a secret, so that none is found twice and one cut by the chunk is found with the next.
            tail = text[-_OVERLAP_CHARACTERS:]
            lines += text.count("\n", 0, len(text) - len(tail))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for folder, _, names in os.walk(path):
                yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file())
        else:
            yield path
