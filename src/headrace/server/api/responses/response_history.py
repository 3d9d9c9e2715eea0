"""ResponseHistory: the stored responses and conversations that a request may continue, and where its answer is kept.

Decides when an answer is kept: before the client hears of its end, so that it can continue it at once. The stores keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import Choice, TextRequest
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.conversations.conversation_store import ConversationStore
from headrace.server.api.response_store import ResponseStore
from headrace.server.api.responses.responses import (
    UNFINISHED,
    ResponseRequest,
    ResponseStream,
    response_body,
    unfinished_items,
    with_history,
)
from headrace.server.api.responses.responses_parameters import RESPONSE_PARAMETERS
from headrace.server.api.text_endpoint import Dialect

log = structlog.stdlib.get_logger("headrace.responses")


class ResponseHistory:
    def __init__(self, responses: ResponseStore, conversations: ConversationStore) -> None:
        self.responses = responses
        self.conversations = conversations

    async def with_earlier(self, found: ResponseRequest, tenant: str) -> ResponseRequest:
        """Return a request with the items of the response or the conversation that it continues."""
        if found.conversation is not None:
            # One more than is allowed, so that `with_history` rejects a conversation that is too long.
            items = await self.conversations.first_items(found.conversation, tenant, found.max_items + 1)
            return with_history(found, items)
        if found.previous is None:
            return found
        earlier = await self.responses.get(found.previous, tenant)
        if earlier.body["status"] in UNFINISHED:
            raise ApiError(
                f"The response of 'previous_response_id' is {earlier.body['status']}. Continue it when it has ended.",
                parameter="previous_response_id",
                code="response_not_ended",
                status=409,
            )
        return with_history(found, [*earlier.items, *earlier.body["output"]])

    async def keep(self, request: ResponseRequest, tenant: str, body: dict[str, Any]) -> None:
        """Keep an answer where the request wants it. One that cannot be kept is not lost: its body says so."""
        if request.conversation is not None:
            try:
                await self.conversations.append(request.conversation, tenant, [*request.new_items, *body["output"]])
            except ApiError as error:
                log.warning("a response was not added to its conversation", reason=error.message)
                body["conversation"] = None
        if not request.store:
            return
        try:
            if request.background:
                await self.responses.finish(body["id"], tenant, body)
            else:
                await self.responses.put(body["id"], tenant, request.items, body)
        except ApiError as error:
            log.warning("a response was not kept", reason=error.message)
            body["store"] = False


class KeptAnswer:
    """The dialect of one response, which keeps its answer."""

    def __init__(self, request: ResponseRequest, history: ResponseHistory, tenant: str) -> None:
        self._request = request
        self._history = history
        self._tenant = tenant
        self._body: dict[str, Any] | None = None
        self._stream: ResponseStream | None = None
        self._cut: list[dict[str, Any]] = []

    def dialect(self) -> Dialect:
        return Dialect(
            "response", RESPONSE_PARAMETERS, self._read, self._whole, self._events, keep=self._keep, cut=self._note_cut
        )

    def output_so_far(self) -> list[dict[str, Any]]:
        """Return the output of an answer that did not end by itself."""
        return self._cut if self._stream is None else self._stream.unfinished_items()

    def _read(self, *_: object) -> TextRequest:
        return self._request.text_request

    def _whole(self, exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
        self._body = response_body(exchange, choices, self._request)
        return self._body

    def _events(self, exchange: Exchange) -> EventWriter:
        self._stream = ResponseStream(exchange, self._request)
        return self._stream

    def _note_cut(self, choices: Sequence[Choice]) -> None:
        self._cut = unfinished_items(choices[0], self._request.tools)

    async def _keep(self) -> None:
        body = self._body if self._stream is None else self._stream.response
        if body is not None:
            await self._history.keep(self._request, self._tenant, body)
