"""The likeliest choice is the one whose tokens after the question are likeliest."""

from __future__ import annotations

import asyncio

import pytest

from headrace.lab.answering.choice_scores import score_after
from headrace.lab.answering.model_server import open_servers, parse_spec
from headrace.lab.cases.case import COMPLETIONS, Case


def test_only_tokens_after_the_question_count() -> None:
    logprobs = {
        "text_offset": [0, 2, 5, 9],
        "tokens": ["Q:", " is", " it?", " yes"],
        "token_logprobs": [None, -9.0, -8.0, -0.5],
    }
    assert score_after(logprobs, 9) == pytest.approx(-0.5)
    assert score_after(logprobs, 8) == pytest.approx(-8.5)  # a token over the border belongs to the choice


def test_a_model_chooses() -> None:
    case = Case(
        id="x",
        endpoint=COMPLETIONS,
        body={"prompt": "TTFT, time to first"},
        choices=(" zebra umbrella", " token"),
        correct_choice=1,
    )

    async def ask() -> str:
        async with open_servers([parse_spec("mini", parameter="x")]) as [server]:
            answer = await server.answer(case)
            assert answer.error == ""
            return answer.text

    assert asyncio.run(ask()) == " token"
