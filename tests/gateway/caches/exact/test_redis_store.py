"""Redis: shared by gateways, invalidated with one write, and forgetful without ever bringing anything back.

Most of it runs against a dictionary that speaks the few commands that are used. What a real server does is tested at
the end, where the program and the client's package are there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config.cache_section import ExactConfig
from headrace.errors import HeadraceError
from headrace.gateway.caches.exact.cache_key import CacheKey
from headrace.gateway.caches.exact.entry_store import GuardedStore, InvalidationScope
from headrace.gateway.caches.exact.in_flight import JoinTerms
from headrace.gateway.caches.exact.redis import RedisStore
from headrace.gateway.redis_client import connect
from headrace.gateway.requests.text_request import ChoiceDelta
from tests.support.clock import Clock
from tests.support.running_server import asynchronous
from tests.support.stores.exact_caches import Caching, Mouth, cache_key, heard, said, saying, text_of, turns

BOUND_S = 60.0  # of a lookup: no test here is about time
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


class Fake:
    """A Redis of one dictionary."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.values: dict[str, tuple[bytes, float]] = {}
        self.calls = 0  # round trips
        self.commands = 0
        self.closed = False

    def look_up(self, name: str) -> bytes | None:
        self.commands += 1
        value, expires = self.values.get(name, (None, 0.0))
        return value if expires > self.clock.now else None

    def write(self, name: str, value: bytes, px: int, nx: bool = False) -> bool | None:
        if nx and self.look_up(name) is not None:
            return None
        self.commands += 1
        self.values[name] = (value, self.clock.now + px / 1000)
        return True

    async def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        self.calls += 1
        await asyncio.sleep(0)
        return [self.look_up(key) for key in keys]

    async def set(self, name: str, value: bytes, *, px: int) -> Any:
        self.calls += 1
        return self.write(name, value, px)

    async def unlink(self, *names: str) -> int:
        self.calls += 1
        return sum(self.values.pop(name, None) is not None for name in names)

    def pipeline(self, transaction: bool) -> FakePipeline:
        assert not transaction
        return FakePipeline(self)

    async def aclose(self) -> None:
        self.closed = True


class FakePipeline:
    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.wished: list[tuple[Any, ...]] = []

    def set(self, name: str, value: bytes, *, px: int, nx: bool = False) -> None:
        self.wished.append((self.fake.write, name, value, px, nx))

    def get(self, name: str) -> None:
        self.wished.append((self.fake.look_up, name))

    def pexpire(self, name: str, time: int) -> None:
        def expire() -> None:
            value = self.fake.look_up(name)
            if value is not None:
                self.fake.write(name, value, time)

        self.wished.append((expire,))

    async def execute(self) -> list[Any]:
        self.fake.calls += 1
        await asyncio.sleep(0)
        return [function(*arguments) for function, *arguments in self.wished]


async def keep(store: RedisStore, one: CacheKey, data: bytes, seconds: float = 60.0) -> None:
    found = await store.get(one)
    assert found.data is None
    assert await store.put(one, data, seconds, found.ticket)


@asynchronous
async def test_what_one_gateway_stores_another_one_finds() -> None:
    fake = Fake()
    here, there = (RedisStore(fake, bound_s=BOUND_S) for _ in range(2))
    await keep(here, cache_key(), b"answer", seconds=60.0)
    assert (await there.get(cache_key())).data == b"answer"
    assert (await there.get(cache_key(2))).data is None
    fake.clock.now += 60
    assert (await there.get(cache_key())).data is None
    await here.close()
    assert fake.closed


@pytest.mark.parametrize(
    ("scope", "gone"),
    [
        (InvalidationScope(tag="pricing"), "pricing of a, pricing of b"),
        (InvalidationScope(tag="pricing", tenant="a"), "pricing of a"),
        (InvalidationScope(tenant="a"), "pricing of a, plain of a"),
        (InvalidationScope(), "pricing of a, pricing of b, plain of a, plain of b"),
        (InvalidationScope(tenant="a", digest=cache_key().digest), "plain of a"),
        (InvalidationScope(tag="docs"), ""),
    ],
)
@asynchronous
async def test_an_invalidation_is_one_write_and_holds_for_every_gateway(scope: InvalidationScope, gone: str) -> None:
    fake = Fake()
    here, there = (RedisStore(fake, bound_s=BOUND_S) for _ in range(2))
    entries = {
        f"{tag or 'plain'} of {tenant}": cache_key(tenant=tenant, tags=(tag,) if tag else ())
        for tag in ("pricing", "")
        for tenant in "ab"
    }
    for one in entries.values():
        await keep(here, one, b"answer")
    before = fake.calls
    assert await here.remove(scope) == (1 if scope.digest else None)
    assert fake.calls == before + 1
    assert ", ".join([name for name, one in entries.items() if (await there.get(one)).data is None]) == gone
    for name, one in entries.items():
        if name in gone:
            await keep(there, one, b"new")
            assert (await here.get(one)).data == b"new"


