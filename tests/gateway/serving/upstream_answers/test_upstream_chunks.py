"""Chunks that differ in their texts alone: they are told from all others, and nothing of them is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.upstream_section import UpstreamConfig, features_of
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.relay import RelayReader
from headrace.gateway.serving.upstream_answers.upstream_answer_reader import UpstreamAnswerReader
from headrace.gateway.serving.upstream_answers.upstream_chunks import ChunkTemplate, join_texts, read_chunk
from headrace.gateway.serving.upstream_answers.upstream_request import build_upstream_request
from headrace.gateway.upstreams.upstream_errors import UpstreamError
from headrace.server.api.chat_completions import ChatStream
from tests.support.fake_upstream import chunk, exchange


def data(text: str, **fields: Any) -> bytes:
    return json.dumps(chunk(text, **fields), separators=(",", ":"), ensure_ascii=False).encode()


def learned(text: str = "x", **fields: Any) -> ChunkTemplate:
    form = ChunkTemplate()
    form.learn(data(text, **fields), text)
    assert form.version == 1
    return form


def test_a_chunk_of_the_same_form_is_known_by_its_bytes() -> None:
    form = learned()
    for text in ("abc", "d", " \u00e9\U0001f600", "a\\n", "\\\\ "):
        assert form.text(data("MARK").replace(b"MARK", text.encode())) == text.encode()


@pytest.mark.parametrize(
    "other",
    [
        data(""),
        data("x", index=1),
        data("x", finish="stop"),
        data('a"b'),
        data("x", delta={"role": "assistant"}),
        data("MARK").replace(b"MARK", b'a","tool_calls":[{}],"x":"'),
        data("MARK").replace(b"MARK", b"a\\"),
        b"[DONE]",
        b"",
        data("x")[:-1],
        data("x")[1:],
    ],
)
def test_everything_else_is_not_and_what_has_no_text_either(other: bytes) -> None:
    assert learned().text(other) is None


def test_a_text_that_stands_in_two_places_teaches_nothing() -> None:
    form = ChunkTemplate()
    twice = b'{"choices":[{"index":0,"delta":{"content":"x"},"text":"x"}]}'
    form.learn(twice, "x")
    form.learn(data("y"), "x")
    assert form.version == 0
    assert form.text(twice) is None


def test_where_every_chunk_is_another_no_form_is_looked_for_each_time() -> None:
    form = ChunkTemplate()
    for place in range(100):
        form.learn(data("x", number=place), "x")
    assert form.version <= 20 + 1


def test_halves_of_a_character_that_follow_each_other_are_whole() -> None:
    assert join_texts(["a", b"\\ud83d", b"\\ude00", "b", b"\\n"]) == "a\U0001f600b\n"
    assert join_texts([b"\\ud83d"]) == "\\ud83d"  # half of one is left as it came
    assert join_texts([b"\xff"]) == "\ufffd"


def readers() -> tuple[UpstreamAnswerReader, RelayReader]:
    config = UpstreamConfig(url="http://upstream/v1")
    asked = exchange(stream=True)
    wanted = build_upstream_request(asked, config, features_of(config), model="theirs")

    def inner() -> UpstreamAnswerReader:
        return UpstreamAnswerReader(wanted, name="mini", n=1, prompt_tokens=3, prompt_bytes=10)

    return inner(), RelayReader(asked, wanted, inner(), ChatStream(asked), rename=True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet='ab"\\/\n\u00e9\U0001f600{}:,', min_size=1, max_size=6), max_size=12), st.booleans())
def test_texts_come_through_whatever_is_in_them(texts: list[str], plain: bool) -> None:
    pieces, relay = readers()
    said = [json.dumps(chunk(text), ensure_ascii=plain).encode() for text in texts]
    said += [json.dumps(chunk(finish="stop")).encode(), b"[DONE]"]
    found = [piece for each in said for piece in pieces.event(each)]
    assert [piece.content for piece in found] == [*texts, ""]
    written = b"".join(part for each in said for part in relay.event(each)).split(b"\n\n")
    values = [json.loads(block.removeprefix(b"data: ")) for block in written[:-2]]
    assert [value["choices"][0]["delta"].get("content") for value in values] == [*texts, None]
    assert {value["id"] for value in values} == {"chatcmpl-ours"}
    for reader in (pieces, relay):
        assert reader.delivered()[0][0].content == "".join(texts)
        assert isinstance(reader.counted, usage.AnswerUsage)


@pytest.mark.parametrize("broken", [b"", b"{", b"3", b'{"choices":3}', b'{"choices":[{"text":NaN}]}', b"\xff"])
def test_what_is_no_chunk_is_an_error(broken: bytes) -> None:
    with pytest.raises(UpstreamError):
        read_chunk(broken, "mini")
