"""Work that writes no text on its way through limits and budgets: embeddings, ranking, scores.

Owns the order: what the work wants is reserved before anything is computed, and settled however it ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from headrace.gateway.accounts.access import choose_surface
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import as_api_error
from headrace.gateway.caches.results.vector_cache import CachedVectors
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.budgets import BudgetRefusal
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.text_evaluation import TextEvaluation

Result = TypeVar("Result")


async def run_metered(
    services: Services,
    caller: Caller,
    work: TextEvaluation,
    run: Callable[[], Awaitable[Result]],
    endpoint: str,
    *,
    model: str = "",
) -> tuple[Result, dict[str, str]]:
    """Return the result of `run`, which computes `work`, and headers beside it. ApiError if it is rejected or fails."""
    served = work.served
    if work.use_cache and services.results is not None:
        work.vector_cache = CachedVectors(services.results, caller.tenant, served)
    surface = choose_surface(caller, work.wished, "batch")
    work.on(surface)
    reservation = await services.limiter.reserve(
        services.limit_scopes.scopes(caller, served.variant, surface),
        input_tokens=work.input_tokens,
        most_output=0,
        tenant=caller.tenant,
        surface=surface,
        closed=settings_of(caller).fail == "closed",
    )
    headers = reservation.headers()
    if work.truncated:
        headers["x-headrace-truncated"] = str(len(work.truncated))
    id = secrets.token_urlsafe(18)
    ended, charged = "finished", False
    try:
        if services.ledger is not None:
            entry = LedgerEntry(
                id=id,
                tenant=caller.tenant,
                endpoint=endpoint,
                model=model or served.name,
                variant=served.name,
                key=caller.key,
                surface=surface,
                prompt_tokens=work.input_tokens,
            )
            # Another variant's vectors are of another kind, so none stands in for this one.
            verdict = await services.ledger.reserve(entry, output_tokens=0, most_tokens=0, falls=False)
            if isinstance(verdict, BudgetRefusal):
                raise verdict.error()
            charged = True
        return await run(), headers
    except BaseException as error:
        ended = as_api_error(error).kind if isinstance(error, Exception) else "gone"
        raise
    finally:
        used = replace(work.usage)
        refused = ended != "finished" and used == TokenUsage()  # before anything was computed
        if charged and services.ledger is not None:
            if refused:
                services.ledger.release(id)
            else:
                services.ledger.charge(id, used, ended=ended)
        if refused:
            reservation.release_soon()
        else:
            reservation.settle_soon(used.prompt_tokens, 0, whole=False)
