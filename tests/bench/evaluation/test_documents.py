"""Texts and prompts become windows in which each token is scored once, with the context that the window allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.evaluation.documents import Document, DocumentTokens, cut, read_prompts, read_text, tokenise
from headrace.errors import RequestError
from headrace.models.model_folder import BUNDLED, open_model

BODY = list(range(100, 200))


def scored(windows: list, prefix: int = 0) -> list[int]:
    return [token for window in windows for token in window.tokens[window.first :]]


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (16, 1), (200, 100), (17, 5)])
@pytest.mark.parametrize("prefix", [[], [1], [1, 2]])
def test_every_token_is_scored_once_in_order(window: int, stride: int, prefix: list[int]) -> None:
    windows = cut([DocumentTokens(prefix, BODY)], window=window, stride=stride)
    assert scored(windows) == (BODY if prefix else BODY[1:])  # without a prefix nothing predicts the first token
    for each in windows:
        assert len(each.tokens) <= window
        assert each.tokens[: len(prefix)] == prefix
        assert each.first >= 1


def test_a_later_window_scores_its_last_tokens_with_the_rest_as_context() -> None:
    windows = cut([DocumentTokens([], BODY)], window=20, stride=5)
    assert [(each.tokens[0], each.tokens[-1], each.first) for each in windows[:3]] == [
        (100, 119, 1),
        (105, 124, 15),
        (110, 129, 15),
    ]


def test_only_the_completion_is_scored_with_its_prompt_as_context() -> None:
    windows = cut([DocumentTokens([], BODY, score_from=60)], window=50, stride=25)
    assert scored(windows) == BODY[60:]
    assert all(each.first >= 25 - 10 for each in windows)


def test_a_limit_cuts_the_tokens_that_are_scored() -> None:
    windows = cut([DocumentTokens([], BODY), DocumentTokens([], BODY)], window=20, stride=10, most=25)
    assert scored(windows) == BODY[1:26]
    assert sum(each.scored for each in windows) == 25


def test_a_chunk_is_a_window_of_a_single_text_and_otherwise_a_document() -> None:
    one = cut([DocumentTokens([], BODY)], window=20, stride=10)
    assert [each.chunk for each in one] == list(range(len(one)))
    several = cut([DocumentTokens([], BODY), DocumentTokens([], BODY)], window=60, stride=30)
    assert [each.chunk for each in several] == [0, 0, 0, 1, 1, 1]


def test_prompts_completions_and_chats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "One."}\n\n{"prompt": "Two", "completion": " three."}\n'
        '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}\n'
    )
    tokenizer = open_model(BUNDLED / "mini").tokenizer
    plain, completed, chat = (tokenise(each, tokenizer) for each in read_prompts(path))
    assert tokenizer.decode(plain.body) == "One."
    assert tokenizer.decode(completed.body[completed.score_from :]) == " three."
    answer = tokenizer.decode(chat.body[chat.score_from :])
    assert answer.startswith("Good day.")
    assert "Hello" in tokenizer.decode(chat.body[: chat.score_from])


def test_the_tools_of_a_chat_are_declared_before_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = '"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Where?"}]'
    tool = '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}'
    path.write_text(f'{{{chat}, "tools": [{tool}]}}\n{{{chat}}}\n')
    tokenizer = open_model(BUNDLED / "mini").tokenizer
    with_tools, without = (tokenise(each, tokenizer) for each in read_prompts(path))
    assert "get_weather" in tokenizer.decode(with_tools.body[: with_tools.score_from])
    assert with_tools.body[with_tools.score_from :] == without.body[without.score_from :]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts\.jsonl, line 2: "),
        ('{"text": "x"}', "unknown field `text`"),
        ('{"prompt": 3}', "Expected `str`"),
        ("{}", "expected either 'prompt'"),
        ('{"prompt": "x", "messages": [{}]}', "expected either 'prompt'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(RequestError, match=message):
        read_prompts(path)


def test_a_file_without_prompts_or_of_other_bytes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\n")
    with pytest.raises(RequestError, match="has no prompts"):
        read_prompts(path)
    path.write_bytes(b"a\xff")
    with pytest.raises(RequestError, match="is not UTF-8 text: invalid start byte at byte 1"):
        read_text(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfText")
    assert read_text(path) == [Document(prompt="Text")]
