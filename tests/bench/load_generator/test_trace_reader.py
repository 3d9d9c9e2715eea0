"""Traces of three forms, and what is wrong with a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench.load_generator.trace_reader import read_trace
from headrace.bench.load_generator.workloads import ConversationTurn, PromptPrefix, Session
from headrace.errors import RequestError


def read(folder: Path, text: str, **options: Any) -> list[Session]:
    path = folder / "trace.jsonl"
    path.write_text(text)
    return list(read_trace(path, **options))


def test_a_trace_of_headrace_is_that_of_its_simulator(tmp_path: Path) -> None:
    lines = (
        '{"at": 0, "prompt": 100, "answer": 20}\n\n'
        '{"at": 1.5, "prompt": 100, "answer": 30, "tenant": "a", "surface": "voice", "prefix": "p",'
        ' "prefix_tokens": 60, "priority": 1, "deadline": 2.0}\n'
    )
    first, second = read(tmp_path, lines, speed=2.0)
    assert (first.at, first.turns, first.prefix, first.surface) == (0.0, (ConversationTurn(100, 20),), None, "chat")
    assert second == Session(
        number=1,
        name="trace 1",
        turns=(ConversationTurn(40, 30),),
        tenant="a",
        surface="voice",
        workload="trace",
        prefix=PromptPrefix("a p", "documents", 60),
        at=0.75,
        priority=1,
        deadline=2.0,
    )


def test_a_trace_of_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 10535, "input_length": 672, "output_length": 26, "hash_ids": [46, 2353]}\n'
    )
    first, second = read(tmp_path, lines)
    assert (first.at, second.at) == (0.0, 10.535)
    assert (second.turns, second.blocks, second.block_tokens) == ((ConversationTurn(672, 26),), ("46", "2353"), 512)


def test_a_custom_data_set_has_prompts_and_no_times(tmp_path: Path) -> None:
    lines = '{"prompt": "What is the capital of India?"}\n{"prompt": "Why?", "output_tokens": 9, "more": 1}\n'
    first, second = read(tmp_path, lines)
    assert (first.text, first.turns[0].answer, first.at) == ("What is the capital of India?", 0, None)
    assert (second.text, second.turns[0].answer) == ("Why?", 9)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"at": 1, "prompt": 1, "answer": 1}\n{"at": 0.5, "prompt": 1, "answer": 1}\n', "line 2.*before"),
        ('{"at": 0, "prompt": 0, "answer": 1}\n', "line 1.*prompt"),
        ('{"at": 0, "prompt": 1, "answer": 1, "nobody": 1}\n', "line 1.*nobody"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}\n', "line 1.*timestamp"),
        ('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n', "line 1.*hash_ids"),
        ('{"prompt": 7}\n', "line 1"),
        ("[]\n", "line 1"),
        ('{"prompt": "a"}\nnot json\n', "line 2"),
        ('{"prompt": "a", "output_tokens": -1}\n', "output_tokens"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(tmp_path, lines)