@asynchronous
async def test_an_answer_begun_before_an_invalidation_elsewhere_is_not_served_after_it() -> None:
    fake = Fake()
    here, there = (RedisStore(fake, bound_s=BOUND_S) for _ in range(2))
    one = cache_key(tags=["pricing"])
    for _ in range(2):  # whether the tag was known before or not
        found = await here.get(one)
        await there.remove(InvalidationScope(tag="pricing"))
        assert await here.put(one, b"old prices", 60.0, found.ticket)
        assert (await there.get(one)).data is None
    await keep(there, one, b"new prices")
    assert (await here.get(one)).data == b"new prices"


@asynchronous
async def test_what_redis_forgets_makes_misses_and_brings_nothing_back() -> None:
    fake = Fake()
    store = RedisStore(fake, bound_s=BOUND_S)
    one = cache_key(tags=["pricing"])
    await keep(store, one, b"old")
    scopes = [name for name in fake.values if ":scope" in name]
    assert len(scopes) == 4
    for name in scopes:
        kept = dict(fake.values)
        del fake.values[name]
        found = await store.get(one)
        assert found.data is None
        assert (await store.get(one)).data is None
        assert await store.put(one, b"new", 60.0, found.ticket)
        assert (await store.get(one)).data == b"new"
        fake.values = kept
        assert (await store.get(one)).data == b"old"


@asynchronous
async def test_scopes_last_longer_than_their_entries() -> None:
    fake = Fake()
    store = RedisStore(fake, most_seconds=100.0, bound_s=BOUND_S)
    await keep(store, cache_key(), b"x", seconds=1e6)
    (lasting,) = [expires - fake.clock.now for name, (_, expires) in fake.values.items() if ":scope" not in name]
    assert lasting == 100.0
    fake.clock.now += 99
    assert (await store.get(cache_key())).data == b"x"
    fake.clock.now += 99  # every put makes them last anew
    await keep(store, cache_key(2), b"y")
    fake.clock.now += 40  # without that they would be over by now
    assert (await store.get(cache_key(2))).data == b"y"
    fake.clock.now += 20
    assert (await store.get(cache_key(2))).data is None
    await keep(store, cache_key(2), b"y")


@asynchronous
async def test_a_hit_is_one_round_trip_of_bounded_work() -> None:
    fake = Fake()
    store = RedisStore(fake, bound_s=BOUND_S)
    one = cache_key(tags=[f"tag-{number}" for number in range(8)])
    await keep(store, one, b"x")
    calls, commands = fake.calls, fake.commands
    assert (await store.get(one)).data == b"x"
    assert (fake.calls - calls, fake.commands - commands) == (1, 19)


@asynchronous
async def test_a_crowd_is_a_few_round_trips() -> None:
    fake = Fake()
    store = RedisStore(fake, bound_s=BOUND_S)
    crowd = [cache_key(number, tenant="ab"[number % 2], tags=["docs"] if number % 3 else []) for number in range(200)]
    found = await asyncio.gather(*map(store.get, crowd))
    assert all(each.data is None and each.ticket is not None for each in found)
    kept = [store.put(one, bytes([number]), 60.0, found[number].ticket) for number, one in enumerate(crowd)]
    assert all(await asyncio.gather(*kept))
    before = fake.calls
    again = await asyncio.gather(*map(store.get, crowd))
    assert [each.data for each in again] == [bytes([number]) for number in range(200)]
    assert fake.calls - before == 7


@asynchronous
async def test_other_tenants_names_are_not_found_and_not_readable() -> None:
    fake = Fake()
    store = RedisStore(fake, bound_s=BOUND_S)
    theirs = cache_key(tenant="secretive")
    await keep(store, theirs, b"x")
    assert (await store.get(CacheKey("b", theirs.digest))).data is None
    assert await store.remove(InvalidationScope(tenant="b", digest=theirs.digest)) == 0
    assert (await store.get(theirs)).data == b"x"
    assert not any("secretive" in name for name in fake.values)


@asynchronous
async def test_without_a_ticket_and_beyond_its_length_nothing_is_kept() -> None:
    store = RedisStore(Fake(), entry_bytes=10, bound_s=BOUND_S)
    assert not await store.put(cache_key(), b"x", 60.0, None)
    found = await store.get(cache_key())
    assert not await store.put(cache_key(), b"x" * 11, 60.0, found.ticket)
    assert await store.put(cache_key(), b"x" * 10, 60.0, found.ticket)


