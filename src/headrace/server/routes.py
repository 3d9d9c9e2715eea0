"""The route table of the server. To add an endpoint, write a module with `routes(context)` and add its line here."""

from __future__ import annotations

from headrace.server import openapi, status_endpoints
from headrace.server.admin.administration import Administration
from headrace.server.api import (
    batch_endpoints,
    chat_completions,
    completions,
    file_endpoints,
    messages,
    metered_endpoint,
    model_endpoints,
    response_endpoints,
    tokenize,
)
from headrace.server.durable_state import DurableState
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.route_table import Route


def all_routes(context: EndpointContext, durable: DurableState, administration: Administration) -> tuple[Route, ...]:
    """The order is that of the OpenAPI document."""
    routes = (
        *chat_completions.routes(context),
        *completions.routes(context),
        *messages.routes(context),
        *metered_endpoint.routes(context),
        *tokenize.routes(context),
        *model_endpoints.routes(context),
        *status_endpoints.routes(context),
        *administration.routes(),
        *file_endpoints.routes(context, durable.files),
        *batch_endpoints.routes(context, durable.batches),
        *response_endpoints.routes(context, durable.responses),
    )
    return (*routes, *openapi.routes(context, routes)) if context.config.server.docs else routes
