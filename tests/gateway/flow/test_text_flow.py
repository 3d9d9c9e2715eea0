"""What the flow changes of an answer before a dialect gets it."""

from __future__ import annotations

from headrace.gateway.flow.text_flow import hide_reasoning
from headrace.gateway.requests.text_request import ChoiceDelta, TokenLogprob, TokenUsage, ToolCallDelta


def test_hidden_reasoning_leaves_everything_else_as_it_is() -> None:
    thought = [TokenLogprob("hm", b"hm", -1.0, [], "hm")]
    call = ToolCallDelta(0, "c1", "look", "{}")
    given = [
        ChoiceDelta(0, reasoning="hm", logprobs=thought, tokens=1),
        ChoiceDelta(0, "Hi", reasoning="done", tokens=2),
        ChoiceDelta(0, calls=[call], reasoning="x"),
        ChoiceDelta(0, " there", tokens=1),
        ChoiceDelta(0, reasoning="y", logprobs=thought, finish="stop", usage=TokenUsage(reasoning_tokens=3)),
    ]
    taken: list[ChoiceDelta] = []
    for delta in given:
        assert hide_reasoning(lambda each: taken.append(each) is None, delta)
    assert [each.content for each in taken] == ["Hi", "", " there", ""]
    assert [each.reasoning for each in taken] == ["", "", "", ""]
    assert taken[1].calls == [call]
    assert taken[2] is given[3]
    assert (taken[3].finish, taken[3].usage, taken[3].logprobs) == ("stop", TokenUsage(reasoning_tokens=3), None)
    assert given[1].reasoning == "done"  # others may get the same delta


def test_a_pause_is_passed_on() -> None:
    assert not hide_reasoning(lambda _: False, ChoiceDelta(0, "Hi", reasoning="hm"))
    assert hide_reasoning(lambda _: False, ChoiceDelta(0, reasoning="hm"))  # nothing was handed over
