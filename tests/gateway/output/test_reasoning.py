"""Reasoning in the text of models: what is split from the content, however the text is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken

from headrace.gateway.output.reasoning import REASONING_FORMATS, detect_reasoning_format
from tests.support.models.small_tokenizers import byte_level, load

THINK = REASONING_FORMATS["think"]


def split(pieces: Sequence[str], tail: str = "<|assistant|>", name: str = "think") -> tuple[str, str]:
    splitter = REASONING_FORMATS[name].splitter(tail)
    found = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in found), "".join(content for _, content in found)


OPENED = "<|assistant|><think>\n"
CLOSED = "<|assistant|><think>\n\n</think>\n\n"

# prompt's end, text, reasoning, content
CASES = [
    ("", "<think>\nHm, 1 < 2.\n</think>\n\nYes.\n", "Hm, 1 < 2.", "Yes.\n"),
    ("", "\n<think>a</think>b", "a", "b"),
    ("", "  no thought\n", "", "  no thought\n"),
    ("", "<thin", "", "<thin"),
    ("", " \n", "", " \n"),
    ("", "What is <think>a</think>?", "", "What is <think>a</think>?"),
    ("", "<think> a </thin", "a </thin", ""),
    ("", "<think>\n\n</think>\n\nb", "", "b"),
    ("", "<think>a</think> b </think> <think>c</think>", "a", "b </think> <think>c</think>"),
    ("", "</think>b", "", "</think>b"),
    (OPENED, " Hm.\n</think>\n b", "Hm.", "b"),
    (OPENED, "Hm.\n", "Hm.\n", ""),
    (OPENED, "</think>b", "", "b"),
    (CLOSED, "\nb <think>", "", "b <think>"),
    ("<|user|>What is <think>?<|assistant|>", "It is", "", "It is"),
]


@pytest.mark.parametrize(("tail", "text", "reasoning", "content"), CASES)
def test_a_text_is_split_the_same_however_it_is_cut(tail: str, text: str, reasoning: str, content: str) -> None:
    assert split([text], tail) == (reasoning, content)
    assert split(list(text), tail) == (reasoning, content)
    for cut in range(1, len(text)):
        assert split([text[:cut], text[cut:]], tail) == (reasoning, content), cut


def test_the_other_markers_are_split_as_well() -> None:
    assert split(["[THINK]a [/THI", "NK] b"], name="magistral") == ("a", "b")
    assert split(["a[/THINK]b"], "[THINK]", name="magistral") == ("a", "b")


@pytest.mark.parametrize("tail", ["", OPENED, CLOSED])
def test_random_texts_are_split_the_same_however_they_are_cut(tail: str) -> None:
    parts = ["<think>", "</think>", "<", "</thi", "a", " ", "\n", "text ", " " * 3000]
    rng = random.Random(f"reasoning {tail}")
    for _ in range(100):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 12)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        assert split(pieces, tail) == split([text], tail) == split(list(text), tail), text


def test_what_is_certain_comes_out_at_once() -> None:
    splitter = THINK.splitter("")
    assert not splitter.is_open
    assert splitter.push("<think>\nHm") == ("Hm", "")
    assert splitter.is_open
    assert splitter.push(", so\n</") == (", so", "")
    assert splitter.push("b>") == ("\n</b>", "")
    assert splitter.push("</think>\n\nYes") == ("", "Yes")
    assert not splitter.is_open
    assert splitter.push(" \n") == ("", " \n")
    assert splitter.finish() == ("", "")


def test_a_prompt_that_opened_the_reasoning_says_so() -> None:
    assert THINK.splitter(OPENED).is_open
    assert not THINK.splitter(CLOSED).is_open


@pytest.mark.parametrize(
    "text", ["<think>" + "</think" * 150_000, "<think>" * 150_000, " " * 300_000, "<think>" + " " * 300_000]
)
def test_hostile_text_is_read_to_its_end(text: str) -> None:
    pieces = [text[at : at + 29] for at in range(0, len(text), 29)]
    assert split(pieces) == split([text])


def test_the_format_is_found_in_the_template(tmp_path: Path) -> None:
    tokenizer = byte_level()
    marks = [AddedToken(text, special=True) for text in ("[THINK]", "[/THINK]")]
    tokenizer.add_special_tokens(marks)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs
    texts = [AddedToken(text, special=False) for text in ("<think>", "</think>")]
    tokenizer.add_tokens(texts)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in its stubs
    loaded = load(tmp_path, tokenizer)
    think = detect_reasoning_format("{% if '</think>' in content %}", loaded)
    assert think is not None
    assert (think.name, think.special) == ("think", ())
    magistral = detect_reasoning_format("First draft your thinking process: [THINK]", loaded)
    assert magistral is not None
    assert (magistral.name, magistral.special) == ("magistral", ("[THINK]", "[/THINK]"))
    assert detect_reasoning_format("{{ messages }}", loaded) is None
    assert detect_reasoning_format(None, loaded) is None
