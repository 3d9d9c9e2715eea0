"""The registry of workers: leases, what a server makes of them, and a Redis that dies and comes back empty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from headrace.config import Config, ModelConfig, WorkersConfig
from headrace.engine.process.engine_client import EngineClient
from headrace.engine.process.submission import ReplicaState
from headrace.gateway.redis_client import connect
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.registry import worker_announcer
from headrace.gateway.serving.registry.worker_announcer import WorkerAnnouncer
from headrace.gateway.serving.registry.worker_discovery import WorkerDiscovery, changes
from headrace.gateway.serving.registry.worker_registry import WorkerAnnouncement, WorkerRegistry
from tests.support.programs.redis_server import MISSING, PROGRAM, Redis, pretending, redis_server
from tests.support.running_server import asynchronous


def worker(number: int, **changed: Any) -> WorkerAnnouncement:
    given = {"id": f"{number:016x}", "address": f"tcp://127.0.0.1:{9000 + number}", "model": "mini"}
    return WorkerAnnouncement(**(given | changed))


def replica(number: int, *, connected: bool = True, discovered: bool = True) -> ReplicaState:
    return ReplicaState(
        address=f"tcp://127.0.0.1:{9000 + number}",
        state="ready" if connected else "down",
        preemptible=False,
        requests=0,
        discovered=discovered,
        pid=1 if connected else None,
    )


@pytest.mark.parametrize(
    ("known", "announced", "found", "lost"),
    [
        ([], [worker(2), worker(1)], [1, 2], []),
        ([], [worker(1, draining=True)], [], []),
        ([replica(1)], [worker(1, draining=True)], [], []),
        ([replica(1)], [], [], []),  # its lease has ended, but it answers
        ([replica(1, connected=False)], [], [], [1]),
        ([replica(1, connected=False)], [worker(1)], [], []),
        ([replica(1, connected=False, discovered=False)], [], [], []),  # the configuration names it
        ([replica(1, discovered=False)], [worker(1), worker(2)], [2], []),
        ([replica(1), replica(2)], [worker(number) for number in range(1, 9)], [3, 4], []),
        ([replica(1), replica(2, connected=False)], [worker(number) for number in (1, 3, 4, 5, 6)], [3, 4, 5], [2]),
    ],
)
def test_the_connection_says_who_is_there_and_the_registry_whom_to_try(
    known: list[ReplicaState], announced: list[WorkerAnnouncement], found: list[int], lost: list[int]
) -> None:
    expected = [[f"tcp://127.0.0.1:{9000 + number}" for number in numbers] for numbers in (found, lost)]
    assert list(changes(known, announced, most=4)) == expected


class FakeFleet:
    """The workers of one model. A worker is connected as soon as it is added."""

    def __init__(self) -> None:
        self.known: dict[str, ReplicaState] = {}
        self.sequences: dict[str, int] = {}

    def replicas(self, name: str) -> list[ReplicaState]:
        assert name == "mini"
        return list(self.known.values())

    def add_worker(self, name: str, address: str) -> None:
        self.known[address] = replica(int(address[-4:]) - 9000)

    async def remove_worker(self, name: str, address: str) -> None:
        del self.known[address]

    def note_sequences(self, name: str, address: str, sequences: int) -> None:
        self.sequences[address] = sequences

    def disconnect(self, number: int) -> None:
        self.known[f"tcp://127.0.0.1:{9000 + number}"] = replica(number, connected=False)

    @property
    def numbers(self) -> list[int]:
        return [int(address[-4:]) - 9000 for address in self.known]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Generator[Redis]:
    pytest.importorskip("redis", reason="the package redis is not installed")
    if PROGRAM is None:
        pytest.skip(MISSING)
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@asynccontextmanager
async def opened(url: str, namespace: str) -> AsyncGenerator[WorkerRegistry]:
    registry = WorkerRegistry(connect(url, seconds=5.0), namespace=namespace)
    try:
        yield registry
    finally:
        await registry.close()


class FakeRegistry:
    """A registry that answers with the test's workers, or fails."""

    def __init__(self, *found: WorkerAnnouncement) -> None:
        self.found = list(found)
        self.is_down = False

    async def workers(self) -> list[WorkerAnnouncement]:
        if self.is_down:
            raise ConnectionError
        return self.found


