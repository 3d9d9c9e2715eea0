"""A worker may begin before anybody knows what it is to serve; nobody's worker stays behind."""

from __future__ import annotations

import subprocess
from collections.abc import Generator

import pytest

from millrace.engine.worker_start import end_worker_ahead, start_worker, worker_ahead


@pytest.fixture
def ended() -> Generator[list[subprocess.Popen[bytes]]]:
    """Those that are put into it are ended with the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def begun(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All that are begun from now on."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return found


def test_the_first_who_starts_one_gets_the_one_begun_ahead(
    monkeypatch: pytest.MonkeyPatch, ended: list[subprocess.Popen[bytes]]
) -> None:
    found = begun(monkeypatch)
    with worker_ahead():
        (ahead,) = found
        ended += [start_worker(), start_worker()]
    assert ended[0] is ahead
    assert ended[1] is found[1] is not ahead
    assert [process.poll() for process in ended] == [None, None]  # those that are somebody's stay


def test_one_that_nobody_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = begun(monkeypatch)
    with worker_ahead():
        end_worker_ahead()
        assert found[0].returncode is not None
    with pytest.raises(ValueError, match="configuration"), worker_ahead():
        raise ValueError("a configuration that says nothing")
    assert found[1].returncode is not None
    assert all(pipe is not None and pipe.closed for each in found for pipe in (each.stdin, each.stdout))


def test_one_that_ended_meanwhile_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, ended: list[subprocess.Popen[bytes]]
) -> None:
    found = begun(monkeypatch)
    with worker_ahead():
        found[0].kill()
        found[0].wait()
        ended.append(start_worker())
    assert ended[0] is not found[0]
    assert ended[0].poll() is None


def test_no_process_more_is_told_when_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise BlockingIOError("no process more")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with worker_ahead(), pytest.raises(BlockingIOError):
        start_worker()


def test_a_worker_whose_beginner_is_gone_ends_without_a_word(ended: list[subprocess.Popen[bytes]]) -> None:
    process = start_worker()
    ended.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.stdout.read() == b""
    assert process.wait(60) == 0
    process.stdin = None  # closed
