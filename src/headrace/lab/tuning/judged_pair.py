"""JudgedPair: one request that a small and a large variant have answered, with the quality and cost of both answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.simulation.synthetic_traffic import trace_lines
from headrace.engine.interface.grammar_spec import Grammar
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.routing.calibration import LabelledAnswer
from headrace.gateway.routing.complexity import features
from headrace.gateway.routing.confidence import MEASURES, Confidence
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer
from headrace.lab.comparison.answer_comparison import compare_answers

_MOST_LINE = 4 * 1024 * 1024  # bytes


class JudgedPair(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    question: str  # the last user's message
    features: tuple[float, ...]  # of the request, for the complexity classifier
    confidence: dict[str, float]  # the small variant's, by measure
    small: float  # quality, 0 to 1
    large: float
    small_cost: float
    large_cost: float
    answer: str = ""  # the large variant's

    @property
    def is_second_half(self) -> bool:
        """Return whether the pair belongs to the half that fits are measured on."""
        return blake2b(self.question.encode(), digest_size=1).digest()[0] % 2 == 1

    def labelled(self) -> LabelledAnswer:
        return LabelledAnswer(
            confidence=self.confidence,
            small=self.small,
            large=self.large,
            small_cost=self.small_cost,
            large_cost=self.large_cost,
        )


def quality(answer: Answer, reference: Answer, case: Case) -> float:
    """Return how good an answer is, 0 to 1, by a good one: its tool calls, its JSON fields, or its words."""
    if answer.error:
        return 0.0
    found = compare_answers(answer, reference, case.context)
    if found.exact:
        return 1.0
    if found.tools is not None:
        return float(found.tools.same)
    if found.json is not None:
        return found.json.fidelity
    return found.similarity


def judged_pair(
    case: Case, small: Answer, large: Answer, confidence: Confidence, costs: tuple[float, float]
) -> JudgedPair | None:
    """Judge both answers by the case's good one, or the small one by the large one. None without a confidence."""
    if not confidence.tokens:
        return None
    good = large if case.expected is None else Answer(text=case.expected, calls=case.expected_calls)
    request = request_of(case)
    return JudgedPair(
        id=case.id,
        question=question_of(request),
        features=features_of(request),
        confidence={measure: round(confidence.value(measure), 6) for measure in MEASURES},
        small=quality(small, good, case),
        large=1.0 if case.expected is None else quality(large, good, case),
        small_cost=costs[0],
        large_cost=costs[1],
        answer=large.text,
    )


def request_of(case: Case) -> TextRequest:
    """Return the request as routing sees it."""
    body = case.body
    declared: list[dict[str, Any]] = body.get("tools") or []
    tools = tuple(Tool(str(each.get("function", {}).get("name", ""))) for each in declared)
    grammar = Grammar("json_object") if case.context.wants_json else None
    if "messages" not in body:
        return TextRequest(model="", prompts=[case.prompt_text], tools=tools, grammar=grammar)
    messages: list[dict[str, Any]] = [
        {"role": str(each.get("role", "user")), "content": _plain(each.get("content"))} for each in body["messages"]
    ]
    return TextRequest(model="", messages=messages, tools=tools, grammar=grammar)


def question_of(request: TextRequest) -> str:
    for message in reversed(request.messages or ()):
        if message["role"] == "user":
            return str(message["content"])
    return next((prompt for prompt in request.prompts or () if isinstance(prompt, str)), "")


def features_of(request: TextRequest) -> tuple[float, ...]:
    return tuple(round(each, 5) for each in features(request))


def pair_lines(pairs: Iterable[JudgedPair]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in pairs)


def write_pairs(path: Path, pairs: Iterable[JudgedPair]) -> None:
    path.write_bytes(pair_lines(pairs))


def read_pairs(path: Path) -> list[JudgedPair]:
    """Read a file of pairs. RequestError that names the line where it is invalid."""
    if not path.is_file():
        raise RequestError(f"There is no file {path}.", parameter="pairs")
    return _decode(trace_lines(path, _MOST_LINE), str(path), "pairs")


def parse_pairs(lines: bytes) -> list[JudgedPair]:
    """Read the pairs of a server's shadow. RequestError if they are something else."""
    numbered = ((number, raw) for number, raw in enumerate(lines.splitlines(), 1) if raw.strip())
    return _decode(numbered, "The server's answer is not pairs", "shadow")


def _decode(lines: Iterable[tuple[int, bytes]], name: str, parameter: str) -> list[JudgedPair]:
    decoder = msgspec.json.Decoder(JudgedPair)
    found: list[JudgedPair] = []
    for number, raw in lines:
        try:
            found.append(decoder.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{name}, line {number}: {error}", parameter=parameter) from None
    return found


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[dict[str, Any]] = content or ()
    return "".join(str(part.get("text", "")) for part in parts)
