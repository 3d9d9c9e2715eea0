"""Answers multiple-choice questions by likelihood: the choice that the model finds likeliest after the question.

Uses /v1/completions with `echo` and log-probabilities, as lm-eval does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.bench.client.http_client import HttpClient
from headrace.lab.cases.case import COMPLETIONS, Case
from headrace.lab.comparison.answer import Answer


async def likeliest_choice(client: HttpClient, headers: Mapping[str, str], model: str, case: Case) -> Answer:
    """Return the text of the likeliest choice; its `error` says why there is none."""
    prompt = str(case.body["prompt"])
    body: dict[str, Any] = {
        "model": model,
        "prompt": [prompt + choice for choice in case.choices],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
        "temperature": 0.0,
    }
    response = await client.fetch("POST", COMPLETIONS, body, headers)
    if response.error or response.status != 200:
        return Answer(error=f"{response.error}: {response.why}")
    found: Any = msgspec.json.decode(bytes(response.body))
    scores = [float("-inf")] * len(case.choices)
    for choice in found.get("choices", ()):
        scores[choice["index"]] = score_after(choice["logprobs"], len(prompt))
    best = max(range(len(scores)), key=lambda place: scores[place])
    usage: Mapping[str, Any] = found.get("usage") or {}
    return Answer(
        text=case.choices[best],
        finish="stop",
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        e2el_s=response.end - response.start,
    )


def score_after(logprobs: Mapping[str, Any], length: int) -> float:
    """Add up the log-probabilities of the tokens that end after the first `length` characters."""
    offsets: Sequence[int] = logprobs["text_offset"]
    tokens: Sequence[str] = logprobs["tokens"]
    values: Sequence[float | None] = logprobs["token_logprobs"]
    return sum(
        value
        for offset, token, value in zip(offsets, tokens, values, strict=True)
        if value is not None and offset + len(token) > length
    )
