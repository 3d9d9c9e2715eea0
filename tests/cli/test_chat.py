"""headrace chat: a conversation with an engine of its own."""

from __future__ import annotations

import io
import re

import pytest

from headrace.cli import WRONG_USAGE, main


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_question_is_answered_with_its_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "", "What is paging?", "/quit", "never asked")
    assert main(["chat", "--max-tokens", "8", "--threads", "1"]) == 0
    answer, speed = capsys.readouterr().out.strip().splitlines()
    assert answer
    assert re.match(r"8 tokens, first after \d+ ms, then \d+ tokens/s, queue \d+ ms, prefill \d+ ms, decode", speed)


def test_the_conversation_goes_on_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "What is paging?", "And why?", "/reset", "/unknown", "Hello")
    assert main(["chat", "--max-tokens", "4", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    cached = [int(found) for found in re.findall(r"(\d+) of the prompt cached", out)]
    assert cached[0] > 8  # the second question comes after the first and its answer
    assert "/reset starts over" in out


def test_what_does_not_fit_is_said_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "word " * 3000, "Hello")
    assert main(["chat", "--max-tokens", "4", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "/reset to start over" in out
    assert "4 tokens" in out


def test_a_server_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "Hello")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 0
    assert "127.0.0.1:9" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "no/such/folder"]) == WRONG_USAGE
    assert "no/such/folder" in capsys.readouterr().err
