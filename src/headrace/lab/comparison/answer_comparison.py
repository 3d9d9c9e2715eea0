"""Compares pairs of answers by every metric. Pure: the same pairs give the same results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headrace.gateway.language_detection import language_of
from headrace.lab.comparison.answer import Answer, AnswerContext
from headrace.lab.comparison.citations import CheckedCitations, check_citations
from headrace.lab.comparison.factual_consistency import FactCheck, check_facts
from headrace.lab.comparison.json_diff import JsonDiff, diff_json, parse_json
from headrace.lab.comparison.refusals import is_refusal
from headrace.lab.comparison.similarity import LexicalSimilarity, Similarity
from headrace.lab.comparison.tool_calls import ToolDiff, diff_calls


class AnswerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """How a candidate's answer differs from the baseline's. None: the metric does not apply to this prompt."""

    exact: bool  # same text and same tool calls
    similarity: float  # 0 to 1
    similarity_by: str  # the measure's name
    json: JsonDiff | None = None
    tools: ToolDiff | None = None
    candidate_citations: CheckedCitations | None = None
    baseline_citations: CheckedCitations | None = None
    candidate_facts: FactCheck | None = None  # None without sources
    baseline_facts: FactCheck | None = None
    candidate_refuses: bool = False
    baseline_refuses: bool = False
    candidate_language: str = ""  # empty: too short to tell
    baseline_language: str = ""
    length_log_ratio: float = 0.0  # log of candidate / baseline, in output tokens or else in characters
    ttft_log_ratio: float | None = None
    e2el_log_ratio: float | None = None
    tpot_log_ratio: float | None = None
    cost_log_ratio: float | None = None
    candidate_failed: bool = False
    baseline_failed: bool = False

    @property
    def same_language(self) -> bool | None:
        """None if the language of either answer is not known."""
        if not (self.candidate_language and self.baseline_language):
            return None
        return self.candidate_language == self.baseline_language


def compare_answers(
    candidate: Answer, baseline: Answer, context: AnswerContext | None = None, similarity: Similarity | None = None
) -> AnswerComparison:
    """Compare one pair. For many, `compare_all` embeds them together."""
    return compare_all([(candidate, baseline, context or AnswerContext())], similarity)[0]


def compare_all(
    pairs: Sequence[tuple[Answer, Answer, AnswerContext]], similarity: Similarity | None = None
) -> list[AnswerComparison]:
    """Compare pairs of candidate and baseline. Without `similarity`, the lexical measure is used."""
    measure = similarity or LexicalSimilarity()
    alike = measure.of([(candidate.text, baseline.text) for candidate, baseline, _ in pairs])
    return [
        _compare(candidate, baseline, context, score, measure.name)
        for (candidate, baseline, context), score in zip(pairs, alike, strict=True)
    ]


def _compare(candidate: Answer, baseline: Answer, context: AnswerContext, score: float, by: str) -> AnswerComparison:
    tools = diff_calls(baseline.calls, candidate.calls)
    exact = candidate.text == baseline.text and (tools is None or tools.same) and candidate.error == baseline.error
    texts = [context.prompt, *(source.text for source in context.sources)]
    has_sources = bool(context.sources)
    return AnswerComparison(
        exact=exact,
        similarity=score,
        similarity_by=by,
        json=_json(candidate, baseline, context),
        tools=tools,
        candidate_citations=check_citations(candidate.text, context.sources),
        baseline_citations=check_citations(baseline.text, context.sources),
        candidate_facts=check_facts(candidate.text, texts) if has_sources else None,
        baseline_facts=check_facts(baseline.text, texts) if has_sources else None,
        candidate_refuses=is_refusal(candidate.text),
        baseline_refuses=is_refusal(baseline.text),
        candidate_language=language_of(candidate.text),
        baseline_language=language_of(baseline.text),
        length_log_ratio=_length(candidate, baseline),
        ttft_log_ratio=_log_ratio(candidate.ttft_s, baseline.ttft_s),
        e2el_log_ratio=_log_ratio(candidate.e2el_s, baseline.e2el_s),
        tpot_log_ratio=_log_ratio(candidate.tpot_s, baseline.tpot_s),
        cost_log_ratio=_log_ratio(candidate.cost_micros, baseline.cost_micros),
        candidate_failed=bool(candidate.error),
        baseline_failed=bool(baseline.error),
    )


def _json(candidate: Answer, baseline: Answer, context: AnswerContext) -> JsonDiff | None:
    """Compare as JSON if the prompt asks for it, or if the baseline's answer is an object or an array."""
    if not (context.wants_json or context.schema is not None):
        valid, value = parse_json(baseline.text)
        if not (valid and isinstance(value, dict | list)):
            return None
    return diff_json(baseline.text, candidate.text, context.schema)


def _length(candidate: Answer, baseline: Answer) -> float:
    if candidate.output_tokens and baseline.output_tokens:
        return math.log(candidate.output_tokens / baseline.output_tokens)
    return math.log((len(candidate.text) + 1) / (len(baseline.text) + 1))


def _log_ratio(candidate: float | None, baseline: float | None) -> float | None:
    if candidate is None or baseline is None or candidate <= 0 or baseline <= 0:
        return None
    return math.log(candidate / baseline)
