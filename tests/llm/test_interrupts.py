"""Ctrl-C at any point of a step: the call ends with KeyboardInterrupt, and the engine can go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.errors import HeadraceError
from headrace.llm.interrupts import held_interrupts

OPTIONS: dict[str, Any] = {"weights": "int8", "threads": 1, "context": 256, "cache": False, "checks": True}
PROMPT = list(range(5, 40))


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, **OPTIONS) as llm:
        yield llm


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def pressing(monkeypatch: pytest.MonkeyPatch, target: object, name: str, *, at: int, times: int = 1) -> None:
    """Press Ctrl-C inside the call number `at` of a method."""
    real: Callable[..., Any] = getattr(target, name)
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            press(times)
        return real(*arguments, **named)

    monkeypatch.setattr(target, name, interrupted)


POINTS = [
    ("_engine", "submit", 1),
    ("_engine", "begin", 3),
    ("_engine.scheduler", "plan", 3),
    ("_engine.executor", "launch", 3),
    ("_engine", "prepare", 3),
    ("_engine.executor", "collect", 3),
    ("_engine.executor", "choose", 3),
    ("_engine.scheduler", "settle", 3),
    ("_engine", "deliver", 3),
]


@pytest.mark.parametrize(("owner", "name", "at"), POINTS, ids=[name for _, name, _ in POINTS])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "generate"])
def test_an_interrupted_call_leaves_a_whole_engine(
    llm: LLM, owner: str, name: str, at: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = llm.generate(PROMPT, max_tokens=12)[0].text
    target: Any = llm
    for part in owner.split("."):
        target = getattr(target, part)
    with monkeypatch.context() as patch:
        pressing(patch, target, name, at=at)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream(PROMPT, max_tokens=200)) if streamed else llm.generate([PROMPT, PROMPT[:9]], max_tokens=200)
    assert llm._engine.idle
    assert llm.generate(PROMPT, max_tokens=12)[0].text == undisturbed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_consumer_ends_its_stream(llm: LLM) -> None:
    def consume() -> None:
        for _ in llm.stream(PROMPT, max_tokens=200):
            press()

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert llm.generate(PROMPT, max_tokens=3)[0].completions[0].usage.output_tokens == 3


def test_a_second_ctrl_c_ends_the_wait_for_a_step_and_the_engine_says_so(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_folder, **OPTIONS)
    pressing(monkeypatch, llm._engine.executor, "collect", at=2, times=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, max_tokens=50)
    with pytest.raises(HeadraceError, match="interrupted in the middle of a step"):
        llm.generate(PROMPT)
    llm.close()


def test_closing_cancels_an_open_stream(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, **OPTIONS)
    stream = llm.stream(PROMPT, max_tokens=200)
    next(stream)
    llm.close()
    assert list(stream) == []
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate(PROMPT)


def test_a_call_beside_an_open_stream_of_the_same_thread_is_an_error(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=200)
    next(stream)
    with pytest.raises(HeadraceError, match="A stream of this LLM is open"):
        llm.generate(PROMPT)
    del stream
    assert len(llm.generate(PROMPT, max_tokens=2)) == 1


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            press(3)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_inside_is_not_replaced_by_the_interrupt() -> None:
    def fail() -> None:
        with held_interrupts():
            press()
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
