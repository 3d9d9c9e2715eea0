"""What is asked of the engine, and how far one sequence of it has come.

Owns GenerationRequest (fixed once it is made), SequenceState (one of a request's `n`, changed by the scheduler and the
engine as steps go by) and FinishReason (how a sequence ended). Knows no blocks, no clock and no hardware.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.engine.interface.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.interface.grammar_spec import Grammar

RequestKind = Literal["generate", "score", "embed"]


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id, a stop string, a finished grammar; for scoring and embedding: done
    LENGTH = "length"  # max_tokens, or the context is full
    DEADLINE = "deadline"  # cut with what there is
    CANCELLED = "cancelled"
    FAILED = "failed"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    prompt: tuple[int, ...]
    kind: RequestKind = "generate"  # score: log-probabilities of the prompt's tokens, nothing new; embed: hidden states
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    max_tokens: int = 256
    min_tokens: int = 0  # no stop before: stop ids are masked, stop strings ignored
    stop_ids: frozenset[int] = frozenset()  # with end-of-sequence ids, unless they are to be ignored
    stop: tuple[str, ...] = ()
    n: int = 1
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    score_from: int = 0  # the first prompt token whose log-probability is wanted (the very first has none)
    tenant: str = ""  # of the fair share and the statistics
    weight: float = 1.0  # of the tenant's share
    salt: str = ""  # of the prefix cache; derived by the server from the tenant
    surface: str = "chat"
    priority: int = 0  # higher first, within a tenant
    deadline: float | None = None  # on the engine's monotonic clock
    arrival: float = 0.0  # on the same clock
    speculate: bool = True
    skip_special_tokens: bool = True  # special tokens have no part in the text

    @property
    def first_result(self) -> int:
        """The first position of the prompt whose result is wanted; the prompt's length where none is but the last."""
        if self.kind == "embed" or self.prompt_logprobs is not None:
            return 0
        if self.kind == "score":
            return max(self.score_from - 1, 0)  # the row of a token foretells the next one
        return len(self.prompt)


class SequenceState(msgspec.Struct, eq=False):
    """One of a request's n. `tokens` and `computed` are moved on by the scheduler when a step is settled."""

    request: GenerationRequest
    index: int
    tokens: list[int]  # prompt and output
    computed: int = 0  # tokens whose KV is in the blocks
    reported: int = 0  # prompt positions whose results were handed out; they are not wanted again after a preemption
    blocks: list[int] = []
    rope_variant: int = 0
    seen: dict[int, int] = {}  # token -> count in the output, where penalties ask
    drafted: list[int] = []  # proposed continuation, to be verified by the next step
    cached: int = 0  # prompt tokens that the prefix cache had when the sequence first started
    finish: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are there and not computed yet, without the drafts; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed

    def append(self, tokens: Collection[int]) -> None:
        self.tokens.extend(tokens)
        if self.seen:  # a prompt has a token at least, so it is empty only where nothing asks for it
            for token in tokens:
                self.seen[token] = self.seen.get(token, 0) + 1


def open_sequence(request: GenerationRequest, index: int = 0, rope_variant: int = 0) -> SequenceState:
    """A sequence of which nothing is computed; `seen` is kept only where a penalty asks for it."""
    sampling = request.sampling
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    seen = dict.fromkeys(request.prompt, 0) if penalties != (1.0, 0.0, 0.0) else {}
    return SequenceState(request, index, list(request.prompt), rope_variant=rope_variant, seen=seen)
