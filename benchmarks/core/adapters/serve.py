"""The adapters' side of the protocol: one JSON object a line on stdin and stdout (see ../child.py).

Owns stdout: whatever an engine prints goes to stderr, so that only answers reach the other side. Imports nothing but
the standard library, because it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Times = list[list[float]]  # of each sequence, seconds from the request to each token
Late = dict[str, Any]  # "at", "prompt", "new", as ../child.py says
Generate = Callable[[Prompts, int, list[Late] | None], dict[str, Any]]  # an answer, as ../child.py says


def serve(load: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Loads the engine, says that it is ready and what it is, and answers until stdin ends."""
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
