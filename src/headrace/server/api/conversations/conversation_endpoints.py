"""`/v1/conversations`: conversations and their items, which responses continue. ConversationStore keeps them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from headrace.server.api.conversations.conversation_store import ConversationStore
from headrace.server.api.list_query import parse_list_query
from headrace.server.api.response_items import parse_items
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_PATH: Final = "/v1/conversations"
_ITEMS: Final = 20  # items of one request, as at OpenAI
_METADATA: Final = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
_ITEM_LIST: Final = Annotated[list[dict[str, Any]], Meta(max_length=_ITEMS)]

CONVERSATION_PARAMETERS: Final[ParameterTable] = {
    "items": Parameter(f"First items of the conversation, at most {_ITEMS}.", _ITEM_LIST),
    "metadata": Parameter("Pairs of texts to keep with the conversation.", _METADATA),
}
CONVERSATION_UPDATE_PARAMETERS: Final[ParameterTable] = {
    "metadata": Parameter("Pairs of texts. They replace the earlier ones.", _METADATA, required=True),
}
ITEMS_PARAMETERS: Final[ParameterTable] = {
    "items": Parameter(
        f"Items to add at the end, at most {_ITEMS}, as `input` of /v1/responses takes them.", _ITEM_LIST, required=True
    ),
}


def routes(context: EndpointContext, store: ConversationStore) -> tuple[Route, ...]:
    limits = context.config.limits

    async def create(call: ApiCall) -> None:
        # Clients may send no body at all, because each parameter is optional.
        given = await context.parameters(call, CONVERSATION_PARAMETERS, optional=True)
        items = parse_items(given.get("items", []), limits, least=0, name="items", unknown=call.unknown)
        made = await store.create(call.caller.tenant, items, given.get("metadata", {}))
        await context.reply(call, Response.json(made.as_json()))

    async def retrieve(call: ApiCall) -> None:
        found = await store.get(call.params["conversation"], call.caller.tenant)
        await context.reply(call, Response.json(found.as_json()))

    async def update(call: ApiCall) -> None:
        given = await context.parameters(call, CONVERSATION_UPDATE_PARAMETERS)
        changed = await store.update(call.params["conversation"], call.caller.tenant, given["metadata"])
        await context.reply(call, Response.json(changed.as_json()))

    async def delete(call: ApiCall) -> None:
        id = call.params["conversation"]
        await store.delete(id, call.caller.tenant)
        await context.reply(call, Response.json({"id": id, "object": "conversation.deleted", "deleted": True}))

    async def add_items(call: ApiCall) -> None:
        given = await context.parameters(call, ITEMS_PARAMETERS)
        items = parse_items(given["items"], limits, least=1, name="items", unknown=call.unknown)
        added = await store.append(call.params["conversation"], call.caller.tenant, items)
        listed = {"data": added, "first_id": added[0]["id"], "last_id": added[-1]["id"], "has_more": False}
        await context.reply(call, Response.json({"object": "list", **listed}))

    async def list_items(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order"))
        page = await store.items(call.params["conversation"], call.caller.tenant, **query)
        await context.reply(call, Response.json(page.as_json(lambda item: item)))

    async def retrieve_item(call: ApiCall) -> None:
        item = await store.item(call.params["conversation"], call.caller.tenant, call.params["item"])
        await context.reply(call, Response.json(item))

    async def delete_item(call: ApiCall) -> None:
        left = await store.delete_item(call.params["conversation"], call.caller.tenant, call.params["item"])
        await context.reply(call, Response.json(left.as_json()))

    one, items = f"{_PATH}/{{conversation}}", f"{_PATH}/{{conversation}}/items"
    return (
        Route(
            "POST",
            _PATH,
            create,
            "Create a conversation that responses continue.",
            CONVERSATION_PARAMETERS,
            lenient=True,
        ),
        Route("GET", one, retrieve, "Retrieve a conversation."),
        Route("POST", one, update, "Replace a conversation's metadata.", CONVERSATION_UPDATE_PARAMETERS, lenient=True),
        Route("DELETE", one, delete, "Delete a conversation with its items."),
        Route("POST", items, add_items, "Add items to a conversation.", ITEMS_PARAMETERS, lenient=True),
        Route("GET", items, list_items, "List a conversation's items."),
        Route("GET", f"{items}/{{item}}", retrieve_item, "Retrieve one item."),
        Route("DELETE", f"{items}/{{item}}", delete_item, "Delete one item."),
    )
