"""ModelAccess: the served models as pipelines use them: text through the gateway's flow, and scores metered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.errors import RequestError
from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.shaping.message_fitting import number_sources, text_token_counter
from headrace.gateway.flow.answer_flow import AnswerFlow
from headrace.gateway.flow.metered_evaluation import run_metered
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.text_flow import TextFlow
from headrace.gateway.ledger.prices import Price, microseconds
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.pinned_prompts import PrefixKeeper
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.text_evaluation import TextEvaluation
from headrace.observe.traces.timeline import Timeline
from headrace.pipelines.collections.encoder import unit_rows

_CUT: Final = {"truncate": True}  # a passage that is too long is ranked by its beginning


class ModelAccess:
    def __init__(self, services: Services) -> None:
        self._services = services

    def find(self, caller: Caller, name: str) -> ServedVariant:
        return find_model(caller, self._services.fleet, name)

    def open(self, whole: Exchange, request: TextRequest, *, shares_timeline: bool = False) -> AnswerFlow:
        """Return the flow of one model call of a pipeline. Settle it, however it ends.

        `shares_timeline`: its stages are those of the pipeline's own trace.
        """
        exchange = Exchange(
            caller=whole.caller,
            text_request=request,
            served=self.find(whole.caller, request.model),
            endpoint=whole.endpoint,
            arrival=whole.arrival,
            timeline=whole.timeline if shares_timeline else Timeline(),
        )
        return TextFlow(exchange, self._services)

    async def shared_tokens(self, caller: Caller, requests: Sequence[TextRequest]) -> tuple[int, ...]:
        """Return the tokens that the prompts of all these requests begin with. ApiError if one cannot be written."""
        prompts: list[tuple[int, ...]] = []
        for request in requests:
            served = self.find(caller, request.model)
            if served.upstream is not None:
                raise ApiError(f"'{served.name}' is an upstream, whose prompts are not known.")
            written, _ = number_sources(request, served, self._services.shaping)
            (prompt,) = await prompts_of(Exchange(caller=caller, text_request=written, served=served))
            prompts.append(prompt.tokens)
        shared = 0
        for tokens in zip(*prompts, strict=False):
            if len(set(tokens)) > 1:
                break
            shared += 1
        return prompts[0][:shared]

    async def keep_prefix(self, caller: Caller, name: str, tokens: Sequence[int], *, keep: bool, owner: str) -> None:
        """Have the engines of a variant keep a prefix of the caller's tenant for an owner, or let it go. HeadraceError
        if they cannot."""
        engine = self.find(caller, name).engine
        if not isinstance(engine, PrefixKeeper):
            raise RequestError(f"The engine of '{name}' keeps no prefixes.")
        await engine.pin(tokens, caller.tenant, keep=keep, owner=owner)

    async def rank(self, whole: Exchange, name: str, query: str, texts: Sequence[str], surface: str) -> list[float]:
        """Return a score for each text: a reranker's, or the cosine of embeddings."""
        served = self.find(whole.caller, name)
        work = TextEvaluation(served, whole.caller, {**_CUT, "surface": surface})
        ranking = served.ranking
        if ranking is not None:
            await work.take_pairs(ranking, query, texts)
        else:
            await work.take({"query": query}, prompt_name="query")
            named = {f"documents[{place}]": text for place, text in enumerate(texts)}
            await work.take(named, prompt_name="document")
        vectors, _ = await run_metered(self._services, whole.caller, work, work.vectors, whole.endpoint)
        if not self._services.prices.is_empty:
            used = work.usage
            machine_us = microseconds(used.prefill_s + used.decode_s)
            whole.add_cost(self.price(served.name).micros(used.prompt_tokens, used.cached_tokens, 0, machine_us))
        if ranking is not None:
            return [ranking.score(vector) for vector in vectors.tolist()]
        rows = unit_rows(vectors)
        return (rows[1:] @ rows[0]).tolist()

    def token_counter(self, caller: Caller, name: str) -> Callable[[str], int]:
        return text_token_counter(self.find(caller, name))

    def price(self, name: str) -> Price:
        return self._services.prices.of(name)
