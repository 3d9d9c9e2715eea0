"""RunState: one run of a pipeline with the result of each stage, and what an answer reports of it. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.config.pipeline_section import PipelineConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_flow import AnswerFlow
from headrace.gateway.requests.text_request import FinishReason, SourceText, TokenUsage
from headrace.gateway.serving.exchange import Exchange
from headrace.pipelines.citation_check import CitationCheck
from headrace.pipelines.collections.hits import Hit, QueryVector, SearchableCollection
from headrace.pipelines.retrieval import source_entry

STALE_S: Final = 3600.0  # seconds an old result stays of use to a late stage, from when it was stored


class StageReport(msgspec.Struct):
    """What became of one stage."""

    stage: str
    outcome: str  # done, fewer, cached, skipped, stopped, failed
    ms: float
    budget_ms: float
    why: str = ""  # late, an error's code, no_input, not_allowed
    details: Mapping[str, Any] = {}

    def described(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "stage": self.stage,
            "outcome": self.outcome,
            "ms": round(self.ms, 3),
            "budget_ms": round(self.budget_ms, 3),
        }
        if self.why:
            entry["why"] = self.why
        return {**entry, **self.details}


class PendingApproval(msgspec.Struct, frozen=True):
    """A call of a tool with effects that the client has not approved."""

    tool: str
    arguments: Mapping[str, Any]
    token: str
    expires: int  # seconds since the epoch

    def described(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "arguments": dict(self.arguments),
            "token": self.token,
            "expires_at": self.expires,
        }


class RunState(msgspec.Struct):
    """All of it belongs to one event loop. Times are seconds on the run's clock."""

    name: str  # of the pipeline
    model: str  # the variant that answers
    config: PipelineConfig
    exchange: Exchange
    question: str
    began: float
    deadline: float
    surface: str
    gone: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    collection: SearchableCollection | None = None  # that it searches, once it is open
    vector: QueryVector | None = None  # of the question
    hits: list[Hit] = []
    ranked: list[float] = []  # scores of the first hits, as far as the rerank stage has come
    sources: tuple[SourceText, ...] = ()  # by their numbers: the first is [1]
    source_entries: list[dict[str, Any]] = []
    citations: CitationCheck | None = None
    reports: list[StageReport] = []
    usages: list[TokenUsage] = []  # of every model call
    open_flows: list[AnswerFlow] = []  # model calls that are not settled
    is_charged: bool = False  # a model call counts towards the limits on requests
    answer_exchange: Exchange | None = None  # of the call that wrote the answer
    finish: FinishReason = "stop"
    broken: ApiError | None = None  # what ended the answer in its midst
    is_extracted: bool = False  # the answer consists of sentences of the sources
    is_unanswered: bool = False  # nothing was known in time: the answer is generate.no_answer
    answered_by: str = ""  # cache, extract, small or large, in popular-answer mode
    conclusion: str = ""  # what ended the tools' loop: answered, or the budget that ran out
    agent: dict[str, Any] = {}  # the loop's steps and calls
    draft: str = ""  # what the loop's model answered itself
    approvals: list[PendingApproval] = []
    followups: list[str] = []
    text: str = ""  # the answer as delivered
    sentences: list[str] = []  # as delivered

    @property
    def skipped(self) -> list[str]:
        """The stages that did not do their work, or not all of it."""
        return [report.stage for report in self.reports if report.outcome != "done" and report.why != "no_input"]

    def show_sources(self, sources: Sequence[SourceText]) -> None:
        """Set the sources that the model reads."""
        self.sources = tuple(sources)
        hits = {hit.id: hit for hit in self.hits}
        self.source_entries = [
            source_entry(number, hits[each.id])
            if each.id in hits
            else {"number": number, "id": each.id, "source": each.id, "text": each.text}
            for number, each in enumerate(self.sources, start=1)
        ]

    def report(self, now: float) -> dict[str, Any]:
        """Return what the answer's `headrace` field tells of the pipeline."""
        told: dict[str, Any] = {
            "name": self.name,
            "run": self.exchange.id,
            "deadline_ms": round((self.deadline - self.began) * 1e3, 3),
            "left_ms": round((self.deadline - now) * 1e3, 3),
            "stages": [report.described() for report in self.reports],
            "skipped": self.skipped,
        }
        if self.answered_by:
            told["answered_by"] = self.answered_by
        if self.conclusion:
            told["conclusion"] = self.conclusion
            told["agent"] = self.agent
        if self.approvals:
            told["approvals"] = [each.described() for each in self.approvals]
        if self.config.mode == "answer-first":
            told["detail"] = "given" if self.exchange.text_request.pipeline.detail else "available"
        return told
