"""Suggests questions that the user may ask next, within the time that the answer has left."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TextRequest
from headrace.pipelines.model_call import call_model
from headrace.pipelines.run_state import RunState, StageReport
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices

_CHARS: Final = 100  # of one question
_TOKENS: Final = 40  # of one question, with its quotes
_CONTEXT_CHARS: Final = 2000  # of the answer, that the model reads


async def suggest_followups(services: StageServices, state: RunState) -> list[str]:
    """Return at most the declared number of questions; none if the time ends or the model fails."""
    count, clock = state.config.followups, services.clock
    began = clock.now()
    end = min(began + state.config.followups_ms / 1e3, state.deadline)
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": _CHARS},
        "minItems": 1,
        "maxItems": count,
    }
    request = TextRequest(
        model=state.config.generate.small or state.config.generate.model or state.model,
        messages=[
            {
                "role": "user",
                "content": f"Question: {state.question}\nAnswer: {state.text[:_CONTEXT_CHARS]}\n\n"
                f"Write {count} short questions that the user may ask next, as a JSON list of strings.",
            }
        ],
        grammar=Grammar("json_schema", msgspec.json.encode(schema).decode()),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=_TOKENS * count + 8,
        surface=state.surface,
        think=False,
    )
    found: list[str] = []
    why = ""
    try:
        choice = await call_model(services, state, request, end)
        found = read_questions(choice.content)[:count]
    except StageLateError:
        why = "late"
    except ApiError as error:
        why = error.code or "error"
    outcome = "skipped" if why or not found else "done"
    ms = (clock.now() - began) * 1e3
    state.reports.append(StageReport("followups", outcome, ms, (end - began) * 1e3, why))
    return found


def read_questions(text: str) -> list[str]:
    """Return the strings of a JSON list, also of one that was cut off."""
    for candidate in (text, f"{text.rstrip().rstrip(',')}]"):
        try:
            found = msgspec.json.decode(candidate, type=list[str])
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
        return list(dict.fromkeys(question.strip()[:_CHARS] for question in found if question.strip()))
    return []
