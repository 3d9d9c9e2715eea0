"""BatchRunner: answers one request of a batch, by the dialect of its endpoint. Batches schedules and records them."""

from __future__ import annotations

import json
from typing import Any, Final

from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import invalid_request
from headrace.server.api.batches.batches import BatchOwner
from headrace.server.api.chat_completions import CHAT_DIALECT
from headrace.server.api.completions import COMPLETION_DIALECT
from headrace.server.api.messages import MESSAGES_DIALECT
from headrace.server.api.metered_endpoint import run_prepared
from headrace.server.api.responses.response_history import KeptAnswer, ResponseHistory
from headrace.server.api.responses.responses import read_response_request
from headrace.server.api.text_endpoint import answer_in_full
from headrace.server.api.vectors import METERED_CALLS
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.body_parameters import parse_parameters

# Text endpoints that batches may use, beside /v1/responses.
_DIALECTS: Final = {
    "/v1/chat/completions": CHAT_DIALECT,
    "/v1/completions": COMPLETION_DIALECT,
    "/v1/messages": MESSAGES_DIALECT,
}


class BatchRunner:
    def __init__(self, context: EndpointContext, history: ResponseHistory) -> None:
        self._context = context
        self._history = history

    async def run(
        self, url: str, body: dict[str, Any], owner: BatchOwner, batch: str, custom_id: str
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the answer. Raises for a request that is refused or fails."""
        context = self._context
        services, limits, unknown = context.services, context.config.limits, context.unknown_fields({})
        caller = services.accounts.directory.on_behalf(owner.tenant, key=owner.key or None, surface="batch")
        if body.get("stream"):
            raise invalid_request("A batch cannot stream. Set 'stream' to false or leave it out.", "stream")
        if url in METERED_CALLS:
            metered = METERED_CALLS[url]
            given = parse_parameters(body, metered.table, unknown)
            model = given.get("model", "")
            served = find_model(caller, services.fleet, model)
            prepared = await metered.prepare(served, caller, given, limits)
            answer, _ = await run_prepared(services, caller, prepared, url, model=model)
            return 200, answer
        encoded = json.dumps(body).encode()
        if url == "/v1/responses":
            if body.get("background"):
                raise invalid_request("A batch runs in the background anyway. Leave 'background' out.", "background")
            found = await context.parse(
                owner.tenant, encoded, lambda raw: read_response_request(raw, {}, limits, unknown)
            )
            request = await self._history.with_earlier(found, owner.tenant)
            dialect = KeptAnswer(request, self._history, owner.tenant).dialect()
            text_request = request.text_request
        else:
            dialect = _DIALECTS[url]
            text_request = await context.parse(
                owner.tenant, encoded, lambda raw: dialect.read(raw, {}, limits, unknown)
            )
        text_request = text_request.but(surface=text_request.surface or "batch")
        return 200, await answer_in_full(context.exchange(caller, text_request, url), dialect, services)
