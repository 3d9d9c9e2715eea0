"""`/api/tags`, `/api/show` and `/api/ps`: the models that the caller may use, as Ollama describes models."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from headrace.gateway.accounts.access import find_model, visible_aliases, visible_models
from headrace.gateway.serving.served_variant import ModelDescription, ServedVariant
from headrace.server.api.list_query import rfc3339
from headrace.server.api.ollama.model_tags import find_name, tag_of
from headrace.server.api.ollama.ollama_parameters import SHOW_PARAMETERS
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import OLLAMA, ApiCall, Response
from headrace.server.http.route_table import Route

_NEVER: Final = "9999-12-31T23:59:59Z"  # when a model is unloaded
_UPSTREAM: Final = ModelDescription(family="", parameters=0, precision="", format="", weight_bytes=0)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def tags(call: ApiCall) -> None:
        named = {served.name: served for served in visible_models(call.caller, fleet)}
        named |= visible_aliases(call.caller, fleet)
        models = [{**_entry(name, served), "modified_at": rfc3339(served.created)} for name, served in named.items()]
        await context.reply(call, Response.json({"models": models}))

    async def running(call: ApiCall) -> None:
        models = [
            {
                **_entry(served.name, served),
                "expires_at": _NEVER,
                "size_vram": 0,
                "context_length": served.known_context,
            }
            for served in visible_models(call.caller, fleet)
            if served.upstream is None
        ]
        await context.reply(call, Response.json({"models": models}))

    async def show(call: ApiCall) -> None:
        given = await context.parameters(call, SHOW_PARAMETERS)
        name = find_name(call.caller, fleet, given.get("model") or given.get("name", ""))
        await context.reply(call, Response.json(_shown(name, find_model(call.caller, fleet, name))))

    return (
        Route("GET", "/api/tags", tags, "List models in Ollama's dialect.", errors=OLLAMA),
        Route("GET", "/api/ps", running, "List the models that engines have loaded.", errors=OLLAMA),
        Route(
            "POST",
            "/api/show",
            show,
            "Describe one model in Ollama's dialect.",
            SHOW_PARAMETERS,
            errors=OLLAMA,
            lenient=True,
        ),
    )


def _entry(name: str, served: ServedVariant) -> dict[str, Any]:
    described = served.description or _UPSTREAM
    tagged = tag_of(name)
    return {
        "name": tagged,
        "model": tagged,
        "size": described.weight_bytes,
        # Changes with everything that determines answers.
        "digest": hashlib.sha256(f"{served.name} {served.fingerprint}".encode()).hexdigest(),
        "details": _details(described),
    }


def _details(described: ModelDescription) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": described.format,
        "family": described.family,
        "families": [described.family] if described.family else [],
        "parameter_size": _size(described.parameters),
        "quantization_level": described.precision.upper(),
    }


def _size(parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters) if parameters else ""


def _shown(name: str, served: ServedVariant) -> dict[str, Any]:
    described = served.description or _UPSTREAM
    architecture = described.family or "upstream"
    tokenizer = served.own_tokenizer
    template = None if tokenizer is None else tokenizer.template
    information: dict[str, Any] = {
        "general.architecture": architecture,
        "general.basename": name or served.name,
    }
    if served.known_context is not None:
        information[f"{architecture}.context_length"] = served.known_context
    if described.parameters:
        information["general.parameter_count"] = described.parameters
    if served.width:
        information[f"{architecture}.embedding_length"] = served.width
    return {
        "modelfile": f"FROM {tag_of(name or served.name)}\n",
        "parameters": "",
        "template": "" if template is None else template.source,
        "details": _details(described),
        "model_info": information,
        "capabilities": _capabilities(served),
        "modified_at": rfc3339(served.created),
    }


def _capabilities(served: ServedVariant) -> list[str]:
    upstream = served.upstream
    if upstream is None:
        has = {
            "completion": served.kind == "decoder",
            "tools": served.tools is not None,
            "thinking": served.reasoning is not None,
            "embedding": served.kind == "encoder",
        }
    else:
        takes = upstream.takes
        has = {
            "completion": bool(takes.chat or takes.completions),
            "tools": bool(takes.tools),
            "thinking": takes.thinking != "none",
            "embedding": bool(takes.embeddings),
        }
    return [name for name, is_there in has.items() if is_there]
