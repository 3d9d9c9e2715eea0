"""What a caller may use: models, surfaces and profiles, and what it is told where it may not.

Owns the rules. A model out of scope does not exist for the caller: it is answered as a name that nobody serves is, and
no list has it. Models are often named after whom they were made for, so their names alone are not for everybody; a 403
would confirm them. Surfaces and profiles are the same names on every server, so these are refused as what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller

if TYPE_CHECKING:
    from headrace.gateway.serving.fleet import Fleet, ServedVariant


def allows_model(caller: Caller, name: str) -> bool:
    """`name`: of a variant, in full. A model in a scope allows all its variants."""
    if not isinstance(caller, IdentifiedCaller):
        return True
    base = name.partition("@")[0]
    return all(name in names or base in names for names in caller.models)


def visible_models(caller: Caller, fleet: Fleet) -> list[ServedVariant]:
    """For /v1/models, in the fleet's order."""
    return [served for name, served in fleet.served.items() if allows_model(caller, name)]


def find_model(caller: Caller, fleet: Fleet, name: str, profile: str = "standard") -> ServedVariant:
    """As Fleet.find, among what the caller may use. Without a name it is the server's default, or where the caller may
    not use that, the first that it may. ApiError, the same for what it may not use and for what is not there."""
    check_profile(caller, profile)
    if not name and not allows_model(caller, fleet.aliases.get(fleet.default, fleet.default)):
        name = next((served.name for served in visible_models(caller, fleet)), "")
    try:
        served = fleet.find(name, profile)
    except ApiError as error:
        # A variant that is missing names its model: that a caller may know of its own models alone.
        base = (name or fleet.default).partition("@")[0]
        if error.kind != "not_found_error" and allows_model(caller, fleet.aliases.get(base, base)):
            raise
        raise _no_model(caller, fleet, name or fleet.default) from None
    if not allows_model(caller, served.name):
        raise _no_model(caller, fleet, name or fleet.default)
    return served


def _no_model(caller: Caller, fleet: Fleet, wanted: str) -> ApiError:
    there = ", ".join(sorted(served.name for served in visible_models(caller, fleet))) or "none for this key"
    return ApiError(
        f"there is no model '{wanted[:200]}'; there are: {there}",
        kind="not_found_error",
        parameter="model",
        code="model_not_found",
    )


def check_profile(caller: Caller, profile: str) -> None:
    allowed = caller.profiles if isinstance(caller, IdentifiedCaller) else None
    if allowed is not None and profile not in allowed:
        raise _forbidden("profile", profile, sorted(allowed))


def choose_surface(caller: Caller, asked: str, served: str) -> str:
    """The surface of a request: the one that it names, the key's own, the model's. Where the caller may not use what
    nobody asked for, it is the first that it may. ApiError where the request names one that it may not."""
    allowed = caller.surfaces if isinstance(caller, IdentifiedCaller) else None
    surface = asked or caller.surface or served
    if allowed is None or surface in allowed:
        return surface
    if asked or not allowed:
        raise _forbidden("surface", surface, allowed)
    return allowed[0]


def _forbidden(what: str, name: str, allowed: Sequence[str]) -> ApiError:
    may = f"it may use {', '.join(allowed)}" if allowed else "it may use none"
    return ApiError(
        f"the API key may not use the {what} '{name[:100]}'; {may}",
        kind="permission_error",
        parameter=what,
        code=f"{what}_not_allowed",
    )