def discovery(fleet: FakeFleet, registry: WorkerRegistry | FakeRegistry, *, tls_only: bool = False) -> WorkerDiscovery:
    found = cast("WorkerRegistry", registry)
    return WorkerDiscovery(cast("Fleet", fleet), found, ["mini"], poll_s=60.0, tls_only=tls_only)


@asynchronous
async def test_a_lease_ends_unless_it_is_renewed_and_only_its_owner_removes_it(redis: Redis) -> None:
    async with opened(redis.url, "leases") as registry, opened(redis.url, "other") as other:
        assert await registry.workers() == []
        first, second = worker(1, running=2, waiting=1), worker(2, model="large", preemptible=True)
        await registry.announce(first, 60.0)
        await registry.announce(second, 60.0)
        assert await registry.workers() == [first, second]
        assert await other.workers() == []

        successor = worker(1, id="f" * 16)  # on the same address, after a restart
        await registry.announce(successor, 60.0)
        await registry.leave(first)
        assert await registry.workers() == [successor, second]
        await registry.leave(successor)
        assert await registry.workers() == [second]

        client = connect(redis.url, seconds=5.0)
        await registry.announce(second, 0.001)
        while await client.exists("leases:workers:" + second.address):
            pass
        assert await registry.workers() == []
        assert await client.smembers("leases:workers") == set()
        await client.aclose()


