"""Converting a body at once gives what converting its parameters one by one gives, and the same errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.server.api.chat_completions import CHAT_PARAMETERS
from headrace.server.http.body_parameters import (
    _convert_at_once,  # pyright: ignore[reportPrivateUsage]
    parse_body,
    parse_parameters,
)
from headrace.server.http.unknown_fields import UnknownFields

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
SOURCES = [{"id": "a", "text": "x"}]
# Each with whether it is converted at once.
BODIES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"messages": MESSAGES, "model": "mini", "max_tokens": 3, "temperature": 1}, True),
    "many": ({"messages": MESSAGES, "stop": ["a", "b"], "logit_bias": {"1": 2}, "sources": SOURCES}, True),
    "unions": ({"messages": MESSAGES, "tool_choice": "auto", "think": "low", "degrade": ["trim"]}, True),
    "null": ({"messages": MESSAGES, "model": None, "stop": None, "functions": None}, True),
    "null that is required": ({"messages": None}, False),
    "missing": ({"model": "mini"}, False),
    "a value that changes nothing": ({"messages": MESSAGES, "store": False}, False),
    "a hint": ({"messages": MESSAGES, "service_tier": "flex"}, False),
    "unsupported": ({"messages": MESSAGES, "functions": []}, False),
    "unknown": ({"messages": MESSAGES, "shoe_size": 43}, False),
    "misspelled": ({"messages": MESSAGES, "max_token": 3}, False),
    "unknown inside": ({"messages": [{**MESSAGES[0], "mood": "calm"}]}, False),
    "wrong type": ({"messages": MESSAGES, "max_tokens": "3"}, False),
    "out of range": ({"messages": MESSAGES, "temperature": 3}, False),
    "wrong inside": ({"messages": [{"role": "robot", "content": "x"}]}, False),
}


def result(parse: Any) -> Any:
    unknown = UnknownFields(strict=False)
    try:
        return parse(unknown), unknown.header
    except ApiError as error:
        return error.openai(), unknown.header


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_converted_at_once_as_it_is_one_by_one(name: str) -> None:
    values, at_once = BODIES[name]
    body = json.dumps(values).encode()
    whole = result(lambda unknown: parse_body(body, CHAT_PARAMETERS, RequestLimits(), unknown))
    assert whole == result(lambda unknown: parse_parameters(json.loads(body), CHAT_PARAMETERS, unknown))
    assert (_convert_at_once(json.loads(body), CHAT_PARAMETERS) is not None) == at_once
