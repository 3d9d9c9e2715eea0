"""The structure of a JSON text: brackets, commas and colons outside strings, and the bound on values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.server.http import json_structure
from headrace.server.http.json_structure import StructureError, TooManyValuesError, find_structure

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.text(alphabet='ab\\"[]{},:\n\u00e4\U0001f600', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='k",:\\', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def plain_structure(text: str) -> list[tuple[int, str, int]]:
    """Place, mark and depth, found character by character."""
    found: list[tuple[int, str, int]] = []
    depth, inside, escaped = 0, False, False
    for place, each in enumerate(text.encode()):
        mark = chr(each)
        if inside:
            inside = escaped or mark != '"'
            escaped = mark == "\\" and not escaped
        elif mark == '"':
            inside = True
        elif mark in "[]{},:":
            depth += (mark in "[{") - (mark in "]}")
            found.append((place, mark, depth))
    return found


@given(VALUES, st.sampled_from((1, 2, 3, 7, 64)))
@example("\\" * 9, 3)
@example(['\\"', "\\\\", '\\\\"'], 1)
@settings(max_examples=150, deadline=None)
def test_the_structure_is_the_same_wherever_the_text_is_cut(value: Any, cut: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_structure, "_SLICE", cut)
        found = find_structure(text.encode(), most_values=1000)
    marks = [chr(mark) for mark in found.marks]
    assert list(zip(found.places.tolist(), marks, found.depths.tolist(), strict=True)) == plain_structure(text)


@pytest.mark.parametrize("text", [b"[1,2,3]", b'{"a":1,"b":2,"c":3}', b"[[],[],[]]", b"[{},{},{}]", b'[{"a":[1,2]}]'])
def test_one_value_too_many_is_found(text: bytes) -> None:
    find_structure(text, most_values=6)
    with pytest.raises(TooManyValuesError):
        find_structure(text, most_values=2)


def test_commas_and_brackets_in_strings_are_no_values() -> None:
    assert len(find_structure(json.dumps("[1,2]{:}" * 100).encode(), most_values=0).places) == 0


@pytest.mark.parametrize("text", [b'"', b'"a\\"', b"[", b'{"a":[}', b"]", b"[]]"])
def test_what_is_not_closed_is_an_error(text: bytes) -> None:
    with pytest.raises(StructureError):
        find_structure(text, most_values=10)


def test_only_colons_are_bounded_too() -> None:
    with pytest.raises(TooManyValuesError):
        find_structure(b":" * 100, most_values=10)
