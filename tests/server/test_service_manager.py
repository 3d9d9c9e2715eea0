"""What systemd is told: ready, stopping, and that the event loop runs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.server.service_manager import ServiceManager
from tests.support.running_server import asynchronous, serving, until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(10)
        yield found


def test_fields_are_one_datagram(manager: socket.socket) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": manager.getsockname()}).notify(READY=1, STATUS="Serving mini")
    assert manager.recv(4096) == b"READY=1\nSTATUS=Serving mini"


def test_an_abstract_socket_works() -> None:
    name = f"headrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind("\0" + name)
        assert ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).notify(READY=1)
        assert found.recv(64) == b"READY=1"


def test_without_a_manager_nothing_is_sent(tmp_path: Path) -> None:
    assert not ServiceManager({}).notify(READY=1)
    assert not ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify(READY=1)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),  # meant for another process
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdogs_period_is_read(environ: dict[str, str], seconds: float) -> None:
    assert ServiceManager(environ).watchdog_s == seconds


def test_the_watchdog_is_fed_until_the_server_ends(manager: socket.socket) -> None:
    async def test() -> None:
        fed = ServiceManager({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "2000"})
        task = asyncio.create_task(fed.feed_watchdog())
        for _ in range(3):
            assert await asyncio.to_thread(manager.recv, 64) == b"WATCHDOG=1"
        task.cancel()

    asyncio.run(test())


@asynchronous
async def test_a_server_reports_that_it_is_ready_and_stops(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    heard: list[bytes] = []
    manager.setblocking(False)

    def hear() -> bool:
        try:
            heard.append(manager.recv(4096))
        except BlockingIOError:
            return False
        return True

    async with serving():
        await until(hear)
        assert heard == [b"READY=1\nSTATUS=Serving mini"]
    assert hear()
    assert heard[-1] == b"STOPPING=1\nSTATUS=Draining"
