"""W3C trace context: what is continued and what is not."""

import pytest

from headrace.observe.traces.trace_context import trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_clients_trace_goes_on() -> None:
    found = trace_context(f"00-{TRACE}-{SPAN}-01")
    assert (found.trace_id, found.parent_id, found.sampled) == (TRACE, SPAN, True)
    assert found.span_id != SPAN
    assert found.traceparent() == f"00-{TRACE}-{found.span_id}-01"
    assert found.traceparent("1" * 16, sampled=False) == f"00-{TRACE}-{'1' * 16}-00"


def test_later_versions_may_say_more() -> None:
    assert trace_context(f"01-{TRACE}-{SPAN}-00-more").trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_without_a_valid_header_a_trace_begins(header: str | None) -> None:
    one, other = trace_context(header), trace_context(header)
    assert one.parent_id == ""
    assert not one.sampled
    assert len(one.trace_id) == 32
    assert len(one.span_id) == 16
    assert one.trace_id not in (TRACE, other.trace_id)
