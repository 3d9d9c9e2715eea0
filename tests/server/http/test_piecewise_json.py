"""Decoding in pieces gives what decoding at once gives, also for what is not JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.server.http import piecewise_json
from headrace.server.http.json_structure import StructureError, find_structure
from headrace.server.http.piecewise_json import decode_in_pieces
from tests.server.http.test_json_structure import VALUES

FAILURES = (msgspec.DecodeError, UnicodeDecodeError, StructureError, RecursionError)


def in_pieces(text: bytes, size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecewise_json, "_PIECE", size)
        return decode_in_pieces(text, find_structure(text, most_values=10**6), pause=lambda _: None)


@given(VALUES, st.sampled_from((1, 5, 16, 40)), st.sampled_from((None, 1)), st.booleans())
@example({"a": {"b": ["x" * 100, {"c": "\U0001f600" * 40}]}}, 5, None, True)
@settings(max_examples=150, deadline=None)
def test_a_value_is_the_same_in_pieces_of_any_size(value: Any, size: int, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    assert in_pieces(text, size) == msgspec.json.decode(text)


@given(VALUES, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_text_is_refused_or_the_same(value: Any, data: st.DataObject) -> None:
    text = bytearray(json.dumps(value).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place : place + data.draw(st.integers(0, 2))] = data.draw(
        st.sampled_from((b"", b",", b'"', b"]", b"}", b"\\", b"1"))
    )
    damaged = bytes(text)
    try:
        expected = msgspec.json.decode(damaged)
    except FAILURES:
        with pytest.raises(FAILURES):
            in_pieces(damaged, 4)
    else:
        assert in_pieces(damaged, 4) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"[1,2,3,]",
        b"[,1,2,3]",
        b"[1,,2,3]",
        b'{"a":1,"b":2,}',
        b'{"a":1,,"b":2}',
        b'{"a" "bbbbbbbbbb"}',
        b'{1:"aaaaaaaaaaaaaa"}',
        b"[1,2,3}",
        b'{"a":1]',
        b"[1,2,3] [4]",
        b"[1,2,3]4",
        b'"aaaaaaaaaaaaaaaaaa\\ud83d"',
        b'"aaaaaaaaaaaaaaaaaa\\q aaaaaaaaaaaa"',
        b'"aaaaaaaaaaaaaaaaaaaaaa\xffaaaaaaaa"',
        b'"aaaaaaaaaa\naaaaaaaaaaaaaaaaaaaaaaa"',
        b" " * 50,
    ],
)
def test_a_mistake_at_the_border_of_a_piece_is_found(text: bytes) -> None:
    for size in (1, 4, 8):
        with pytest.raises(FAILURES):
            in_pieces(text, size)


@pytest.mark.parametrize("unit", ["\\n", "\\\\", "\\u00e4", "\\ud83d\\ude00", "\u00e4", "\U0001f600", 'a\\"'])
def test_a_long_string_is_cut_between_characters(unit: str) -> None:
    text = f'"{unit * 400}"'.encode()
    for size in (13, 14, 64, 100):
        assert in_pieces(text, size) == msgspec.json.decode(text)


def test_the_last_of_two_fields_of_the_same_name_counts() -> None:
    assert in_pieces(b'{"a":1,"b":2,"a":[3,4,5,6,7,8,9]}', 6) == {"a": [3, 4, 5, 6, 7, 8, 9], "b": 2}


def test_no_piece_is_longer_than_the_bound() -> None:
    pieces: list[float] = []
    text = msgspec.json.encode({"tokens": list(range(50_000)), "text": "\u00e4" * 200_000})
    decode_in_pieces(text, find_structure(text, most_values=10**6), pause=pieces.append)
    assert len(pieces) > len(text) // piecewise_json._PIECE  # a pause after each
