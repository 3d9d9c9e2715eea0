"""The entries of the semantic cache, and which answers may become one. Knows no questions but as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.gateway.caches.semantic.thresholds import Evidence
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest, TokenUsage


class StoredAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A complete answer."""

    content: str
    reasoning: str = ""
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of these
    machine_s: float = 0.0  # compute time of the generation

    def pieces(self, *, prompt_tokens: int = 0) -> list[ChoiceDelta]:
        """Return the deltas of one choice. `prompt_tokens`: of the request that gets them."""
        usage = TokenUsage(prompt_tokens, self.output_tokens, reasoning_tokens=self.reasoning_tokens)
        return [
            ChoiceDelta(0, content=self.content, reasoning=self.reasoning),
            ChoiceDelta(0, finish="stop", usage=usage),
        ]


class SemanticEntry(msgspec.Struct):
    id: int
    digest: bytes
    question: str
    answer: StoredAnswer
    tags: frozenset[str]
    created: float  # seconds since 1970
    expires: float
    hits: int = 0
    evidence: Evidence = msgspec.field(default_factory=Evidence)

    @property
    def nbytes(self) -> int:
        """The bytes of its texts, without its vector."""
        return len(self.question.encode()) + len(self.answer.content.encode()) + len(self.answer.reasoning.encode())


def storable_answer(choices: Sequence[Choice]) -> StoredAnswer | None:
    """Return what may be stored of an answer; None if it was cut, calls tools or is empty."""
    if len(choices) != 1:
        return None
    choice = choices[0]
    if choice.finish != "stop" or choice.calls or not choice.content.strip():
        return None
    used = choice.usage
    return StoredAnswer(
        choice.content,
        choice.reasoning,
        used.output_tokens,
        used.reasoning_tokens,
        round(used.prefill_s + used.decode_s, 6),
    )


def with_example(text_request: TextRequest, entry: SemanticEntry) -> TextRequest:
    """Insert the stored question and answer as an example turn before the user's own."""
    assert text_request.messages is not None
    example = [{"role": "user", "content": entry.question}, {"role": "assistant", "content": entry.answer.content}]
    return text_request.but(messages=[*text_request.messages[:-1], *example, text_request.messages[-1]])
