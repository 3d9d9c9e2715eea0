"""What the admin API's endpoints take: their bodies as tables of parameters, and their queries.

Owns the tables, and how settings of a tenant are made from what was given. What is not in a table is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config import Weight
from headrace.config.tenant_section import BudgetConfig, CachesConfig, Rights, TenantConfig
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.ledger.ledger_store import Dimension
from headrace.gateway.limits.limit_scopes import LimitSet
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import Parameter, ParameterTable, convert_value, unknown_parameter
from headrace.surfaces import SURFACES

MOST_LISTED: Final = 1000
_LONGEST: Final = 200  # characters of a name or a reason

# Texts that are shown and logged: of printable characters, and of them not too many.
_Line = Annotated[
    str, Meta(min_length=1, max_length=_LONGEST, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+$")
]
_Names = Annotated[tuple[_Line, ...], Meta(max_length=256)]
_Surface = Literal[tuple(SURFACES)]  # pyright: ignore[reportInvalidTypeForm]
_Surfaces = Annotated[tuple[_Surface, ...], Meta(max_length=len(SURFACES))]
_Profile = Literal["standard", "fast", "golden"]
_Profiles = Annotated[tuple[_Profile, ...], Meta(max_length=3)]
_ModelLimits = Annotated[dict[_Line, LimitSet], Meta(max_length=256)]
_Metadata = Annotated[dict[_Line, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
_Budgets = Annotated[tuple[BudgetConfig, ...], Meta(max_length=64)]
_Seconds = Annotated[float, Meta(gt=0, le=10 * 366 * 86_400)]  # seconds
_Time = Annotated[int, Meta(ge=0, le=2**40)]  # seconds since 1970

_SCOPE: Final[ParameterTable] = {
    "models": Parameter("Models that may be used; MODEL allows its variants. All by default.", _Names),
    "surfaces": Parameter("Surfaces that may be used. All by default.", _Surfaces),
    "profiles": Parameter("Profiles that may be used. All by default.", _Profiles),
}
LIMITS: Final[ParameterTable] = {
    "limits": Parameter("Limits on all requests of the tenant.", LimitSet),
    "model_limits": Parameter("Limits on its requests to single models.", _ModelLimits),
    "surface_limits": Parameter("Limits on its requests on single surfaces.", _ModelLimits),
}
BUDGETS: Final[ParameterTable] = {
    "budgets": Parameter("What may be spent, by endpoint and by day or month.", _Budgets, required=True),
}
_SETTINGS: Final[ParameterTable] = {
    "weight": Parameter("Of its fair share in the engine.", Weight),
    **_SCOPE,
    **LIMITS,
    "budgets": Parameter("What may be spent, by endpoint and by day or month.", _Budgets),
    "fail": Parameter("Where a shared dependency is gone: open or closed.", Literal["open", "closed"]),
    "caches": Parameter("Modes of the caches of answers, where they differ from the server's.", CachesConfig),
    "ladder": Parameter("Whether its answers may become less under pressure.", bool),
    "suspended": Parameter("Whether all its requests are refused.", bool),
    "metadata": Parameter("Pairs of texts that are handed back.", _Metadata),
}
TENANT: Final[ParameterTable] = {"name": Parameter("The tenant's name.", _Line, required=True), **_SETTINGS}
TENANT_CHANGE: Final[ParameterTable] = {
    **_SETTINGS,
    "unset": Parameter("Settings that go back to their defaults.", tuple[Literal[tuple(_SETTINGS)], ...]),  # pyright: ignore[reportInvalidTypeForm]
}
KEY: Final[ParameterTable] = {
    "name": Parameter("What the key is for.", _Line, required=True),
    "tenant": Parameter("Whose it is.", _Line, required=True),
    **_SCOPE,
    "admin": Parameter("Rights on the admin API: read, or write. None by default.", Rights),
    "surface": Parameter("Of requests that name none.", _Surface),
    "weight": Parameter("A factor of the tenant's.", Weight),
    "limits": Parameter("Limits on the key's requests.", LimitSet),
    "expires_at": Parameter("When it ends, in seconds since 1970. Never by default.", _Time),
    "expires_in_s": Parameter("The same, in seconds from now.", _Seconds),
}
ROTATE: Final[ParameterTable] = {
    "overlap_s": Parameter(
        "Seconds that the secrets so far go on being good for; 0 ends them at once. A day by default.",
        Annotated[float, Meta(ge=0, le=90 * 86_400)],
    ),
}
FAST: Final[ParameterTable] = {
    "on": Parameter("Whether it is on. false, of a tenant: not even while it is on for all.", bool),
    "ttl_s": Parameter("Seconds after which it ends by itself.", _Seconds, required=True),
    "reason": Parameter("Why; kept in the audit log.", _Line, required=True),
}
INVALIDATE: Final[ParameterTable] = {
    "tags": Parameter("Tags whose entries go.", _Names),
    "events": Parameter("Events, as the configuration has them, whose tags' entries go.", _Names),
    "tenant": Parameter("Only this tenant's entries.", _Line),
    "all": Parameter("Every entry, where neither tags nor events are named.", bool),
}
# Of the query of an export.
_Day = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
USAGE: Final[Mapping[str, Any]] = {
    "tenant": str,
    "first_day": _Day,
    "last_day": _Day,
    "by": str,
    "format": Literal["csv", "json"],
}


def dimensions(text: str) -> tuple[Dimension, ...]:
    """Of names with commas between them. ApiError for one that usage is not told apart by."""
    found = convert_value(text.split(","), tuple[Dimension, ...], "by")
    return tuple(dict.fromkeys(found))


def new_settings(given: Mapping[str, Any]) -> TenantConfig:
    return TenantConfig(**{name: given[name] for name in _SETTINGS if name in given})


def changed_settings(before: TenantConfig, given: Mapping[str, Any]) -> TenantConfig:
    """What is given takes the place of what was there; what is in `unset` is as if it had never been given."""
    kept = {name: getattr(before, name) for name in _SETTINGS if name not in given.get("unset", ())}
    return new_settings({**kept, **{name: given[name] for name in _SETTINGS if name in given}})


def query(call: ApiCall, table: Mapping[str, Any]) -> dict[str, Any]:
    """The query's parameters by name and type. ApiError for another one, and for a value that is none of its type."""
    found: dict[str, Any] = {}
    for name, text in call.query().items():
        if name not in table:
            raise unknown_parameter(name, table)
        value: Any = text
        if table[name] is int:
            if not (text.isascii() and text.isdigit() and len(text) < 16):
                raise invalid_request(f"'{name}' must be a number", name)
            value = int(text)
        found[name] = convert_value(value, table[name], name)
    return found


def page_query(call: ApiCall, **further: Any) -> dict[str, Any]:
    """That of a list: `after`, `limit`, and what else there is."""
    found = query(call, {"after": str, "limit": int, **further})
    if not 1 <= found.setdefault("limit", 100) <= MOST_LISTED:
        raise invalid_request(f"'limit' must be 1 to {MOST_LISTED}", "limit")
    return found


def is_utf8(given: Mapping[str, Any]) -> bool:
    """Whether it can be written down. JSON has escapes for halves of characters, which are none."""
    try:
        msgspec.json.encode(given)
    except UnicodeEncodeError:
        return False
    return True