@asynchronous
async def test_entries_that_cannot_be_used_are_left_out(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(redis.url, "entries") as registry:
        client, fleet = connect(redis.url, seconds=5.0), FakeFleet()
        good = worker(1)
        for each in (good, worker(2, address="tcp://10.0.0.5:9000"), worker(3, address="/run/x.socket")):
            await registry.announce(each, 60.0)
        await registry.announce(worker(4, model="large"), 60.0)
        for address, value in (("tcp://a:1", b"?"), ("tcp://a:2", b"x" * 9000), ("tcp://a:3", b"0" * 16 + b'{"id":1}')):
            await client.sadd("entries:workers", address)
            await client.set(f"entries:workers:{address}", value)
        for number, running in ((5, 10**400), (6, -1), (7, 1_000_001)):
            await registry.announce(worker(number, running=running), 60.0)
        found = discovery(fleet, registry)
        with caplog.at_level(logging.WARNING):
            await found.turn()
            await found.turn()
        assert fleet.numbers == [1]
        assert found.announcement(good.address) == good
        assert caplog.text.count("TLS is required") == 1  # said once
        for address in ("tcp://a:1", *(f"tcp://127.0.0.1:{9000 + number}" for number in (5, 6, 7))):
            assert f"the registry's entry for {address} cannot be read" in caplog.text
        await client.aclose()


@asynchronous
async def test_a_server_with_certificates_connects_to_no_worker_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    plain, secured = worker(1), worker(2, address="tls://10.0.0.5:9002")
    registry = FakeRegistry(plain, secured)
    for tls_only, numbers in ((False, [1, 2]), (True, [2])):
        fleet = FakeFleet()
        found = discovery(fleet, registry, tls_only=tls_only)
        with caplog.at_level(logging.WARNING):
            await found.turn()
            await found.turn()
        assert fleet.numbers == numbers
        assert (found.announcement(plain.address) is None) == tls_only
        assert caplog.text.count("has no TLS, but [workers] has certificates") == tls_only  # said once


@pytest.mark.parametrize(("cert_file", "numbers"), [("", [1]), ("server.pem", [])])
@asynchronous
async def test_certificates_in_the_configuration_require_tls_of_announced_workers(
    cert_file: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    section = WorkersConfig(cert_file=cert_file, redis_env="REGISTRY")
    config = Config(models={"mini": ModelConfig(discover_workers=True)}, workers=section)
    fleet = FakeFleet()
    found = WorkerDiscovery.from_config(config, cast("Fleet", fleet), {"REGISTRY": "redis://127.0.0.1:1"})
    assert found is not None
    monkeypatch.setattr(WorkerRegistry, "workers", lambda registry: FakeRegistry(worker(1)).workers())
    await found.turn()
    assert fleet.numbers == numbers


@asynchronous
async def test_a_worker_is_known_by_one_address_however_it_is_written() -> None:
    client = EngineClient([])
    added: list[str] = []

    class ClientFleet(FakeFleet):
        def replicas(self, name: str) -> list[ReplicaState]:
            return client.replicas()

        def add_worker(self, name: str, address: str) -> None:
            added.append(address)
            client.add_replica(address, discovered=True)

    registry = FakeRegistry(worker(1, address="tls://Worker.Test:09001"), worker(2, address="tls://[0:0::1]:9002"))
    found = discovery(ClientFleet(), registry)
    try:
        await found.turn()
        await found.turn()
        assert added == [each.address for each in client.replicas()]
        assert len(added) == 2
        assert all(found.announcement(address) for address in added)
    finally:
        await client.close()


@asynchronous
async def test_a_model_that_cannot_be_followed_holds_up_no_other_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingFleet(FakeFleet):
        fails = True

        def replicas(self, name: str) -> list[ReplicaState]:
            return [] if name == "large" else super().replicas(name)

        def add_worker(self, name: str, address: str) -> None:
            if name == "large" and self.fails:
                raise OverflowError("too large")
            super().add_worker(name, address)

    fleet = FailingFleet()
    registry = FakeRegistry(worker(1, model="large"), worker(2))
    found = WorkerDiscovery(cast("Fleet", fleet), cast("WorkerRegistry", registry), ["large", "mini"], poll_s=60.0)
    await found.turn()
    await found.turn()
    assert fleet.numbers == [2]
    assert caplog.text.count("cannot follow the workers of large") == 1  # said once
    fleet.fails = False
    await found.turn()
    assert fleet.numbers == [2, 1]


@pytest.mark.parametrize("is_down", [False, True])
@asynchronous
async def test_a_load_that_nobody_announces_any_more_is_forgotten(is_down: bool) -> None:
    fleet, registry = FakeFleet(), FakeRegistry(worker(1, running=30, waiting=20), worker(2, running=4))
    found = discovery(fleet, registry)
    await found.turn()
    assert list(fleet.sequences.values()) == [50, 4]
    registry.found, registry.is_down = [worker(2, running=5)], is_down
    await found.turn()
    assert fleet.numbers == [1, 2]  # both still answer
    assert list(fleet.sequences.values()) == [0, 0 if is_down else 5]


@asynchronous
async def test_workers_come_and_go_without_a_restart_and_outlive_their_registry(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    if PROGRAM is None:
        pytest.skip(MISSING)
    fleet = FakeFleet()
    with redis_server(tmp_path) as redis:
        async with opened(redis.url, "fleet") as registry:
            found = discovery(fleet, registry)
            await registry.announce(worker(1, running=3, waiting=2), 60.0)
            await registry.announce(worker(2), 60.0)
            await found.turn()
            assert fleet.numbers == [1, 2]
            assert fleet.sequences["tcp://127.0.0.1:9001"] == 5

            await registry.leave(worker(2))
            await found.turn()
            assert fleet.numbers == [1, 2]  # it still answers
            fleet.disconnect(2)
            await found.turn()
            assert fleet.numbers == [1]

            redis.process.kill()
            redis.process.wait()
            fleet.disconnect(1)
            await found.turn()
            assert not found.answers
            assert fleet.numbers == [1]  # nobody knows whether it is gone

    with redis_server(tmp_path) as redis:  # another one, which knows nobody
        async with opened(redis.url, "fleet") as registry:
            found = discovery(fleet, registry)
            await registry.announce(worker(3), 60.0)
            await found.turn()
            assert found.answers
            assert fleet.numbers == [3]


class FakeEngine:
    """An engine of one replica, which says what it is busy with."""

    def __init__(self, state: str = "ready") -> None:
        self.state = state
        self.statistics: list[dict[str, Any]] = [
            {"scheduler": {"running": 2, "waiting": 1}, "blocks": {"used": 25, "total": 100}}
        ]

    def replicas(self) -> list[ReplicaState]:
        return [msgspec.structs.replace(replica(1), state=self.state)]

    async def stats(self) -> list[dict[str, Any]]:
        return self.statistics


@asynccontextmanager
async def announcing(url: str, namespace: str, engine: FakeEngine) -> AsyncGenerator[WorkerAnnouncer]:
    own = WorkerRegistry(connect(url, seconds=5.0), namespace=namespace)
    announcer = WorkerAnnouncer(own, cast("EngineClient", engine), worker(1), lease_s=60.0)
    running = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await announcer.leave()


async def announced(registry: WorkerRegistry, *expected: WorkerAnnouncement) -> None:
    async with asyncio.timeout(120.0):
        while await registry.workers() != list(expected):
            await asyncio.sleep(0.005)


@asynchronous
async def test_a_worker_announces_its_load_and_its_draining_and_leaves(redis: Redis) -> None:
    async with opened(redis.url, "announcer") as registry:
        engine = FakeEngine()
        async with announcing(redis.url, "announcer", engine) as announcer:
            await announced(registry, worker(1, running=2, waiting=1, kv_used_share=0.25))
            engine.statistics = []  # its process is started again
            announcer.drain()  # said at once, long before the lease ends
            await announced(registry, worker(1, draining=True))
        assert await registry.workers() == []


class HeldEngine(FakeEngine):
    """Says what it is busy with when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def stats(self) -> list[dict[str, Any]]:
        self.asked.set()
        await self.let.wait()
        return self.statistics


class KeptRegistry:
    """A registry that only keeps what is announced to it."""

    def __init__(self) -> None:
        self.announced: asyncio.Queue[WorkerAnnouncement] = asyncio.Queue()

    async def announce(self, worker: WorkerAnnouncement, lease_s: float) -> None:
        self.announced.put_nowait(worker)


@asynchronous
async def test_a_worker_that_drains_while_its_load_is_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_announcer, "_LOAD_S", 60.0)
    engine, registry = HeldEngine(), KeptRegistry()
    announcer = WorkerAnnouncer(
        cast("WorkerRegistry", registry), cast("EngineClient", engine), worker(1), lease_s=3600.0
    )
    running = asyncio.create_task(announcer.run())
    await engine.asked.wait()
    announcer.drain()
    engine.let.set()
    assert (await registry.announced.get()).draining
    assert (await registry.announced.get()).draining  # woken by `drain`
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@asynchronous
async def test_servers_that_start_later_leave_a_worker_alone_that_drains(redis: Redis) -> None:
    async with opened(redis.url, "drained") as registry, announcing(redis.url, "drained", FakeEngine("draining")):
        await announced(registry, worker(1, draining=True, running=2, waiting=1, kv_used_share=0.25))
        fleet = FakeFleet()
        await discovery(fleet, registry).turn()
        assert fleet.numbers == []


@asynchronous
async def test_a_registry_that_hangs_holds_nobody_up_for_longer_than_its_timeout() -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    async with pretending("frozen") as frozen:
        registry = WorkerRegistry(connect(frozen.url, seconds=0.05))
        found = discovery(FakeFleet(), registry)
        await found.turn()
        assert not found.answers
        await registry.close()
