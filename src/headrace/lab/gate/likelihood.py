"""How likely the candidate finds the baseline's own answers: perplexity, KL and top-1 agreement on your prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.bench.evaluation.documents import Document
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.evaluation.evaluation_report import Distance
from headrace.errors import HeadraceError
from headrace.lab.cases.case import COMPLETIONS, Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.gate.metrics import Judged
from headrace.variant import Variant


class LikelihoodError(HeadraceError):
    """Two models cannot be compared token by token."""


def answer_likelihood(
    judged: Sequence[Judged], candidate: Variant, baseline: Variant, *, tokens: int, seed: int = 0
) -> tuple[Distance, int]:
    """Score the baseline's answers after their prompts. LikelihoodError for different tokenizers, or without texts."""
    documents = [
        document
        for each in judged
        if (document := document_of(each.case, each.baseline)) is not None and not each.baseline.error
    ]
    if not documents:
        raise LikelihoodError("no baseline answer has a text.")
    options = EvaluationOptions(tokens=tokens, seed=seed, speed=False)
    try:
        report = evaluate_variants(documents, [candidate], source="answers", reference=baseline, options=options)
    except HeadraceError as error:
        raise LikelihoodError(str(error)) from None
    distance = report.variants[-1].distance
    if distance is None:
        raise LikelihoodError("there is no reference.")
    return distance, report.tokens


def document_of(case: Case, answer: Answer) -> Document | None:
    """Return the prompt with the answer, of which the answer is scored; None if that is not a plain text."""
    if not answer.text or case.choices or answer.calls:
        return None
    if case.endpoint == COMPLETIONS:
        prompt = case.body.get("prompt")
        return Document(prompt=prompt, completion=answer.text) if isinstance(prompt, str) else None
    messages: list[dict[str, Any]] = case.body["messages"]
    if case.body.get("tools") or any(not isinstance(each.get("content"), str) for each in messages):
        return None
    plain = [{"role": str(each["role"]), "content": each["content"]} for each in messages]
    return Document(messages=[*plain, {"role": "assistant", "content": answer.text}])
