"""The parser of server-sent events: any cut, any line end, comments, error events and the size limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sse import ErrorEvent, EventReader, EventTooLongError


def read(*parts: bytes, most: int = 1024) -> list[bytes]:
    reader = EventReader(most)
    return [*itertools.chain.from_iterable(map(reader.feed, parts)), *reader.finish()]


def test_events_end_at_empty_lines() -> None:
    assert read(b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n') == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_a_space_after_the_colon_is_optional_and_only_one_is_taken() -> None:
    assert read(b"data:x\n\ndata:  y\n\n") == [b"x", b" y"]


def test_several_data_lines_are_one_text() -> None:
    assert read(b"data: {\ndata: }\n\n") == [b"{\n}"]


def test_comments_pings_ids_and_empty_events_say_nothing() -> None:
    assert read(b": ping\n\nid: 3\nretry: 10\n\n\n\n:\n\ndata: x\n: more\n\n") == [b"x"]


@pytest.mark.parametrize("said", [b"event: error\ndata: {}\n\n", b"data: {}\r\nevent:error\r\n\r\n", b"error: {}\n\n"])
def test_events_that_are_named_errors_are_failures(said: bytes) -> None:
    (event,) = read(said)
    assert isinstance(event, ErrorEvent)
    assert event == b"{}"


def test_other_names_say_nothing() -> None:
    (event,) = read(b"event: message\ndata: x\n\n")
    assert event == b"x"
    assert not isinstance(event, ErrorEvent)


def test_a_byte_order_mark_is_no_part_of_the_first_event() -> None:
    assert read(b"\xef", b"\xbb", b"\xbfdata: x\n\n") == [b"x"]


def test_what_was_not_ended_comes_at_the_end() -> None:
    assert read(b"data: x\n\ndata: y") == [b"x", b"y"]
    assert read(b"data: x\r\n\r\ndata: y\r\n") == [b"x", b"y"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_of_every_kind_do_wherever_the_bytes_are_cut(end: bytes) -> None:
    stream = end.join(
        [b"data: one", b"", b": ping", b"", b"event: e", b"data: two", b"data: 2", b"", b"data: three", b"", b""]
    )
    wanted = [b"one", b"two\n2", b"three"]
    for cut in range(len(stream)):
        assert read(stream[:cut], stream[cut:]) == wanted
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == wanted


def test_carriage_returns_may_begin_late() -> None:
    assert read(b"data: a\n\ndata: b\r\n\r", b"\ndata: c\r\n\r\n") == [b"a", b"b", b"c"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_beyond_the_bound_is_refused_before_it_is_whole(end: bytes) -> None:
    reader = EventReader(100)
    reader.feed(b"data: a" + end + end)
    for _ in range(100):
        reader.feed(b"x")
    with pytest.raises(EventTooLongError):
        reader.feed(b"x")


def test_an_event_beyond_the_bound_is_refused_when_it_comes_at_once() -> None:
    with pytest.raises(EventTooLongError):
        EventReader(100).feed(b"data: " + b"x" * 200 + b"\n\n")


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab {}\u00e9", max_size=8), max_size=6),
    end=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_cuts_change_nothing(texts: list[str], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"data: " + text.encode() + end + end for text in texts)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parts = [stream[start:stop] for start, stop in itertools.pairwise(places)]
    assert read(*parts) == [text.encode() for text in texts]
