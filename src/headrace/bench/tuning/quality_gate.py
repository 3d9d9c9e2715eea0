"""The gate of lossy levels: the divergence of a setting's predictions from the reference's, on your own prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.bench.evaluation.documents import Document
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.tuning.search import Gate
from headrace.errors import RequestError
from headrace.variant import Variant

# A further gate of the answers themselves: the candidate, and the reference. headrace.lab has one.
AnswersGate = Callable[[Variant, Variant], Gate]


class GateRules(msgspec.Struct, frozen=True, kw_only=True):
    most_kl: float = 0.02  # nats per token, at the high end of the interval
    least_agreement: float = 0.95  # of the likeliest tokens, at the low end
    most_perplexity: float = 0.02  # relative change, at the high end
    tokens: int = 2000  # scored


def pass_gate(
    variant: Variant, reference: Variant, prompts: Sequence[Document], rules: GateRules, *, source: str
) -> Gate:
    """Compare. A model with another tokenizer fails, because its predictions cannot be compared."""
    try:
        report = evaluate_variants(
            prompts,
            [variant],
            source=source,
            reference=reference,
            options=EvaluationOptions(tokens=rules.tokens, speed=False),
        )
    except RequestError as error:
        return Gate(passed=False, reason=str(error))
    distance = report.variants[-1].distance
    assert distance is not None
    kl = distance.kl.value if distance.kl.high is None else distance.kl.high
    agreement = distance.top1.value if distance.top1.low is None else distance.top1.low
    change = distance.perplexity_change.value
    if distance.perplexity_change.high is not None:
        change = distance.perplexity_change.high
    failed = [
        text
        for bad, text in (
            (kl > rules.most_kl, f"KL up to {kl:.4f}, at most {rules.most_kl:g}"),
            (
                agreement < rules.least_agreement,
                f"the likeliest token agrees for {agreement:.1%} at least, wanted {rules.least_agreement:.1%}",
            ),
            (change > rules.most_perplexity, f"perplexity up to {change:+.2%}, at most {rules.most_perplexity:+.2%}"),
        )
        if bad
    ]
    passed = f"KL up to {kl:.4f}, likeliest token agrees for {agreement:.1%}, perplexity {change:+.2%}"
    return Gate(
        passed=not failed,
        reason="; ".join(failed) or passed,
        figures={"kl": kl, "agreement": agreement, "perplexity_change": change, "tokens": float(report.tokens)},
    )
