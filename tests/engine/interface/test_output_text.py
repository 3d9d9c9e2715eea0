"""Text from tokens: stop strings across tokens, what waits and what never shows, and where each token's text lies."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from headrace.engine.interface.output_text import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    OutputText,
    StopStrings,
    TokenText,
    token_bytes,
)
from headrace.errors import RequestError
from headrace.models.text.detokenizer import Detokenizer, TokenPieces, read_decoder
from tests.support.models.small_tokenizers import MAKERS


class Vocabulary:
    """What OutputText asks of a tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.pieces = TokenPieces(tokenizer, read_decoder(tokenizer.decoder.__getstate__()), special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


KINDS = {name: Vocabulary(make()) for name, make in MAKERS.items()}
BYTES = KINDS["byte level"]
END = 2  # </s>, a special token


def whole(vocabulary: Vocabulary, tokens: list[int]) -> str:
    stream = Detokenizer(vocabulary, continues=True)
    return "".join([*map(stream.push, tokens), stream.finish()])


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first complete stop string begins and ends: the longest of those that end first."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths), end
    return None


def deltas(output: OutputText, tokens: list[int]) -> list[str]:
    return [*(output.push([token]) for token in tokens), output.finish()]


def test_text_comes_as_its_tokens_do() -> None:
    tokens = BYTES.encode("naïve café 😀")
    output = OutputText(BYTES)
    found = deltas(output, tokens)
    assert "".join(found) == "naïve café 😀"
    assert "\ufffd" not in "".join(found)
    assert output.count == len(tokens)
    assert output.ended is None


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    output = OutputText(BYTES, stop=["lo\n\nAss"])
    tokens = BYTES.encode("User: hello\n\nAssistant: more")
    found = deltas(output, tokens)
    assert "".join(found) == "User: hel"
    assert output.ended == "lo\n\nAss"
    assert output.count < len(tokens)
    assert whole(BYTES, tokens[: output.count]).startswith("User: hello\n\nAss")
    assert not whole(BYTES, tokens[: output.count - 1]).startswith("User: hello\n\nAss")


def test_a_stop_string_may_be_included() -> None:
    output = OutputText(BYTES, stop=["\n\n"], include_stop=True)
    assert "".join(deltas(output, BYTES.encode("User: hello\n\nAssistant"))) == "User: hello\n\n"


def test_what_only_looked_like_a_stop_string_is_handed_out() -> None:
    output = OutputText(BYTES, stop=["abcd"])
    assert output.push(BYTES.encode("xab")) == "x"
    assert output.push(BYTES.encode("cab")) == "abc"
    assert output.push(BYTES.encode("c")) == ""
    assert output.finish() == "abc"
    assert output.ended is None


def test_the_stop_string_that_is_complete_first_counts() -> None:
    output = OutputText(BYTES, stop=["abc", "b"])
    assert output.push(BYTES.encode("zabc")) == "za"
    assert output.ended == "b"


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    output = OutputText(BYTES, stop=["c", "bc", "xabc"])
    assert output.push(BYTES.encode("zabc")) == "za"
    assert output.ended == "bc"


def test_a_stop_id_ends_the_text_and_is_not_in_it() -> None:
    output = OutputText(BYTES, stop=["lazy dog"], stop_ids={END, BYTES.encode("x")[0]})
    text = BYTES.encode("the lazy")
    assert output.push([*text, END, *text]) == "the "
    assert output.ended == END
    assert output.count == len(text) + 1
    assert output.finish() == "lazy"
    output = OutputText(BYTES, stop_ids={BYTES.encode("x")[0]}, include_stop=True)
    assert output.push(BYTES.encode("fox")) + output.finish() == "fox"


def test_special_tokens_are_shown_where_asked_for() -> None:
    tokens = [*BYTES.encode("fox"), END]
    assert OutputText(BYTES).push(tokens) == "fox"
    assert OutputText(BYTES, skip_special_tokens=False).push(tokens) == "fox</s>"


def test_nothing_ends_the_text_before_min_tokens() -> None:
    stop = BYTES.encode("x")[0]
    letters = BYTES.encode("axbxc")
    assert len(letters) == 5
    output = OutputText(BYTES, stop=["x"], min_tokens=2)
    assert output.push(letters) == "axb"
    assert output.count == 4
    output = OutputText(BYTES, stop_ids={stop}, min_tokens=2)
    assert output.push(letters) == "axb"
    assert output.count == 4


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts() -> None:
    letters = BYTES.encode("axybxy")
    output = OutputText(BYTES, stop=["xy"], min_tokens=2)
    assert "".join(deltas(output, letters)) == "a"
    assert output.count == 3


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    tokens = BYTES.encode("a囗")
    output = OutputText(BYTES)
    assert output.push(tokens[:-1]) == "a"
    assert output.finish() == "\ufffd"


@pytest.mark.parametrize(
    "stop", [[""], ["a" * (MOST_STOP_CHARACTERS + 1)], [str(number) for number in range(MOST_STOPS + 1)]]
)
def test_stop_strings_past_their_bounds_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        OutputText(BYTES, stop=stop)
    assert caught.value.parameter == "stop"


def test_the_longest_stop_strings_are_found() -> None:
    stops = [chr(97 + number % 7) + "b" * (MOST_STOP_CHARACTERS - 1 - number) for number in range(MOST_STOPS)]
    output = OutputText(BYTES, stop=stops)
    text = "xa" + "b" * MOST_STOP_CHARACTERS
    assert "".join(deltas(output, BYTES.encode(text))) == "x"
    assert output.ended == stops[63]  # the shortest that begins with an a


def test_the_bytes_of_a_token_are_its_own() -> None:
    assert b"".join(token_bytes(BYTES, token) for token in BYTES.encode("naïve 😀")) == "naïve 😀".encode()
    assert token_bytes(BYTES, END) == b"</s>"
    pieces = KINDS["sentencepiece"]
    assert [token_bytes(pieces, token) for token in pieces.encode("the é")] == [b" the", b" ", b"\xc3", b"\xa9"]
    window = tokenizers.Tokenizer(models.WordPiece({"fox": 0, "##es": 1}, unk_token="fox"))
    window.decoder = decoders.WordPiece()
    assert token_bytes(Vocabulary(window), 0) == b"fox"


def test_pieces_say_where_each_tokens_text_lies() -> None:
    tokens = BYTES.encode("é the é中")
    output = OutputText(BYTES, pieces=True)
    text = output.push(tokens) + output.finish()
    pieces = output.take_pieces()
    assert [piece.token for piece in pieces] == tokens
    assert [piece.place for piece in pieces] == list(range(len(tokens)))
    assert "".join(piece.text for piece in pieces) == text
    for piece in pieces:
        assert text[piece.start :].startswith(piece.text)
    assert output.take_pieces() == []


def test_pieces_wait_as_their_text_does_and_are_cut_with_it() -> None:
    output = OutputText(BYTES, stop=["jumps over"], pieces=True)
    tokens = BYTES.encode("fox jumps over")
    before = BYTES.encode("fox ")
    shown = output.push(tokens[:-1])
    assert "".join(piece.text for piece in output.take_pieces()) in ("fox", "fox ")
    output.push(tokens[-1:])
    assert shown == "fox "
    assert output.ended == "jumps over"
    assert output.take_pieces() in ([], [TokenText(len(before) - 1, tokens[len(before) - 1], " ", 3)])


ALPHABET = st.sampled_from(["a", "b", "ab", "é", "中", " ", "the", "\n"])
STOPS = st.lists(st.text(alphabet="ab é中\n", min_size=1, max_size=5), max_size=4)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int], list[str], list[int]]:
    """A kind of tokenizer, tokens that may be no text at all, stop strings, and how the tokens come."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    vocabulary = KINDS[kind]
    parts = draw(st.lists(st.one_of(ALPHABET.map(vocabulary.encode), st.integers(0, 400).map(lambda id: [id]))))
    tokens = [token for part in parts for token in part]
    cuts = draw(st.lists(st.integers(1, 6), max_size=len(tokens)))
    return kind, tokens, draw(STOPS), cuts


@settings(max_examples=400, deadline=None)
@given(outputs(), st.booleans(), st.integers(0, 12))
def test_text_is_that_of_the_whole_cut_at_the_first_stop(
    case: tuple[str, list[int], list[str], list[int]], include: bool, min_tokens: int
) -> None:
    kind, tokens, stops, cuts = case
    vocabulary = KINDS[kind]
    text = whole(vocabulary, tokens)
    exempt = Detokenizer(vocabulary, continues=True)
    ignored = len("".join(map(exempt.push, tokens[:min_tokens])))
    expected = text
    for end in range(ignored + 1 if tokens[min_tokens:] else len(text) + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            expected = text[: end if include else end - max(lengths)]
            break
    output = OutputText(vocabulary, stop=stops, include_stop=include, min_tokens=min_tokens, pieces=True)
    found: list[str] = []
    rest = tokens
    for cut in [*cuts, len(tokens)]:
        found.append(output.push(rest[:cut]))
        rest = rest[cut:]
        # Never a part of a stop string that is complete later.
        assert expected.startswith("".join(found))
    found.append(output.finish())
    assert "".join(found) == expected
    again = OutputText(vocabulary, stop=stops, include_stop=include, min_tokens=min_tokens)
    assert again.push(tokens) + again.finish() == expected
    assert (again.count, again.ended) == (output.count, output.ended)
    pieces = output.take_pieces()
    assert expected == "".join(piece.text for piece in pieces)
    place = 0
    for piece in pieces:
        assert piece.token == tokens[piece.place]
        assert piece.start == place
        place += len(piece.text)


@settings(max_examples=200, deadline=None)
@given(STOPS.filter(bool), st.text(alphabet="ab é中\n", max_size=40), st.integers(0, 40))
def test_stop_strings_are_found_as_by_looking_everywhere(stops: list[str], text: str, cut: int) -> None:
    automaton = StopStrings(stops)
    state, end, length = automaton.scan(0, text[:cut], search=True)
    if not length:
        held = automaton.depth[state]
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop) + 1)}
        assert held == max((len(part) for part in beginnings if text[:cut].endswith(part)), default=0)
        _, end, length = automaton.scan(state, text[cut:], search=True)
        end += len(text[:cut])
    found = first_stop(text, stops)
    assert (length and (end - length, end)) == (found or 0)
