"""TriggerScanner: where a triggered grammar begins, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.engine.grammar.trigger_scanner import TriggerScanner
from headrace.engine.interface.grammar_spec import GrammarTrigger

CALL = GrammarTrigger(("<call>", "[C]"))
START = GrammarTrigger(("{", "<tag>"), at_start=True)
THINKS = GrammarTrigger(("<call>",), reasoning=("<think>", "</think>"))
THINKING = GrammarTrigger(("<call>",), reasoning=("<think>", "</think>"), reasoning_begins="open")
ANSWERS = GrammarTrigger(("<call>",), reasoning=("<think>", "</think>"), reasoning_begins="closed")
START_THINKS = GrammarTrigger(("{",), at_start=True, reasoning=("<think>", "</think>"))

# trigger, text, from where on the grammar has it (None: nowhere)
CASES: list[tuple[GrammarTrigger, str, int | None]] = [
    (CALL, "a <call>b", 2),
    (CALL, "<<call>", 1),
    (CALL, "<cal<call>[C]", 4),
    (CALL, "a[C]<call>", 1),
    (CALL, "é <cal", None),
    (CALL, "", None),
    (START, "{}", 0),
    (START, " \n\t{", 3),
    (START, "<tag>x", 0),
    (START, "<ta{", None),
    (START, "a {", None),
    (START, "  ", None),
    (THINKS, "<call>", 0),
    (THINKS, " <think> <call> </think> <call>", 25),
    (THINKS, " <think> <call> </thin", None),
    (THINKS, "a<think><call>", 8),
    (THINKS, "<thin<call>", 5),
    (THINKING, "<call></think>\n<call>", 15),
    (THINKING, "<call>", None),
    (ANSWERS, "<think><call>", 7),
    (START_THINKS, "<think>{</think>\n{", 17),
    (START_THINKS, "<think>{</think>\na{", None),
]


def begun(trigger: GrammarTrigger, pieces: list[bytes]) -> int | None:
    scanner = TriggerScanner(trigger)
    position = scanner.beginning
    read = 0
    for piece in pieces:
        position, text = scanner.push(position, piece)
        read += len(piece)
        if text is not None:
            return read - len(text)
    return None


@pytest.mark.parametrize(("trigger", "text", "place"), CASES)
def test_a_marker_is_found_however_the_text_is_cut(trigger: GrammarTrigger, text: str, place: int | None) -> None:
    raw = text.encode()
    assert begun(trigger, [raw]) == place
    assert begun(trigger, [raw[at : at + 1] for at in range(len(raw))]) == place
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(raw) + 1), min(3, len(raw) + 1)))
        pieces = [raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(raw)])]
        assert begun(trigger, pieces) == place


@pytest.mark.parametrize("trigger", [CALL, START, THINKS, THINKING])
def test_what_is_kept_of_the_text_is_never_longer_than_a_marker(trigger: GrammarTrigger) -> None:
    scanner = TriggerScanner(trigger)
    for filler in (b"<", b" ", b"<think", b"</think", b"x"):
        position = scanner.beginning
        for _ in range(1000):
            position, text = scanner.push(position, filler)
            assert text is None
            assert len(position.tail) < len(b"</think>")


def test_every_place_from_which_a_marker_can_be_completed_is_known() -> None:
    assert {position.tail for position in TriggerScanner(CALL).tails()} == {
        b"", b"<", b"<c", b"<ca", b"<cal", b"<call", b"[", b"[C",
    }  # fmt: skip
