"""Parameters of the admin API's endpoints, in bodies and queries. Unknown parameters are rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config import Weight
from headrace.config.tenant_section import BudgetConfig, BudgetFailMode, CachesConfig, Rights, TenantConfig
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.ledger.ledger_store import Dimension
from headrace.gateway.limits.limit_scopes import LimitSet
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import Parameter, ParameterTable, convert_value
from headrace.server.http.unknown_fields import unknown_parameter
from headrace.surfaces import SURFACES

MOST_LISTED: Final = 1000
_LONGEST: Final = 200  # characters of a name or a reason

# Strings that are shown and logged: printable characters, bounded length.
Line = Annotated[
    str, Meta(min_length=1, max_length=_LONGEST, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+$")
]
_Text = Annotated[str, Meta(min_length=1)]
_Names = Annotated[tuple[Line, ...], Meta(max_length=256)]
_Surface = Literal[tuple(SURFACES)]  # pyright: ignore[reportInvalidTypeForm]
_Surfaces = Annotated[tuple[_Surface, ...], Meta(max_length=len(SURFACES))]
_Profile = Literal["standard", "fast", "golden"]
_Profiles = Annotated[tuple[_Profile, ...], Meta(max_length=3)]
_ModelLimits = Annotated[dict[Line, LimitSet], Meta(max_length=256)]
_Metadata = Annotated[dict[Line, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
_Budgets = Annotated[tuple[BudgetConfig, ...], Meta(max_length=64)]
_Seconds = Annotated[float, Meta(gt=0, le=10 * 366 * 86_400)]  # seconds
_Time = Annotated[int, Meta(ge=0, le=2**40)]  # seconds since 1970

_SCOPE: Final[ParameterTable] = {
    "models": Parameter("Models that may be used; MODEL includes its variants. Default: all.", _Names),
    "surfaces": Parameter("Surfaces that may be used. Default: all.", _Surfaces),
    "profiles": Parameter("Profiles that may be used. Default: all.", _Profiles),
}
LIMITS: Final[ParameterTable] = {
    "limits": Parameter("Limits on all requests of the tenant.", LimitSet),
    "model_limits": Parameter("Limits on requests to single models.", _ModelLimits),
    "surface_limits": Parameter("Limits on requests on single surfaces.", _ModelLimits),
}
BUDGETS: Final[ParameterTable] = {
    "budgets": Parameter("Budgets by endpoint and by day or month.", _Budgets, required=True),
}
_SETTINGS: Final[ParameterTable] = {
    "weight": Parameter("Weight in the fair share of the engine.", Weight),
    **_SCOPE,
    **LIMITS,
    "budgets": Parameter("Budgets by endpoint and by day or month.", _Budgets),
    "fail": Parameter("When the store of rate limits is down: open serves, closed rejects.", Literal["open", "closed"]),
    "budget_fail": Parameter(
        "When the ledger's store is down: lease serves what is leased of the budgets, open serves by the last sums, "
        "closed rejects.",
        BudgetFailMode,
    ),
    "caches": Parameter("Modes of the response caches that differ from the server's.", CachesConfig),
    "ladder": Parameter("Whether responses may be degraded under pressure.", bool),
    "record": Parameter("Whether its requests and answers are recorded.", bool),
    "suspended": Parameter("Whether all requests are rejected.", bool),
    "metadata": Parameter("String pairs for your own notes.", _Metadata),
}
TENANT: Final[ParameterTable] = {"name": Parameter("Name of the tenant.", Line, required=True), **_SETTINGS}
TENANT_CHANGE: Final[ParameterTable] = {
    **_SETTINGS,
    "unset": Parameter("Settings to reset to their defaults.", tuple[Literal[tuple(_SETTINGS)], ...]),  # pyright: ignore[reportInvalidTypeForm]
}
KEY: Final[ParameterTable] = {
    "name": Parameter("Name that says what the key is for.", Line, required=True),
    "tenant": Parameter("Tenant that the key belongs to.", Line, required=True),
    **_SCOPE,
    "admin": Parameter("Access to the admin API: read or write. Default: none.", Rights),
    "surface": Parameter("Surface of requests that name none.", _Surface),
    "weight": Parameter("Factor on the tenant's weight.", Weight),
    "limits": Parameter("Limits on the key's requests.", LimitSet),
    "expires_at": Parameter("Expiry in seconds since 1970. Default: never.", _Time),
    "expires_in_s": Parameter("Expiry in seconds from now.", _Seconds),
}
ROTATE: Final[ParameterTable] = {
    "overlap_s": Parameter(
        "Seconds that the old secrets stay valid; 0 revokes them at once. Default: one day.",
        Annotated[float, Meta(ge=0, le=90 * 86_400)],
    ),
}
FAST: Final[ParameterTable] = {
    "on": Parameter("Whether fast mode is on; false exempts a tenant while it is on for all.", bool),
    "ttl_s": Parameter("Seconds until the switch expires.", _Seconds, required=True),
    "reason": Parameter("Reason, written to the audit log.", Line, required=True),
}
INVALIDATE: Final[ParameterTable] = {
    "tags": Parameter("Invalidate entries with these tags.", _Names),
    "events": Parameter("Invalidate entries with the tags of these configured events.", _Names),
    "tenant": Parameter("Only entries of this tenant.", Line),
    "all": Parameter("Invalidate every entry; needed without tags and events.", bool),
}
RELOAD: Final[ParameterTable] = {
    "model": Parameter("Model or variant whose engine is replaced.", Line, required=True),
}
DRAIN_WORKER: Final[ParameterTable] = {
    "address": Parameter("Address of the worker, as the list of workers has it.", Line, required=True),
}
PIN: Final[ParameterTable] = {
    "name": Parameter("Name, shown in lists and logs.", Line, required=True),
    "model": Parameter("Model, which includes its variants, or one variant.", Line, required=True),
    "system": Parameter("System message of chats, written by the model's chat template.", _Text),
    "text": Parameter("Beginning of a completion's prompt. Set either this or 'system'.", _Text),
    "tenant": Parameter("Tenant whose requests find it.", Line),
    "public": Parameter("Whether the requests of all tenants find it. Set either this or 'tenant'.", bool),
}
ADAPTER: Final[ParameterTable] = {
    "name": Parameter("Name, which clients put after the model's and a colon.", Line, required=True),
    "path": Parameter("Folder of the adapter in PEFT's layout, on every host with workers.", _Text, required=True),
    "tenants": Parameter("Tenants that may use it. Default: all.", _Names),
}
# Query parameters of a usage export.
_Day = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
USAGE: Final[Mapping[str, Any]] = {
    "tenant": str,
    "first_day": _Day,
    "last_day": _Day,
    "by": str,
    "format": Literal["csv", "json"],
}


def dimensions(text: str) -> tuple[Dimension, ...]:
    """Parse comma-separated columns to group usage by. Raise ApiError for an unknown one."""
    names = convert_value(text.split(","), tuple[Dimension, ...], "by")
    return tuple(dict.fromkeys(names))


def new_settings(given: Mapping[str, Any]) -> TenantConfig:
    return TenantConfig(**{name: given[name] for name in _SETTINGS if name in given})


def changed_settings(before: TenantConfig, given: Mapping[str, Any]) -> TenantConfig:
    """Return the settings with `given` applied and those in `unset` reset to their defaults."""
    kept = {name: getattr(before, name) for name in _SETTINGS if name not in given.get("unset", ())}
    return new_settings({**kept, **{name: given[name] for name in _SETTINGS if name in given}})


def query(call: ApiCall, table: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the query by a table of names and types. Raise ApiError for unknown names and invalid values."""
    found: dict[str, Any] = {}
    for name, text in call.query().items():
        if name not in table:
            raise unknown_parameter(name, table)
        value: Any = text
        if table[name] is int:
            if not (text.isascii() and text.isdigit() and len(text) < 16):
                raise invalid_request(f"Invalid '{name}'. Expected a number.", name)
            value = int(text)
        found[name] = convert_value(value, table[name], name)
    return found


def page_query(call: ApiCall, **further: Any) -> dict[str, Any]:
    """Parse the query of a list: `after`, `limit` and `further` parameters."""
    found = query(call, {"after": str, "limit": int, **further})
    if not 1 <= found.setdefault("limit", 100) <= MOST_LISTED:
        raise invalid_request(f"Invalid 'limit'. Expected 1 to {MOST_LISTED}.", "limit")
    return found


def is_utf8(given: Mapping[str, Any]) -> bool:
    """Return whether all strings are valid Unicode. JSON escapes can contain lone surrogates."""
    try:
        msgspec.json.encode(given)
    except UnicodeEncodeError:
        return False
    return True
