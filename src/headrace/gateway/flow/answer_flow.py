"""AnswerFlow: what an endpoint needs of the way of one answer, be it one model's (TextFlow) or a pipeline's.

A pipeline is a client of TextFlow. It is named as a model, `pipeline/NAME`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TakeDelta
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration

PIPELINE_PREFIX: Final = "pipeline/"  # of the model names that mean pipelines


class AnswerFlow(Protocol):
    """See TextFlow for what each does."""

    exchange: Exchange

    @property
    def is_client_gone(self) -> bool: ...

    @property
    def is_charged(self) -> bool: ...

    async def begin(self) -> None: ...

    async def run(self, take: TakeDelta) -> bool: ...

    def relayed(self) -> UpstreamGeneration | None: ...

    def headers(self) -> dict[str, str]: ...

    def cancel(self) -> None: ...

    def settle(self, error: ApiError | None = None) -> None: ...


class PipelineHost(Protocol):
    """The declared pipelines."""

    def find(self, caller: Caller, name: str) -> ServedVariant:
        """Return the variant that answers, under the pipeline's name. ApiError if the caller may not use it."""
        ...

    def open(self, exchange: Exchange) -> AnswerFlow: ...

    def model_entries(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...
