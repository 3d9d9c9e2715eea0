"""Reads requests from a JSONL file: Headrace's traces, Mooncake's, or vLLM's custom data sets.

An invalid line is a RequestError that names it. Yields lengths and shared prefixes, not texts.
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
MOST_LINE: Final = 8 * 1024 * 1024  # bytes per line, which may contain a prompt: 8 MiB
MOST_TOKENS: Final = 1_000_000  # per prompt or answer
BLOCK: Final = 512  # tokens per Mooncake block


class _Mooncake(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Custom(msgspec.Struct):
    prompt: str
    output_tokens: int = 0  # 0: no limit


class _FormatProbe(msgspec.Struct):
    """Distinguishes the formats."""

    at: msgspec.Raw = msgspec.Raw()
    timestamp: msgspec.Raw = msgspec.Raw()
    input_length: msgspec.Raw = msgspec.Raw()


def read_trace(path: Path, *, form: TraceFormat = "auto", speed: float = 1.0) -> Iterator[Session]:
    """Yield the file's requests. `speed` 2 replays them in half the time; the first line decides the `auto` format."""
    readers = {"headrace": _headrace, "mooncake": _mooncake, "vllm": _custom}
    reader: Callable[[bytes, int], Session] | None = readers.get(form)
    last = 0.0
    numbers = itertools.count()
    for line, raw in trace_lines(path, MOST_LINE):
        try:
            if reader is None:
                reader = readers[_detect_format(raw)]
            session = reader(raw, next(numbers))
            if session.at is not None:
                if not last <= session.at < math.inf:
                    raise msgspec.ValidationError(f"its time, {session.at:g} s, is before that of the line above")
                last = session.at
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {line}: {error}", parameter="trace") from None
        yield session if session.at is None else replace(session, at=session.at / speed)


def _detect_format(raw: bytes) -> str:
    probe = msgspec.json.decode(raw, type=_FormatProbe)
    if bytes(probe.timestamp) and bytes(probe.input_length):
        return "mooncake"
    return "headrace" if bytes(probe.at) else "vllm"


_HEADRACE: Final = msgspec.json.Decoder(TraceLine)
_MOONCAKE: Final = msgspec.json.Decoder(_Mooncake)
_CUSTOM: Final = msgspec.json.Decoder(_Custom)


def _headrace(raw: bytes, number: int) -> Session:
    line = _HEADRACE.decode(raw)
    _check_range("at", line.at, 0.0)
    _check_range("prompt", line.prompt, 1)
    _check_range("answer", line.answer, 1)
    _check_range("prefix_tokens", line.prefix_tokens, 0)
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
    _check_range("timestamp", line.timestamp, 0.0)
    _check_range("input_length", line.input_length, 1)
    _check_range("output_length", line.output_length, 1)
    # The last block may be partial; it has an id too.
    if len(line.hash_ids) > math.ceil(line.input_length / BLOCK):
        raise msgspec.ValidationError(f"it has {len(line.hash_ids)} hash_ids for only {line.input_length} tokens")
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
    _check_range("output_tokens", line.output_tokens, 0)
    return Session(
        number=number,
        turns=(ConversationTurn(0, line.output_tokens),),
        name=f"trace {number}",
        workload="trace",
        text=line.prompt,
    )


def _check_range(name: str, value: float, least: float) -> None:
    most = math.inf if name in ("at", "timestamp") else MOST_TOKENS
    if not least <= value <= most or math.isinf(value):
        raise msgspec.ValidationError(f"`{name}` must be {least:g} to {most:g}, not {value}")
