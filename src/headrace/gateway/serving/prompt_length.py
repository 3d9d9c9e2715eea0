"""The length of an exchange's prompts in tokens, whether an engine or an upstream counts them."""

from __future__ import annotations

from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers import upstream_generation
from headrace.gateway.serving.upstream_answers.upstream_usage import estimate_prompt_tokens, prompt_bytes


async def prompt_tokens(exchange: Exchange) -> int:
    """ApiError where the prompt is invalid or does not fit."""
    upstream = exchange.served.upstream
    if upstream is not None:
        return sum(await upstream_generation.count_prompt_tokens(exchange, upstream))
    return sum(len(prompt.tokens) for prompt in await prompts_of(exchange))


def estimated_prompt_tokens(text_request: TextRequest) -> int:
    """Estimate the tokens of a request's prompts from their bytes, at once."""
    return estimate_prompt_tokens(prompt_bytes(text_request), len(text_request.messages or ()))
