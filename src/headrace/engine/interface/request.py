"""A request to the engine, the state of its sequences, and how a sequence ends.

`GenerationParams` holds the fields that a caller may set. The API's `TextRequest` and the engine's `GenerationRequest`
both extend it, and the wire carries a `GenerationRequest` as it is, so a new parameter is declared once. Does not know
blocks, clocks or hardware.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.image_rows import ImageRows, image_token_ids
from headrace.engine.interface.sampling import SamplingParams

RequestKind = Literal["generate", "score", "embed"]


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter that a request is computed with. A worker that does not hold it loads it from `path`."""

    name: str  # for messages
    path: str
    digest: str  # of its files, in hexadecimal: what it computes depends on nothing else

    @property
    def kv_key(self) -> int:
        """Return a number that no other adapter has: KV is shared only among requests with the same one."""
        return int(self.digest[:32], 16)


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id, a stop string or a complete grammar; for scoring and embedding: done
    LENGTH = "length"  # max_tokens reached, or the context is full
    DEADLINE = "deadline"  # cut at the deadline, with the output so far
    CANCELLED = "cancelled"
    FAILED = "failed"


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a generation, without its prompt."""

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None  # None: as many as fit in the context, or the endpoint's default
    min_tokens: int = 0  # no stop before this: stop ids are masked, stop strings ignored
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # True: end-of-sequence ids are not added to `stop_ids`
    n: int = 1
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    surface: str = ""  # empty: the default of the API key, the variant or the caller
    priority: int = 0  # higher first, within a tenant
    speculate: bool = True  # speculative decoding may be used; it does not change the output
    skip_special_tokens: bool = True  # special tokens are left out of the text


class GenerationRequest(GenerationParams, frozen=True, kw_only=True, omit_defaults=True):
    """A tokenised request with every default resolved: `stop_ids` includes the end-of-sequence ids."""

    id: str
    prompt: tuple[int, ...]
    kind: RequestKind = "generate"  # score: log-probabilities of prompt tokens; embed: hidden states
    max_tokens: int = 256
    surface: str = "chat"
    prediction: tuple[int, ...] = ()  # tokens that much of the output may repeat: drafts, which change no output
    second_text: int = -1  # embed: prompt token at which the second text of a pair starts, if it has another type
    score_from: int = 0  # first prompt token to score; the very first token has no log-probability
    tenant: str = ""  # for the fair share and the statistics
    weight: float = 1.0  # the tenant's weight in the fair share
    salt: str = ""  # of the prefix cache; the server derives it from the tenant
    adapter: AdapterRef | None = None
    deadline: float | None = None  # on the monotonic clock of the process that holds the request
    arrival: float = 0.0  # on the same clock
    images: tuple[ImageRows, ...] = ()  # in the order of their tokens

    @classmethod
    def of(
        cls, params: GenerationParams, *, eos_ids: frozenset[int], max_tokens: int, surface: str, **fields: Any
    ) -> GenerationRequest:
        """Build a request from a caller's parameters. `fields` are this class's own, or replace parameters."""
        given: dict[str, Any] = dict(zip(_PARAMS, _param_values(params), strict=True))
        given["stop_ids"] = params.stop_ids if params.ignore_eos else params.stop_ids | eos_ids
        given.update(fields, max_tokens=max_tokens, surface=surface)
        return cls(**given)

    @property
    def first_result(self) -> int:
        """Return the first prompt position whose result is needed; the prompt's length if only the last one is."""
        if self.kind == "embed" or self.prompt_logprobs is not None:
            return 0
        if self.kind == "score":
            return max(self.score_from - 1, 0)  # the row of a token predicts the next one
        return len(self.prompt)


_PARAMS: Final = GenerationParams.__struct_fields__
_param_values = attrgetter(*_PARAMS)


class SequenceState(msgspec.Struct, eq=False):
    """One of a request's n sequences. The scheduler advances `tokens` and `computed` when a step is settled."""

    request: GenerationRequest
    index: int
    tokens: list[int]  # prompt and output
    computed: int = 0  # tokens whose KV is in the blocks
    reported: int = 0  # prompt positions whose results were delivered; a preempted sequence does not repeat them
    blocks: list[int] = []
    state_slot: int = -1  # of its recurrent state, while it runs on a model that has one
    state_trail: list[int] = []  # slots for its states before each draft
    rope_variant: int = 0
    seen: dict[int, int] = {}  # token -> count in the output; only with penalties
    drafted: list[int] = []  # draft tokens, to be verified by the next step
    cached: int = 0  # prompt tokens found in the prefix cache when the sequence first started
    finish: FinishReason | None = None
    prompt_ids: tuple[int, ...] = ()  # of the prompt in the prefix cache: see `prompt_ids`

    @property
    def prefix_ids(self) -> list[int]:
        """What the prefix cache knows the tokens by."""
        request = self.request
        return [*self.prompt_ids, *self.tokens[len(request.prompt) :]] if request.images else self.tokens

    @property
    def kv_variant(self) -> int:
        """Return a number for what KV depends on beside tokens: the rope variant and the adapter."""
        adapter = self.request.adapter
        return self.rope_variant if adapter is None else self.rope_variant + 2 * (adapter.kv_key + 1)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet, drafts excluded; 1 for a decoding sequence."""
        return len(self.tokens) - self.computed

    def append(self, tokens: Collection[int]) -> None:
        self.tokens.extend(tokens)
        if self.seen:  # empty only without penalties, because a prompt has at least one token
            for token in tokens:
                self.seen[token] = self.seen.get(token, 0) + 1


def open_sequence(request: GenerationRequest, index: int = 0, rope_variant: int = 0) -> SequenceState:
    """Return a sequence of which nothing is computed. `seen` is filled only if a penalty needs it."""
    sampling = request.sampling
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    seen = dict.fromkeys(request.prompt, 0) if penalties != (1.0, 0.0, 0.0) else {}
    return SequenceState(
        request,
        index,
        list(request.prompt),
        rope_variant=rope_variant,
        seen=seen,
        prompt_ids=prompt_ids(request),
    )


def prompt_ids(request: GenerationRequest) -> tuple[int, ...]:
    """Return what the prefix cache knows the prompt's tokens by: themselves, but for those of images."""
    if not request.images:
        return request.prompt
    ids = list(request.prompt)
    for image in request.images:
        ids[image.start : image.start + image.count] = image_token_ids(image.digest, image.count)
    return tuple(ids)
