"""RequestObserver: takes every finished request, once, and keeps what may be asked about it later.

Does not see prompts and answers. All of it belongs to one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.config import Config, TracesConfig
from headrace.config.environment import required_secret
from headrace.gateway.api_errors import ApiError
from headrace.gateway.ledger.prices import PriceBook
from headrace.gateway.observation.request_sample import plain_sample, sample_of
from headrace.gateway.serving.exchange import Exchange
from headrace.observe.latency.latency_book import LatencyBook, RequestSample
from headrace.observe.slo.objectives import Objective, Objectives, objectives_of
from headrace.observe.traces.request_record import RecentRequests, RequestRecord
from headrace.observe.traces.timeline import Timeline
from headrace.observe.traces.trace_exporter import TraceExporter
from headrace.version import __version__

_PROMPT_BYTES: Final = 32 * 1024  # of an exported prompt


class RequestObserver:
    def __init__(
        self,
        *,
        recent_requests: int = 1000,
        prices: PriceBook | None = None,
        most_slices: int = 512,
        objectives: Iterable[Objective] = (),
        exporter: TraceExporter | None = None,
        prompts_of: Collection[str] = (),  # tenants whose prompts are exported
    ) -> None:
        self.recent = RecentRequests(recent_requests)
        self.latencies = LatencyBook(time.monotonic, most_slices=most_slices)
        # Takes finished requests to the process that keeps them, if that is not this one.
        self.forward: Callable[[RequestRecord, RequestSample | None], None] | None = None
        self.objectives = Objectives(objectives, time.monotonic)
        # Remembers requests that clients may send feedback about.
        self.remember: Callable[[RequestRecord, RequestSample], None] | None = None
        self._prices = prices or PriceBook()
        self.exporter = exporter
        self._prompts_of = frozenset(prompts_of)

    @classmethod
    def from_config(cls, config: Config, environ: Mapping[str, str]) -> RequestObserver:
        """ConfigError where the environment lacks what the configuration names."""
        observe = config.observe
        return cls(
            recent_requests=observe.recent_requests,
            prices=PriceBook.from_config(config.prices, config.models),
            most_slices=observe.slices,
            objectives=objectives_of(config.slo),
            exporter=_exporter(observe.traces, environ),
            prompts_of=observe.traces.prompts_of,
        )

    def finish_call(
        self,
        timeline: Timeline,
        exchange: Exchange | None,
        *,
        request_id: str,
        tenant: str,
        method: str,
        endpoint: str,
        status: int,
        error: ApiError | None,
        counted: bool = True,
    ) -> RequestRecord:
        """Take a request that came over HTTP. Its timeline ends here. `exchange` is None if it asked for no text;
        `counted`: it counts for latencies all the same."""
        timeline.ended = time.monotonic()
        fields: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        sample: RequestSample | None = None
        if exchange is not None:
            stages = exchange.stages()
            fields, facts = exchange.log_line(stages), exchange.facts()
            sample = sample_of(exchange, stages, error, self._prices)
        elif counted:
            sample = plain_sample(endpoint, tenant, timeline, error)
        record = RequestRecord(
            id="" if exchange is None else exchange.id,
            request_id=request_id,
            tenant=tenant,
            method=method,
            endpoint=endpoint,
            status=status,
            error="" if error is None else error.code or error.kind,
            fields=fields,
            facts=facts,
            times=None if exchange is None else exchange.generation_times,
            timeline=timeline,
        )
        if self.exporter is not None and (exchange is not None or method != "GET"):
            if exchange is not None and (tenant or "-") in self._prompts_of:
                record.prompt = _prompt_of(exchange)
            self.exporter.take(record)
        if self.forward is not None:
            self.forward(record, sample)
        else:
            self.adopt(record, sample)
        return record

    def adopt(self, record: RequestRecord, sample: RequestSample | None) -> None:
        """Keep and count a finished request, also one of another process."""
        if record.id or record.method != "GET":  # a dashboard that polls must not push requests out
            self.recent.add(record)
        if sample is not None:
            if sample.failed or not record.error:  # what the client did wrong says nothing of the server
                sample.good = self.objectives.judge(sample)
            self.latencies.record(sample)
            if self.remember is not None:
                self.remember(record, sample)

    async def close(self) -> None:
        if self.exporter is not None:
            await self.exporter.close()

    def finish_inside(self, exchange: Exchange, error: ApiError | None) -> RequestRecord:
        """Take a request that came from inside: of a batch, or in the background."""
        return self.finish_call(
            exchange.timeline,
            exchange,
            request_id=exchange.id,
            tenant=exchange.caller.tenant,
            method="",
            endpoint=exchange.endpoint,
            status=200 if error is None else error.status,
            error=error,
        )


def _exporter(config: TracesConfig, environ: Mapping[str, str]) -> TraceExporter | None:
    if config.url is None:
        return None
    Timeline.sample = config.sample
    header = config.header_env
    authorization = "" if header is None else required_secret(environ, header, "observe.traces.header_env")
    return TraceExporter(config, version=__version__, authorization=authorization)


def _prompt_of(exchange: Exchange) -> str:
    """Return the prompt as OpenTelemetry's GenAI conventions have it: messages with parts, as JSON."""
    text_request = exchange.text_request
    given = text_request.messages or [{"role": "user", "content": str(each)} for each in text_request.prompts or ()]
    messages = [
        {"role": each.get("role"), "parts": [{"type": "text", "content": each.get("content") or ""}]} for each in given
    ]
    return msgspec.json.encode(messages)[:_PROMPT_BYTES].decode(errors="ignore")
