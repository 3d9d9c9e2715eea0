"""Answer: what a variant replied to one prompt, in the form that every metric reads. Data only."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.requests.text_request import SourceText


class AnsweredCall(msgspec.Struct, frozen=True):
    """A tool call. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = "{}"


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    text: str = ""
    calls: tuple[AnsweredCall, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None  # None: not measured
    e2el_s: float | None = None
    cost_micros: int | None = None  # millionths of the currency; None: no price is known
    error: str = ""  # why there is no answer

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first."""
        if self.ttft_s is None or self.e2el_s is None or self.output_tokens < 2:
            return None
        return max(0.0, self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


class AnswerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompt says about a good answer."""

    prompt: str = ""  # its text, for checks of facts
    sources: tuple[SourceText, ...] = ()  # that the answer may cite by number or by id
    schema: dict[str, Any] | None = None  # JSON schema that the answer must satisfy
    wants_json: bool = False  # the answer must be JSON, even without a schema
