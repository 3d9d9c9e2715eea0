"""The texts around the marks of a rendered chat, where only the template's own marks are images."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

from headrace.config import ImagesConfig
from headrace.gateway.images.image_reader import ImageReader
from headrace.models.text.user_text import UserText, join, plain

MARK, BEFORE, AFTER = "<i>", "[", "</i>]"


class FakeTokenizer:
    template = None

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return (MARK, MARK, "</i>")[tokens[0]]


def reader() -> ImageReader:
    tower = SimpleNamespace(image_token=0, mark_token=1, end_token=2)
    layout = SimpleNamespace(frame=lambda texts: (BEFORE, f"{texts.end}]"))
    vision: Any = SimpleNamespace(tower=tower, layout=layout)
    return ImageReader("tiny", vision, cast("Any", None), cast("Any", FakeTokenizer()), ImagesConfig())


def one_by_one(text: UserText) -> UserText:
    """Frame each mark that has no character of a user's, compared with every span."""
    pieces: list[str] = []
    start = 0
    while (place := plain(text).find(MARK, start)) >= 0:
        end = place + len(MARK)
        is_forged = any(first < end and place < last for first, last in text.spans)
        pieces += [text[start:place], UserText(MARK) if is_forged else f"{BEFORE}{MARK}{AFTER}"]
        start = end
    return join("", [*pieces, text[start:]])


def test_each_mark_of_the_template_is_framed_and_none_of_a_user() -> None:
    random, found = Random(7), reader()
    choices = (MARK, "<", "i", ">", "a", "")
    framed = forged = 0
    for _ in range(2000):
        parts = [random.choice(choices) for _ in range(random.randrange(24))]
        text = join("", [UserText(part) if random.random() < 0.4 else part for part in parts])
        expected, shown = one_by_one(text), found.framed(text)
        assert isinstance(shown, UserText)
        assert (plain(shown), shown.spans) == (plain(expected), expected.spans)
        framed += shown.count(BEFORE)
        forged += text.count(MARK) - shown.count(BEFORE)
    assert framed > 1000
    assert forged > 1000  # some of them only in part


def test_a_chat_without_user_text_has_all_its_marks_framed() -> None:
    assert reader().framed(f"a{MARK}{MARK}") == f"a{BEFORE}{MARK}{AFTER}{BEFORE}{MARK}{AFTER}"


def test_a_long_chat_of_marks_is_framed_in_one_pass() -> None:
    pairs = 20_000
    text = join("", [MARK, UserText("a"), "\n", UserText(MARK)] * pairs)
    shown = reader().framed(text)
    assert shown.count(BEFORE + MARK + AFTER) == pairs
    assert shown.count(MARK) == 2 * pairs
