"""What leaves an engine: the output of one sequence after a step, how it ended, and what it took."""

from __future__ import annotations

import msgspec

from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence took. Times are by the worker's clock, and begin anew where another worker took over."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    drafted: int  # tokens proposed by speculation, and how many of them held
    accepted: int
    queue_s: float  # until it first had a share of a step
    prefill_s: float  # from then to its first token
    decode_s: float  # from then to its end


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    finish: FinishReason
    usage: SequenceUsage
    why: str = ""  # a reason fit to show, where it failed or was cut
    stop: str | None = None  # the stop string that ended it


class SequenceOutput(msgspec.Struct, array_like=True):
    """What is new of one sequence after a step."""

    request: str
    index: int  # which of the request's n
    tokens: list[int]
    text: str
    chosen: list[SampledToken] | None = None  # the tokens with their log-probabilities, where they were asked for
    prompt: list[SampledToken] | None = None  # the prompt's tokens from the first wanted one on, with theirs
    vector: bytes | None = None  # an embedding, f32, little end first
    ending: SequenceEnd | None = None  # with a sequence's last output
