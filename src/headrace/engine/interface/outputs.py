"""What an engine returns: a sequence's output after a step, how the sequence ended, and its usage."""

from __future__ import annotations

import msgspec

from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True):
    """Usage of one sequence. Times are on the worker's clock and restart when another worker takes over."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    drafted: int  # draft tokens, and how many were accepted
    accepted: int
    queue_s: float  # from submission to its first share of a step
    prefill_s: float  # from then to its first token
    decode_s: float  # from then to its end
    prefill_steps: int = 0  # steps with a share of the sequence up to its first token, and from then to its end
    decode_steps: int = 0


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    finish: FinishReason
    usage: SequenceUsage
    why: str = ""  # a reason to show to users, if it failed or was cut
    stop: str | None = None  # the stop string that ended it


class SequenceOutput(msgspec.Struct, array_like=True):
    """New output of one sequence after a step."""

    request: str
    index: int  # which of the request's n
    tokens: list[int]
    text: str
    chosen: list[SampledToken] | None = None  # the tokens with log-probabilities, if requested
    prompt: list[SampledToken] | None = None  # prompt tokens with log-probabilities, from the first requested one
    vector: bytes | None = None  # an embedding, f32, little-endian
    ending: SequenceEnd | None = None  # set on a sequence's last output
