"""The adapters' side of the protocol: one JSON object a line on stdin and stdout (see ../child.py).

Owns stdout: whatever an engine prints goes to stderr, so that only answers reach the other side; and, for engines that
are driven step by step, when each request of a run comes. Imports nothing but the standard library, because it runs in
every peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Prompts = list[list[int]]
Times = list[list[float]]  # of each sequence, seconds from the request to each token
Late = dict[str, Any]  # "at", "prompt", "new", as ../child.py says
Generate = Callable[[Prompts, int, list[Late] | None], dict[str, Any]]  # an answer, as ../child.py says


@dataclass
class Arrival:
    """A request that arrives `at` seconds after the start of the run."""

    prompt: list[int]
    new: int
    at: float = 0.0
    times: list[float] = field(default_factory=list)  # of its tokens, seconds from its arrival


class Arrivals:
    """The requests of one run in order of arrival; the run starts on construction."""

    def __init__(self, prompts: Prompts, new: int, late: list[Late] | None) -> None:
        self._first = [Arrival(prompt, new) for prompt in prompts]
        self._late = [Arrival(each["prompt"], each["new"], each["at"]) for each in late or []]
        self._coming = [*self._first, *self._late]
        self._started = time.perf_counter()

    @property
    def more(self) -> bool:
        """Whether more requests will arrive."""
        return bool(self._coming)

    def due(self) -> Iterator[Arrival]:
        """Return the requests that have arrived since the last call."""
        while self._coming and self.now() >= self._coming[0].at:
            yield self._coming.pop(0)

    def now(self) -> float:
        return time.perf_counter() - self._started

    def answer(self) -> dict[str, Any]:
        return {"times": [each.times for each in self._first], "late": [each.times for each in self._late]}


def serve(load: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Load the engine, report that it is ready, and serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        generate, facts = load()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    say({"ready": True, "facts": facts})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(generate(request["prompts"], request["new"], request.get("late")))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
