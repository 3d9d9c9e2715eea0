"""Checks which models, surfaces and profiles a caller may use.

A model out of scope does not exist for the caller: it gets the same 404 as an unknown model and is not listed. Model
names can be confidential, and a 403 would confirm them. Surfaces and profiles are the same on every server, so these
are rejected with 403.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller

if TYPE_CHECKING:
    from headrace.gateway.serving.fleet import Fleet
    from headrace.gateway.serving.served_variant import ServedVariant


def allows_model(caller: Caller, name: str) -> bool:
    """Return whether the caller may use a variant. `name`: its full name. A model in the scope allows its variants."""
    if not isinstance(caller, IdentifiedCaller) or not caller.models:
        return True
    base = name.partition("@")[0]
    return all(name in names or base in names for names in caller.models)


def allows_served(caller: Caller, served: ServedVariant) -> bool:
    """Return whether the caller may use a variant or an adapter. A variant in the scope allows its adapters, but for
    those that are kept for other tenants."""
    if served.adapter is None:
        return allows_model(caller, served.name)
    if served.tenants and caller.tenant not in served.tenants:
        return False
    if not isinstance(caller, IdentifiedCaller):
        return True
    # The name of the adapter with the plain variant stands for it with all variants.
    base = served.base.partition("@")[0]
    allowed = {served.name, served.base, base, f"{base}:{served.adapter.name}"}
    return all(not allowed.isdisjoint(names) for names in caller.models)


def visible_models(caller: Caller, fleet: Fleet) -> list[ServedVariant]:
    """Return the models and adapters that /v1/models lists, in the fleet's order."""
    every = (*fleet.served.values(), *fleet.adapters.values())
    return [served for served in every if allows_served(caller, served)]


def visible_aliases(caller: Caller, fleet: Fleet) -> dict[str, ServedVariant]:
    """Return the aliases of the visible models, in the fleet's order."""
    return {
        alias: fleet.served[name]
        for alias, name in fleet.aliases.items()
        if name in fleet.served and allows_model(caller, name)
    }


def find_model(caller: Caller, fleet: Fleet, name: str, profile: str = "standard") -> ServedVariant:
    """Find a model among those the caller may use. Raise the same ApiError for forbidden and unknown models.

    Without a name, return the server's default or, if that is not allowed, the first model that is.
    """
    check_profile(caller, profile)
    if not name and not allows_model(caller, fleet.aliases.get(fleet.default, fleet.default)):
        name = next((served.name for served in visible_models(caller, fleet)), "")
    try:
        served = fleet.find(name, profile)
    except ApiError as error:
        # The error about a missing variant names its model, so show it only if the caller may use the model.
        if error.kind != "not_found_error" and allows_served(caller, fleet.find(name)):
            raise
        raise _unknown_model(caller, fleet, name or fleet.default) from None
    if not allows_served(caller, served):
        raise _unknown_model(caller, fleet, name or fleet.default)
    return served


def _unknown_model(caller: Caller, fleet: Fleet, requested: str) -> ApiError:
    available = ", ".join(sorted(served.name for served in visible_models(caller, fleet))) or "none for this API key"
    return ApiError(
        f"Unknown model '{requested[:200]}'. Available models: {available}.",
        kind="not_found_error",
        parameter="model",
        code="model_not_found",
    )


def check_profile(caller: Caller, profile: str) -> None:
    allowed = caller.profiles if isinstance(caller, IdentifiedCaller) else None
    if allowed is not None and profile not in allowed:
        raise _forbidden("profile", profile, sorted(allowed))


def choose_surface(caller: Caller, requested: str, served: str) -> str:
    """Choose the surface: the one the request names, else the key's, else the model's.

    If that default is not allowed, return the first allowed surface. Raise ApiError if the requested one is forbidden.
    """
    allowed = caller.surfaces if isinstance(caller, IdentifiedCaller) else None
    surface = requested or caller.surface or served
    if allowed is None or surface in allowed:
        return surface
    if requested or not allowed:
        raise _forbidden("surface", surface, allowed)
    return allowed[0]


def _forbidden(what: str, name: str, allowed: Sequence[str]) -> ApiError:
    permitted = ", ".join(allowed) or "none"
    return ApiError(
        f"This API key may not use the {what} '{name[:100]}'. Allowed: {permitted}.",
        kind="permission_error",
        parameter=what,
        code=f"{what}_not_allowed",
    )
