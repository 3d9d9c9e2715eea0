"""The parameters by which a request has its texts cut."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.truncation import Truncation, read_truncation

CONTEXT = 64


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"truncate": False}, None),
        ({"truncate": "NONE"}, None),
        ({"truncation_direction": "left"}, None),
        ({"truncate": True}, Truncation()),
        ({"truncate": "END"}, Truncation()),
        ({"truncate": "START"}, Truncation(keep_end=True)),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation(keep_end=True)),
        ({"truncate": True, "truncation_direction": "right"}, Truncation()),
        ({"truncate_prompt_tokens": -1}, Truncation()),
        ({"truncate_prompt_tokens": 8}, Truncation(most=8)),
        ({"truncate_prompt_tokens": 8, "truncate": "START"}, Truncation(most=8, keep_end=True)),
    ],
)
def test_each_dialect_says_it_in_its_own_words(given: dict[str, Any], expected: Truncation | None) -> None:
    assert read_truncation(given, CONTEXT) == expected


@pytest.mark.parametrize("most", [0, 65, -2])
def test_a_length_past_the_context_is_refused(most: int) -> None:
    with pytest.raises(ApiError, match="1 to 64") as caught:
        read_truncation({"truncate_prompt_tokens": most}, CONTEXT)
    assert caught.value.parameter == "truncate_prompt_tokens"
