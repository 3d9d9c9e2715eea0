"""The complete result of one sequence, assembled from its outputs."""

from __future__ import annotations

import msgspec

from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.sampling import SampledToken


class SequenceResult(msgspec.Struct):
    index: int  # among the request's n
    tokens: list[int] = []
    text: str = ""
    chosen: list[SampledToken] = []
    prompt: list[SampledToken] | None = None
    vector: bytes | None = None
    ending: SequenceEnd | None = None

    def add(self, output: SequenceOutput) -> None:
        self.tokens += output.tokens
        self.text += output.text
        if output.chosen:
            self.chosen += output.chosen
        if output.prompt is not None:
            self.prompt = [*(self.prompt or ()), *output.prompt]
        self.vector = output.vector if output.vector is not None else self.vector
        self.ending = output.ending or self.ending
