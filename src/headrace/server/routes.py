"""The route table of the server. To add an endpoint, write a module with `routes(context)` and add its line here."""

from __future__ import annotations

from typing import NamedTuple

from headrace.lab.online.online_lab import OnlineLab
from headrace.server import openapi, status_endpoints, web_pages
from headrace.server.admin import (
    adapter_routes,
    canary_routes,
    history_routes,
    lab_routes,
    live_routes,
    pin_routes,
    reload_route,
    worker_routes,
)
from headrace.server.admin.administration import Administration
from headrace.server.api import (
    capacity_endpoint,
    chat_completions,
    collection_endpoints,
    completions,
    feedback,
    file_endpoints,
    messages,
    metered_endpoint,
    model_endpoints,
    model_options,
    request_endpoints,
    tokenize,
)
from headrace.server.api.batches import batch_endpoints, message_batch_endpoints
from headrace.server.api.conversations import conversation_endpoints
from headrace.server.api.ollama import ollama_endpoints
from headrace.server.api.responses import response_endpoints
from headrace.server.durable_state import DurableState
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.route_table import Route


class RouteSets(NamedTuple):
    public: tuple[Route, ...]  # of `server.port`
    internal: tuple[Route, ...]  # of `server.internal_port`; empty without one


def all_routes(
    context: EndpointContext, durable: DurableState, administration: Administration, lab: OnlineLab
) -> RouteSets:
    """The order is that of the OpenAPI document."""
    served = (
        *chat_completions.routes(context),
        *completions.routes(context),
        *messages.routes(context),
        *ollama_endpoints.routes(context),
        *metered_endpoint.routes(context),
        *tokenize.routes(context),
        *model_options.routes(context, lab.faster),
        *model_endpoints.routes(context),
        *capacity_endpoint.routes(context),
        *status_endpoints.routes(context),
        *request_endpoints.routes(context),
        *feedback.routes(context),
        *administration.routes(),
        *pin_routes.routes(administration, context),
        *adapter_routes.routes(administration, context),
        *reload_route.routes(administration, context),
        *worker_routes.routes(administration, context),
        *live_routes.routes(administration, context),
        *lab_routes.routes(administration, lab, currency=context.config.ledger.currency),
        *history_routes.routes(administration, context),
        *collection_endpoints.routes(context, durable.collections, durable.files),
        *canary_routes.routes(administration, lab, processes=context.config.server.processes),
        *file_endpoints.routes(context, durable.files),
        *batch_endpoints.routes(context, durable.batches),
        *message_batch_endpoints.routes(context, durable.batches, durable.files),
        *response_endpoints.routes(context, durable.history, durable.background),
        *_pipeline_routes(context),
        *conversation_endpoints.routes(context, durable.history.conversations),
        *web_pages.routes(context),
    )
    metrics = status_endpoints.metrics_route(context)
    internal = context.config.server.internal_port is not None
    described = served if internal else (*served, metrics)
    docs = openapi.routes(context, described) if context.config.server.docs else ()
    return RouteSets(served, (metrics, *docs)) if internal else RouteSets((*described, *docs), ())


def _pipeline_routes(context: EndpointContext) -> tuple[Route, ...]:
    if context.services.pipelines is None:
        return ()
    from headrace.server.api.pipelines import pipeline_endpoints  # as in server.assemble

    return pipeline_endpoints.routes(context)
