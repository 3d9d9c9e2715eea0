"""Reads the gate's prompts: JSON lines, lm-eval task files, promptfoo files, and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from headrace.bench.simulation.synthetic_traffic import trace_lines
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import SourceText
from headrace.lab.cases.assertions import read_assertion
from headrace.lab.cases.case import CHAT, COMPLETIONS, Behaviour, Case, context_of
from headrace.lab.cases.lm_eval_task import read_lm_eval_task
from headrace.lab.cases.promptfoo_file import read_promptfoo
from headrace.lab.cases.yaml_file import read_yaml
from headrace.lab.comparison.answer import AnsweredCall
from headrace.lab.recording.recorded_request import RecordedRequest, read_trace

MOST_LINE: Final = 8 * 1024 * 1024  # bytes
DEFAULT_TOKENS: Final = 128  # of an answer, where a prompt says nothing


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class PromptLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A line of a prompts file. `prompt` and `messages` are those of `headrace evaluate --prompts`."""

    prompt: str | None = None  # a user's message
    messages: list[dict[str, Any]] | None = None
    completion: str | None = None  # a good answer
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    sources: list[SourceText] = []
    calls: list[_Call] = []  # tool calls that a good answer makes
    behaviour: Behaviour | None = None
    category: str = ""
    id: str = ""
    asserts: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]], name="assert")


def read_cases(path: Path, *, max_tokens: int = DEFAULT_TOKENS) -> list[Case]:
    """Read a prompts file. RequestError that names the line where it is invalid."""
    if not path.is_file():
        raise RequestError(f"There is no file {path}.", parameter="prompts")
    if path.suffix in (".yaml", ".yml"):
        content = read_yaml(path)
        if isinstance(content, dict) and "prompts" in content:
            return read_promptfoo(cast(dict[str, Any], content), path, max_tokens)
        return read_lm_eval_task(content, path, max_tokens)
    decoder = msgspec.json.Decoder(PromptLine)
    found: list[Case] = []
    for number, raw in trace_lines(path, MOST_LINE):
        try:
            found.append(case_of(decoder.decode(raw), f"{path}, line {number}", f"line {number}", max_tokens))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {number}: {error}", parameter="prompts") from None
    if not found:
        raise RequestError(f"{path} has no prompts. Write one JSON object on each line.", parameter="prompts")
    return found


def case_of(line: PromptLine, where: str, name: str, max_tokens: int) -> Case:
    if (line.prompt is None) == (line.messages is None):
        raise RequestError(f"{where}: expected either 'prompt' or 'messages'.", parameter="prompts")
    messages = line.messages if line.messages is not None else [{"role": "user", "content": line.prompt}]
    completion = line.completion
    if completion is None and len(messages) > 1 and messages[-1].get("role") == "assistant":
        completion = str(messages[-1].get("content") or "")  # as in the files of headrace evaluate
        messages = messages[:-1]
    body: dict[str, Any] = {"messages": messages, "max_tokens": line.max_tokens or max_tokens, "temperature": 0.0}
    if line.temperature is not None:
        body["temperature"] = line.temperature
    for field, value in (
        ("tools", line.tools),
        ("tool_choice", line.tool_choice),
        ("response_format", line.response_format),
        ("sources", msgspec.to_builtins(line.sources) or None),
    ):
        if value is not None:
            body[field] = value
    case = Case(
        id=line.id or name,
        body=body,
        category=line.category,
        behaviour=line.behaviour,
        expected=completion,
        expected_calls=tuple(
            AnsweredCall(call.name, msgspec.json.encode(call.arguments).decode()) for call in line.calls
        ),
        assertions=tuple(read_assertion(each, where) for each in line.asserts),
    )
    return msgspec.structs.replace(case, context=context_of(body, case.prompt_text, line.sources))


def read_recorded_cases(path: Path) -> list[Case]:
    """Read an exported recording. Recorded requests keep their own parameters."""
    return cases_of_records(read_trace(path))


def cases_of_records(records: Sequence[RecordedRequest]) -> list[Case]:
    start = min((record.arrived for record in records), default=0.0)
    return [_recorded_case(record, start) for record in records]


def _recorded_case(record: RecordedRequest, start: float) -> Case:
    body = {name: value for name, value in record.body.items() if name not in ("model", "stream", "stream_options")}
    sources = [msgspec.convert(each, SourceText) for each in body.get("sources", ())]
    case = Case(
        id=record.id,
        body=body,
        endpoint=COMPLETIONS if record.endpoint == COMPLETIONS else CHAT,
        original=record.answers[0] if record.answers else None,
        at_s=record.arrived - start,
        surface=record.surface,
        priority=record.priority,
    )
    return msgspec.structs.replace(case, context=context_of(body, case.prompt_text, sources))
