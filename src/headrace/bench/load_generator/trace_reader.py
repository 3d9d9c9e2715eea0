"""Requests from a JSONL file: Headrace's own traces, Mooncake's, and the prompts of vLLM's custom data sets.

Owns the three formats and the bounds on what is read. A line's problem is a RequestError that names the line. Knows
nothing of texts: it says how long they are and which beginnings they share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from headrace.bench.load_generator.workloads import ConversationTurn, PromptPrefix, Session
from headrace.bench.simulation.synthetic_traffic import TraceLine, trace_lines
from headrace.errors import RequestError

TraceFormat = Literal["auto", "headrace", "mooncake", "vllm"]
MOST_LINE: Final = 8 * 1024 * 1024  # bytes of a line: 8 MiB, as prompts may be in it
MOST_TOKENS: Final = 1_000_000  # of a prompt or an answer
BLOCK: Final = 512  # tokens of one of Mooncake's blocks


class _Mooncake(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: int = 0  # 0: as long as the server likes


class _Any(msgspec.Struct):
    """Which of the formats a line has."""

    at: msgspec.Raw = msgspec.Raw()
    timestamp: msgspec.Raw = msgspec.Raw()
    input_length: msgspec.Raw = msgspec.Raw()


def read_trace(path: Path, *, form: TraceFormat = "auto", speed: float = 1.0) -> Iterator[Session]:
    """`speed`: 2 replays it in half the time. A format that is not named is that of the first line."""
    readers = {"headrace": _ours, "mooncake": _mooncake, "vllm": _custom}
    reader: Callable[[bytes, int], Session] | None = readers.get(form)
    last = 0.0
    numbers = itertools.count()
    for line, raw in trace_lines(path, MOST_LINE):
        try:
            if reader is None:
                reader = readers[_form_of(raw)]
            session = reader(raw, next(numbers))
            if session.at is not None:
                if not last <= session.at < math.inf:
                    raise msgspec.ValidationError(f"its time is {session.at:g} s, before that of the line above")
                last = session.at
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {line}: {error}", parameter="trace") from None
        yield session if session.at is None else replace(session, at=session.at / speed)


def _form_of(raw: bytes) -> str:
    found = msgspec.json.decode(raw, type=_Any)
    if bytes(found.timestamp) and bytes(found.input_length):
        return "mooncake"
    return "headrace" if bytes(found.at) else "vllm"


_OURS: Final = msgspec.json.Decoder(TraceLine)
_MOONCAKE: Final = msgspec.json.Decoder(_Mooncake)
_CUSTOM: Final = msgspec.json.Decoder(_Custom)


def _ours(raw: bytes, number: int) -> Session:
    line = _OURS.decode(raw)
    _check("at", line.at, 0.0)
    _check("prompt", line.prompt, 1)
    _check("answer", line.answer, 1)
    _check("prefix_tokens", line.prefix_tokens, 0)
    shared = min(line.prefix_tokens, line.prompt) if line.prefix else 0
    return Session(
        number=number,
        turns=(ConversationTurn(line.prompt - shared, line.answer),),
        name=f"trace {number}",
        tenant=line.tenant,
        surface=line.surface,
        workload="trace",
        prefix=PromptPrefix(f"{line.tenant} {line.prefix}", "documents", shared) if shared else None,
        at=line.at,
        priority=line.priority,
        deadline=line.deadline,
    )


def _mooncake(raw: bytes, number: int) -> Session:
    line = _MOONCAKE.decode(raw)
    _check("timestamp", line.timestamp, 0.0)
    _check("input_length", line.input_length, 1)
    _check("output_length", line.output_length, 1)
    # The last block is not full, and it is told apart by its id as well.
    if len(line.hash_ids) > math.ceil(line.input_length / BLOCK):
        raise msgspec.ValidationError(f"{len(line.hash_ids)} hash_ids, but only {line.input_length} tokens")
    return Session(
        number=number,
        turns=(ConversationTurn(line.input_length, line.output_length),),
        name=f"trace {number}",
        workload="trace",
        at=line.timestamp / 1000.0,
        blocks=tuple(map(str, line.hash_ids)),
        block_tokens=BLOCK,
    )


def _custom(raw: bytes, number: int) -> Session:
    line = _CUSTOM.decode(raw)
    _check("output_tokens", line.output_tokens, 0)
    return Session(
        number=number,
        turns=(ConversationTurn(0, line.output_tokens),),
        name=f"trace {number}",
        workload="trace",
        text=line.prompt,
    )


def _check(name: str, value: float, least: float) -> None:
    most = math.inf if name in ("at", "timestamp") else MOST_TOKENS
    if not least <= value <= most or math.isinf(value):
        raise msgspec.ValidationError(f"`{name}` must be {least:g} to {most:g}, not {value}")
