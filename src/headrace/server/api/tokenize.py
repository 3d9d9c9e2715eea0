"""`/tokenize` and `/detokenize`: their parameters and answers.

An upstream's model can be tokenised only if its configuration names a tokenizer, and only as well as that one fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from headrace.config import RequestLimits
from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.images.message_images import images_of
from headrace.gateway.serving.engine_answering import reads_no_images, tokens_of
from headrace.gateway.serving.served_variant import ServedVariant, no_tokens
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.api.chat_completions import ChatInputMessage, template_messages
from headrace.server.api.common_parameters import MODEL
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_LIMITS: Final = RequestLimits()
_DECODED_AT_ONCE: Final = 1024  # tokens; more are decoded in a thread

TOKENIZE_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "prompt": Parameter("Text to tokenise, instead of `messages`.", str),
    "messages": Parameter(
        "Chat to tokenise with the model's template, instead of `prompt`.",
        Annotated[list[ChatInputMessage], Meta(min_length=1)],
        limit="messages",
    ),
    "add_generation_prompt": Parameter("Ends the chat where the model's turn begins. Default: true.", bool),
    "add_special_tokens": Parameter("Adds the model's special tokens to the text. Default: true.", bool),
    "return_token_strs": Parameter("Returns each token's text too.", bool),
}
DETOKENIZE_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "tokens": Parameter("Token ids.", list[Annotated[int, Meta(ge=0)]], required=True),
}


async def tokenize(served: ServedVariant, given: Mapping[str, Any]) -> dict[str, Any]:
    if ("prompt" in given) == ("messages" in given):
        raise invalid_request("Send either 'prompt' or 'messages'.", "prompt")
    tokenizer = served.own_tokenizer
    if tokenizer is None:
        raise no_tokens(served.name)
    if "messages" in given:
        ends = given.get("add_generation_prompt", True)
        messages, reader = template_messages(given["messages"], _LIMITS), served.images
        images = images_of(messages)
        if images and reader is None:
            raise reads_no_images(served)
        shown = messages if reader is None else reader.template_messages(messages)

        def shaped() -> str:
            text = tokenizer.apply_template(shown, add_generation_prompt=ends)
            return text if reader is None or not images else reader.framed(text)

        text = await asyncio.to_thread(shaped)  # many messages take long
        tokens = await tokens_of(served, text, "messages", whole=True)
        if images and reader is not None:
            tokens, _ = reader.placed(tokens, await reader.measured(images))
    else:
        whole = not given.get("add_special_tokens", True)
        prompt = served.prompt_text(given["prompt"])
        tokens = await tokens_of(served, prompt, "prompt", whole=whole) if prompt else ()
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.known_context, "tokens": list(tokens)}
    if given.get("return_token_strs"):
        found["token_strs"] = await asyncio.to_thread(_token_texts, tokenizer, tokens)
    return found


def _token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


async def detokenize(served: ServedVariant, given: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer, tokens = served.own_tokenizer, given["tokens"]
    if tokenizer is None:
        raise no_tokens(served.name)
    most = served.known_context
    if most and len(tokens) > most:
        raise invalid_request(
            f"'tokens' has {len(tokens)} ids. Expected at most {most}, the context of '{served.name}'.", "tokens"
        )
    if tokens and max(tokens) >= tokenizer.vocab_size:
        raise invalid_request(
            f"'tokens' has the id {max(tokens)}. Expected at most {tokenizer.vocab_size - 1}.", "tokens"
        )
    if len(tokens) <= _DECODED_AT_ONCE:
        return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}
    return {"prompt": await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=False)}


def routes(context: EndpointContext) -> tuple[Route, ...]:
    return (
        _route(context, "/tokenize", TOKENIZE_PARAMETERS, tokenize, "Turn a text or a chat into tokens."),
        _route(context, "/detokenize", DETOKENIZE_PARAMETERS, detokenize, "Turn tokens into a text."),
    )


def _route(
    context: EndpointContext,
    path: str,
    table: ParameterTable,
    convert: Callable[[ServedVariant, Mapping[str, Any]], Awaitable[dict[str, Any]]],
    about: str,
) -> Route:
    async def handler(call: ApiCall) -> None:
        given = await context.parameters(call, table)
        served = find_model(call.caller, context.services.fleet, given.get("model", ""))
        await context.reply(call, Response.json(await convert(served, given)))

    return Route("POST", path, handler, about, table, lenient=True)
