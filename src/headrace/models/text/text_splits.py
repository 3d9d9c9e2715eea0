"""Splits a text into words as the pre-tokenizers of common byte-level tokenizers do, without `tokenizers`.

Knows GPT-2's expression, those of Llama 3 and Qwen, and digits that stand alone. read_splits returns None for any other
pre-tokenizer, and Splits.words for a text that it may read differently.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

# Characters are searched by class: each non-ASCII character is replaced by one that stands for its class.
_LETTER, _NUMBER, _SPACE, _OTHER, _UNKNOWN = "x", "0", "\v", "\1", "\0"
_SPACES: Final = frozenset("\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(map(chr, range(0x2000, 0x200B)))
_L, _N, _S = "A-Za-z", "0-9", r"\t\n\v\f\r "
_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{_L}]+| ?[{_N}]+| ?[^{_S}{_L}{_N}]+|[{_S}]+(?![^{_S}])|[{_S}]+"
_GPT4: Final = (
    rf"'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]|[^\r\n{_L}{_N}]?[{_L}]+|[{_N}]DIGITS| ?[^{_S}{_L}{_N}]+[\r\n]*"
    rf"|[{_S}]*[\r\n]+|[{_S}]+(?![^{_S}])|[{_S}]+"
)
_GPT4_SOURCE: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN: Final = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    **{_GPT4_SOURCE.replace("DIGITS", count): _GPT4.replace("DIGITS", count) for count in ("", "{1,3}")},
}
_FOLDED: Final = "\u017f\u212a"  # equal to letters of a contraction when case is ignored


class _Expression(msgspec.Struct, forbid_unknown_fields=True):
    Regex: str


class _Split(msgspec.Struct, tag_field="type", tag="Split", forbid_unknown_fields=True):
    pattern: _Expression
    behavior: Literal["Isolated"]
    invert: Literal[False] | None = None


class _Digits(msgspec.Struct, tag_field="type", tag="Digits", forbid_unknown_fields=True):
    individual_digits: bool


class _ByteLevel(msgspec.Struct, tag_field="type", tag="ByteLevel", forbid_unknown_fields=True):
    add_prefix_space: bool
    trim_offsets: bool = True
    use_regex: bool = True


class _Sequence(msgspec.Struct, tag_field="type", tag="Sequence", forbid_unknown_fields=True):
    pretokenizers: Annotated[list[_Split | _Digits | _ByteLevel], msgspec.Meta(min_length=1)]


class Splits:
    """Expressions that split a text one after another. Several threads may use one object."""

    def __init__(self, expressions: Sequence[str]) -> None:
        self._patterns = [re.compile(each) for each in expressions]
        self._classes = _Classes()

    def words(self, text: str) -> list[str] | None:
        """Return the words, which together are the text, or None if `tokenizers` may see others."""
        marks = text
        if not text.isascii():
            marks = text.translate(self._classes)
            if marks.count(_UNKNOWN) != text.count(_UNKNOWN):
                return None
        spans = [(0, len(text))]
        for pattern in self._patterns:
            spans = [match.span() for start, stop in spans for match in pattern.finditer(marks, start, stop)]
        return [text[start:stop] for start, stop in spans]


class _Classes(dict[int, str]):
    """The class of each character that was met, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        mark = self[code] = _class_of(chr(code))
        return mark


def _class_of(character: str) -> str:
    if character.isascii():
        return character
    if character in _FOLDED:
        return _UNKNOWN
    if character in _SPACES:
        return _SPACE
    category = unicodedata.category(character)
    if category in ("Cn", "Cs"):  # perhaps a letter in a newer version of Unicode; not a character
        return _UNKNOWN
    return {"L": _LETTER, "N": _NUMBER}.get(category[0], _OTHER)


def read_splits(source: bytes) -> Splits | None:
    """Read the `pre_tokenizer` of a tokenizer.json."""
    try:
        read = msgspec.json.decode(source, type=_ByteLevel | _Sequence)
    except msgspec.MsgspecError:
        return None
    *steps, last = read.pretokenizers if isinstance(read, _Sequence) else [read]
    if not isinstance(last, _ByteLevel) or last.add_prefix_space:
        return None
    expressions: list[str] = []
    for step in steps:
        match step:
            case _Split(pattern=pattern) if pattern.Regex in _KNOWN:
                expressions.append(_KNOWN[pattern.Regex])
            case _Digits(individual_digits=apart):
                expressions.append(rf"[{_N}]|[^{_N}]+" if apart else rf"[{_N}]+|[^{_N}]+")
            case _:
                return None
    if last.use_regex:
        expressions.append(_GPT2)
    return Splits(expressions) if expressions else None
