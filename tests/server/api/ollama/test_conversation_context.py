"""The `context` of a conversation: what is encoded comes back, and anything else is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.api_errors import ApiError
from headrace.server.api.ollama.conversation_context import decode_context, encode_context

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.text(st.characters(exclude_categories=["Cs"])),
        }
    ),
    max_size=4,
)


@given(MESSAGES)
def test_a_conversation_comes_back_unchanged(messages: list[dict[str, str]]) -> None:
    context = encode_context(messages)
    assert decode_context(context) == messages
    assert all(0 <= number < 2**31 for number in context)  # fits the integers of every client


@given(st.lists(st.integers(), min_size=1, max_size=8), st.booleans())
def test_foreign_integers_are_rejected_and_never_fail(numbers: list[int], marked: bool) -> None:
    mark = encode_context([])[:1] if marked else []
    with pytest.raises(ApiError) as caught:
        decode_context([*mark, *numbers])
    assert (caught.value.status, caught.value.parameter, caught.value.code) == (400, "context", "invalid_value")


@pytest.mark.parametrize(
    "message",
    [{"role": "tool", "content": "x"}, {"role": "user"}, {"role": "user", "content": "x", "tool_calls": []}],
)
def test_a_forged_context_can_hold_only_what_a_client_may_send(message: dict[str, object]) -> None:
    with pytest.raises(ApiError):
        decode_context(encode_context([message]))
