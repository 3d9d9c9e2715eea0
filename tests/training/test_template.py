"""The chat template and tokenizer mean the same to transformers, Headrace and the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.models.text.tokenizer import Tokenizer
from tests.training.stand_in import LOOKUP, VOCABULARY
from training.corpus.conversation import JSON, ToolCall, Turn, rendered
from training.shape import CONTEXT
from training.tokenizer import MARKS, SPECIAL, messages_of, read, text_of

ASKED = Turn("user", "  Where is Anna's 2nd letter?\n")
CALLS = (ToolCall("look_up", {"word": "Zoë <b>&'\"", "deep": {"list": [1, 2.5, None, True]}}), ToolCall("now", {}))
CHATS: dict[str, tuple[tuple[Turn, ...], tuple[JSON, ...]]] = {
    "a question": ((ASKED,), ()),
    "a system turn": ((Turn("system", "Be brief. "), ASKED, Turn("assistant", "Here."), ASKED), ()),
    "tools without a system turn": ((ASKED,), (LOOKUP,)),
    "tools and a system turn": ((Turn("system", "Be brief."), ASKED), (LOOKUP, LOOKUP)),
    "calls and their answers": (
        (
            ASKED,
            Turn("assistant", "", CALLS),
            Turn("tool", '{"found": true}', name="look_up"),
            Turn("assistant", "Yes."),
        ),
        (LOOKUP,),
    ),
}


@pytest.fixture(scope="module")
def ours(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder, VOCABULARY)


@pytest.fixture(scope="module")
def theirs(tokenizer_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_is_the_same_text_and_tokens_everywhere(name: str, prompt: bool, ours: Tokenizer, theirs: Any) -> None:
    turns, tools = CHATS[name]
    messages, declared = messages_of(turns), list(tools) or None
    expected = text_of(turns, tools, prompt=prompt)
    assert ours.apply_template(messages, tools=declared, add_generation_prompt=prompt) == expected
    told = {"tools": declared, "add_generation_prompt": prompt}
    assert theirs.apply_chat_template(messages, tokenize=False, **told) == expected
    tokens = ours.encode(expected, add_special_tokens=False)
    assert theirs.apply_chat_template(messages, return_dict=False, **told) == tokens
    assert ours.decode(tokens, skip_special_tokens=False) == expected


def test_the_rendered_form_is_the_agreed_one() -> None:
    turns, tools = CHATS["calls and their answers"]
    declared = json.dumps(LOOKUP["function"]) if isinstance(LOOKUP, dict) else ""
    call = json.dumps({"name": "look_up", "arguments": CALLS[0].arguments}, ensure_ascii=False)
    assert text_of(turns, tools) == (
        f"<|begin|><|system|>\n\nTools:\n{declared}<|end|>"
        "<|user|>Where is Anna's 2nd letter?<|end|>"
        f'<|assistant|><tool_call>{call}</tool_call><tool_call>{{"name": "now", "arguments": {{}}}}</tool_call><|end|>'
        '<|tool|>{"found": true}<|end|>'
        "<|assistant|>Yes.<|end|>"
    )


def test_an_assistant_turn_is_rendered_as_in_the_corpus() -> None:
    for turns, tools in CHATS.values():
        text = text_of(turns, tools)
        assert all(f"<|assistant|>{rendered(turn)}<|end|>" in text for turn in turns if turn.role == "assistant")


def test_arguments_may_come_as_text_and_content_in_parts(ours: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "When"}, {"type": "text", "text": "ever?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert ours.apply_template(messages, add_generation_prompt=False) == (
        "<|begin|><|user|>Whenever?<|end|>"
        '<|assistant|><tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><|end|>'
    )


def test_special_tokens_have_the_first_ids_and_calls_stay_in_decoded_text(ours: Tokenizer, theirs: Any) -> None:
    text = "<|user|>a<|end|><tool_call>{}</tool_call><|end|>"
    tokens = ours.encode(text, add_special_tokens=False)
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True) == "a<tool_call>{}</tool_call>"
    assert [theirs.convert_tokens_to_ids(token) for token in (*SPECIAL, *MARKS)] == list(range(len(SPECIAL + MARKS)))
    assert ours.eos_ids == {theirs.eos_token_id}
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert theirs.model_max_length == CONTEXT


@pytest.mark.parametrize(
    "text",
    [
        "Anna's order AB-1234 of 12.50 EUR: 3 items.",
        '{"name": "Anna", "total": 12.5, "tags": ["a", "B 7"]}',
        "naïve «quoted» 東京 🙂\tжизнь  two  spaces\r\n\n end ",
        "don't I'LL 7pm x=1;y=(2) [3] a_b-c",
        "",
    ],
)
def test_any_text_comes_back_and_is_the_same_tokens_in_transformers(text: str, ours: Tokenizer, theirs: Any) -> None:
    tokens = ours.encode(text)
    assert theirs(text)["input_ids"] == tokens
    assert tokens[0] == ours.bos_id
    assert ours.decode(tokens) == text


def test_digits_stand_alone_and_a_name_is_the_same_tokens_wherever_it_stands(tokenizer_folder: Path) -> None:
    tokenizer = read(tokenizer_folder)

    def pieces(text: str) -> list[str]:
        return tokenizer.encode(text, add_special_tokens=False).tokens

    assert pieces("2026") == list("2026")
    name = pieces("Dmitri")
    for text in ("Say Dmitri", '"Dmitri"', "of (Dmitri)", "[1] Dmitri", "to\nDmitri"):
        found = pieces(text)
        assert any(found[start : start + len(name)] == name for start in range(len(found))), text