@asynchronous
async def test_nonsense_in_redis_is_a_miss() -> None:
    fake = Fake()
    caching = Caching(store=RedisStore(fake, bound_s=BOUND_S))
    await caching.ask(cache_key(), saying("right"))
    (name,) = [name for name in fake.values if ":scope" not in name]
    value, expires = fake.values[name]
    for poison in (b"", b"nonsense", value[:-1], value[:24] + b"mx1" + bytes(40), value + bytes(2**21)):
        fake.values[name] = (poison, expires)
        assert text_of(await caching.ask(cache_key(), saying("right"))) == "right"
        assert fake.values[name][0] == value
    assert caching.counted("hit") == 0
    for scope in [name for name in fake.values if ":scope" in name]:
        fake.values[scope] = (b"too short", expires)
    assert text_of(await caching.ask(cache_key(), saying("right"))) == "right"
    assert text_of(await caching.ask(cache_key())) in ("right", "fresh")


@asynchronous
async def test_two_gateways_share_answers_and_invalidations() -> None:
    fake = Fake()
    here, there = (Caching(store=RedisStore(fake, bound_s=BOUND_S)) for _ in range(2))
    one = cache_key(tags=["pricing"])
    mouth = Mouth(ChoiceDelta(0, ""))
    slow = here.cache.generate(await here.look(one), JoinTerms(), lambda: mouth)
    await turns()
    assert await there.cache.invalidate(tag="pricing") is None
    mouth.say(*said("old prices"))
    mouth.end()
    await heard(slow)
    await turns()
    assert text_of(await there.ask(one, saying("new prices"))) == "new prices"
    assert text_of(await here.ask(one)) == "new prices"
    assert here.counted("hit") == 1


def test_without_its_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("headrace.gateway.redis_client.importlib.import_module", missing)
    with pytest.raises(HeadraceError, match=r"headrace\[redis\]"):
        connect("redis://127.0.0.1")


# A real server


def needs_package() -> None:
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the package redis is not there: it comes with headrace[redis]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    if SERVER is None:
        pytest.skip("there is no redis-server and no valkey-server: `make services` installs one")
    needs_package()
    folder: Path = tmp_path_factory.mktemp("redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder))
    with (folder / "log").open("wb") as log, subprocess.Popen([SERVER, *options], stdout=log, stderr=log) as process:
        try:
            _wait_for(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes], tries: int = 200) -> None:
    for _ in range(tries):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            if process.poll() is not None:
                break
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError("the server of the test did not start")


def test_with_a_real_server_entries_come_and_go(server: str) -> None:
    @asynchronous
    async def test() -> None:
        store = RedisStore(connect(server, seconds=5.0), prefix="headrace:test:1", bound_s=5.0)
        one = cache_key(tags=["pricing"])
        await keep(store, one, b"answer \x00\xff")
        assert (await store.get(one)).data == b"answer \x00\xff"
        assert await store.remove(InvalidationScope(tenant="a", digest=one.digest)) == 1
        await keep(store, one, b"again")
        found = await store.get(one)
        assert await store.remove(InvalidationScope(tag="pricing", tenant="a")) is None
        assert (await store.get(one)).data is None
        assert await store.put(one, b"old", 60.0, found.ticket)
        assert (await store.get(one)).data is None
        found = await store.get(one)
        assert await store.put(one, b"short", 0.05, found.ticket)
        await asyncio.sleep(0.1)
        assert (await store.get(one)).data is None
        await store.close()

    test()


def test_with_a_real_server_a_cache_answers_from_it(server: str) -> None:
    @asynchronous
    async def test() -> None:
        client = connect(server, seconds=5.0)
        caching = Caching(
            store=RedisStore(client, prefix="headrace:test:2", bound_s=5.0), config=ExactConfig(ttl="60s")
        )
        caching.cache._store._get_s = caching.cache._store._put_s = 5.0  # pyright: ignore[reportPrivateUsage]
        assert text_of(await caching.ask(cache_key(), saying("Hello"))) == "Hello"
        answers = await asyncio.gather(*(caching.ask(cache_key()) for _ in range(200)))
        assert [text_of(answer) for answer in answers] == ["Hello"] * 200
        await asyncio.gather(*(caching.ask(cache_key(2 + number), saying(f"{number}")) for number in range(200)))
        answers = await asyncio.gather(*(caching.ask(cache_key(2 + number)) for number in range(200)))
        assert [text_of(answer) for answer in answers] == [f"{number}" for number in range(200)]
        assert caching.counted("hit") == 400
        await caching.cache.close()

    test()


def test_a_server_that_is_frozen_or_gone_is_a_miss() -> None:
    """One that takes connections and never says a word, and one where nobody listens."""
    needs_package()

    @asynchronous
    async def test() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(-1)
            writer.close()

        listening = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for gone in (False, True):
            if gone:
                listening.close()
            failed: list[str] = []
            store = RedisStore(connect(f"redis://127.0.0.1:{port}", seconds=0.05))
            guarded = GuardedStore(store, get_s=0.05, clock=Clock(), failed=failed.append)
            assert [await guarded.get(cache_key()) for _ in range(7)] == [None] * 7
            assert failed == ["get"] * 5 + ["skipped"] * 2
            await guarded.close()

    test()
