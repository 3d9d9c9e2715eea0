"""All that came of one sequence, put together from its outputs. Owns Answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine import wire
from millrace.engine.sampling import Chosen


@dataclass(slots=True)
class Answer:
    index: int  # of the request's n
    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    chosen: list[Chosen] = field(default_factory=list[Chosen])
    prompt: list[Chosen] | None = None
    vector: bytes | None = None
    ending: wire.Ending | None = None

    def add(self, output: wire.Output) -> None:
        self.tokens += output.tokens
        self.text += output.text
        if output.chosen:
            self.chosen += output.chosen
        if output.prompt is not None:
            self.prompt = [*(self.prompt or ()), *output.prompt]
        self.vector = output.vector if output.vector is not None else self.vector
        self.ending = output.ending or self.ending
