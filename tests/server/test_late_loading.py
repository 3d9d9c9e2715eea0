"""What a server does after its start, once it is idle: it loads tokenizers whole, and keeps a spare worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from headrace.errors import ModelError
from headrace.server import late_loading
from headrace.server.late_loading import keep_spare_worker, load_rest


class Lazy:
    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self._name, self._log, self._fails = name, log, fails

    def load_encoder(self) -> None:
        if self._fails:
            raise ModelError("The file is gone.")
        self._log.append(self._name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: each pause of the loader by its seconds."""
    found: list[str] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        found.append(f"{seconds:g} s")
        await sleep(0)

    monkeypatch.setattr(late_loading.asyncio, "sleep", noted)
    return found


def load(tokenizers: list[Lazy], is_idle: Callable[[], bool]) -> None:
    asyncio.run(load_rest(cast(Any, tokenizers), is_idle))


def test_tokenizers_are_loaded_when_the_server_is_idle(log: list[str]) -> None:
    idle = iter([False, False, True, True])
    load([Lazy("a", log), Lazy("b", log)], lambda: next(idle))
    assert log == ["1 s", "0.25 s", "0.25 s", "a", "b"]


def test_a_server_that_is_never_idle_loads_them_all_the_same(log: list[str]) -> None:
    load([Lazy("a", log)], lambda: False)
    assert log[-1] == "a"
    assert len(log) == 122


def test_one_that_fails_does_not_keep_the_next_from_loading(log: list[str]) -> None:
    load([Lazy("a", log, fails=True), Lazy("b", log)], lambda: True)
    assert log == ["1 s", "b"]


class Spares:
    """Stands in for `early_worker`."""

    def __init__(self) -> None:
        self.waiting = False
        self.launched = 0

    def is_waiting(self) -> bool:
        return self.waiting

    def launch_early(self) -> None:
        self.launched += 1
        self.waiting = True


def test_a_spare_worker_that_was_taken_is_followed_by_another_when_the_server_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spares = Spares()
    monkeypatch.setattr(late_loading, "early_worker", spares)
    idle = iter([False, True, False, True])
    launched: list[int] = []

    async def turn(_: float) -> None:
        launched.append(spares.launched)
        if len(launched) == 4:
            spares.waiting = False  # a worker took it
        if len(launched) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(late_loading.asyncio, "sleep", turn)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keep_spare_worker(lambda: next(idle)))
    assert launched == [0, 0, 1, 1, 1, 2, 2]
