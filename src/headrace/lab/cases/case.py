"""Case: one prompt with what is known about a good answer. Data only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from headrace.gateway.requests.text_request import SourceText
from headrace.lab.cases.assertions import Assertion
from headrace.lab.comparison.answer import Answer, AnswerContext, AnsweredCall

Behaviour = Literal["refuse", "answer"]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    body: dict[str, Any]  # of an OpenAI request; the model is added when it is sent
    endpoint: str = CHAT
    context: AnswerContext = AnswerContext()
    category: str = ""
    behaviour: Behaviour | None = None  # whether a good answer refuses
    expected: str | None = None  # a good answer's text
    expected_calls: tuple[AnsweredCall, ...] = ()
    assertions: tuple[Assertion, ...] = ()
    choices: tuple[str, ...] = ()  # of a multiple-choice question, of which the likeliest counts
    correct_choice: int = 0
    original: Answer | None = None  # that was recorded
    at_s: float = 0.0  # seconds after the first recorded request
    surface: str = ""
    priority: int = 0

    @property
    def is_red_team(self) -> bool:
        return self.behaviour is not None

    @property
    def prompt_text(self) -> str:
        """The prompt as a report shows it."""
        if self.endpoint == COMPLETIONS:
            return str(self.body.get("prompt", ""))
        messages: Sequence[dict[str, Any]] = self.body.get("messages", ())
        if len(messages) == 1:
            return str(messages[0].get("content") or "")
        return "\n".join(f"{each.get('role')}: {each.get('content') or ''}" for each in messages)


def context_of(body: dict[str, Any], prompt: str, sources: Sequence[SourceText] = ()) -> AnswerContext:
    """Read from a request what its answer must be like: the schema of `response_format`, and the sources."""
    form = cast(dict[str, Any], body.get("response_format") or {})
    kind = form.get("type")
    schema: Any = None
    if kind == "json_schema":
        schema = form.get("json_schema", {}).get("schema")
    if "guided_json" in body:
        given = body["guided_json"]
        schema = json.loads(given) if isinstance(given, str) else given
    return AnswerContext(
        prompt=prompt,
        sources=tuple(sources),
        schema=cast(dict[str, Any], schema) if isinstance(schema, dict) else None,
        wants_json=kind in ("json_object", "json_schema") or schema is not None,
    )
