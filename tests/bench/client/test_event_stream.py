"""Events are cut out of bytes however they are torn, and a long one is no danger."""

from __future__ import annotations

import pytest

from headrace.bench.client.event_stream import EventStreamReader, EventTooLongError

STREAM = b': hello\n\nevent: x\ndata: {"a": 1}\n\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, len(STREAM)])
def test_a_stream_has_the_same_events_however_it_is_torn(size: int) -> None:
    reader = EventStreamReader()
    found = [event for place in range(0, len(STREAM), size) for event in reader.feed(STREAM[place : place + size])]
    assert found == EVENTS
    assert reader.finish() == []


def test_one_event_in_one_read_is_taken_as_it_is() -> None:
    assert EventStreamReader().feed(b"data: 1\n\n") == [b"1"]
    assert EventStreamReader().feed(b": ping\n\n") == []


def test_an_event_that_nothing_ends_is_there_at_the_end() -> None:
    reader = EventStreamReader()
    assert reader.feed(b"data: 1\n\ndata: [DONE]") == [b"1"]
    assert reader.finish() == [b"[DONE]"]


@pytest.mark.parametrize("data", [b"data: " + b"x" * 200, b"data: x\n" * 200, b"data: " + b"x" * 200 + b"\n\n"])
def test_an_event_past_the_bound_is_refused(data: bytes) -> None:
    with pytest.raises(EventTooLongError):
        EventStreamReader(100).feed(data)
