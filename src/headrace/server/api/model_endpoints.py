"""`/v1/models`: the models and aliases that the caller may use, in the dialect that the client speaks."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.accounts.access import find_model, visible_aliases, visible_models
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.server.api.list_query import anthropic_page, parse_list_query, rfc3339
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ANTHROPIC, ApiCall, Response
from headrace.server.http.route_table import Route

_MOST: Final = 1000  # models of a page in Anthropic's shape


def routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def list_models(call: ApiCall) -> None:
        if call.errors == ANTHROPIC:
            await context.reply(call, Response.json(_anthropic_list(call, _named(context, call.caller))))
            return
        await context.reply(call, Response.json({"object": "list", "data": model_entries(context, call.caller)}))

    async def retrieve(call: ApiCall) -> None:
        name = call.params["model"]
        served = find_model(call.caller, fleet, name)
        described = _anthropic_model if call.errors == ANTHROPIC else _described
        await context.reply(call, Response.json(described(name, served)))

    return (
        Route("GET", "/v1/models", list_models, "List the models and aliases that the key may use."),
        Route("GET", "/v1/models/{model}", retrieve, "Retrieve one model."),
    )


def _named(context: EndpointContext, caller: Caller) -> dict[str, ServedVariant]:
    """Return the models and aliases that a caller may use, by name."""
    fleet = context.services.fleet
    return {served.name: served for served in visible_models(caller, fleet)} | visible_aliases(caller, fleet)


def model_entries(context: EndpointContext, caller: Caller) -> list[dict[str, Any]]:
    """Return the entries of all models, aliases and pipelines that a caller may use."""
    data = [_described(name, served) for name, served in _named(context, caller).items()]
    if context.services.pipelines is not None:
        data += context.services.pipelines.model_entries(caller)
    return data


def _described(name: str, served: ServedVariant) -> dict[str, Any]:
    """Return the entry of a model under its own name or an alias."""
    entry = served.described()
    return entry if name == served.name else {**entry, "id": name, "alias_of": served.name}


def _anthropic_model(name: str, served: ServedVariant) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name if name == served.name else f"{name} ({served.name})",
        "created_at": rfc3339(served.created),
        "lifecycle": "active",
        "max_input_tokens": served.known_context,
        "max_tokens": served.known_context,
    }


def _anthropic_list(call: ApiCall, named: dict[str, ServedVariant]) -> dict[str, Any]:
    query = parse_list_query(call, ("after_id", "before_id", "limit"))
    names = list(named)
    after, before, limit = query.get("after_id"), query.get("before_id"), query.get("limit", 20)
    if not 1 <= limit <= _MOST:
        raise invalid_request(f"Invalid 'limit'. Expected 1 to {_MOST}.", "limit")
    for parameter, id in (("after_id", after), ("before_id", before)):
        if id is not None and id not in named:
            raise invalid_request(f"Unknown id in '{parameter}'.", parameter)
    if after is not None:
        names = names[names.index(after) + 1 :]
    if before is not None:
        names = names[: names.index(before)] if before in names else []
    page = names[-limit:] if before is not None else names[:limit]
    return anthropic_page([_anthropic_model(name, named[name]) for name in page], has_more=len(names) > limit)
