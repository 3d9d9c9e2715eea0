"""How long the exact cache takes: the key of a request, a hit from memory, a hit from sqlite, a hit that is served.

    python benchmarks/exact_cache.py [--prompt 2000] [--answer 200] [--entries 1000] [--seconds 2]
    python benchmarks/exact_cache.py --served [--rounds 5] [--requests 400]

A hit is counted from the prompt's tokens to the last chunk written for the client: the key, the look, and the answer's
chunks as a chat streams them. Prints one JSON object; times are in microseconds. Each of the measurements takes
`--seconds` at most.

`--served` starts `headrace serve` with the bundled model, once with each store, and the bare echo server of
benchmarks/edge beside them. A client on a connection that is kept asks one after the other, in turns of a round each:
its times are from the request's first byte sent to the answer's last byte read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent / "edge"))
from client import Connection

from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.cache_key import CacheKey, cache_key_for
from headrace.gateway.caches.exact.entry_store import EntryStore, GuardedStore
from headrace.gateway.caches.exact.exact_cache import ExactCache
from headrace.gateway.caches.exact.in_flight import JoinTerms
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.exact.sqlite import SqliteStore
from headrace.gateway.database import Database
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenUsage
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.model_folder import BUNDLED, open_model
from headrace.server.api.chat_completions import ChatStream

EDGE: Final = Path(__file__).resolve().parent / "edge"
CHATS: Final = 32  # different ones, each answered before anything is timed
TOKENS: Final = 16  # of an answer
ASKED = TextRequest(model="mini", messages=[{"role": "user", "content": "Hello"}], stream=True, include_usage=True)


class NoEngine:
    def stream(self, request: GenerationRequest) -> OutputStream:
        raise AssertionError("everything is a hit")

    async def stats(self) -> list[dict[str, Any]]:
        return []


class Said:
    """A ready-made answer."""

    def __init__(self, pieces: list[ChoiceDelta]) -> None:
        self._pieces = pieces

    async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
        return all(map(take, self._pieces))

    def cancel(self) -> None:
        pass

    def keeps(self) -> bool:
        return True


def prompts(count: int, tokens: int) -> list[tuple[int, ...]]:
    source = random.Random(1)
    return [tuple(source.randrange(32_000) for _ in range(tokens)) for _ in range(count)]


def key_of(served: ServedVariant, prompt: tuple[int, ...]) -> CacheKey:
    cache_key = cache_key_for(tenant="a", served=served, text_request=ASKED, prompts=[prompt], seeded=False)
    assert cache_key is not None
    return cache_key


async def hit(cache: ExactCache, served: ServedVariant, prompt: tuple[int, ...]) -> int:
    """Return the bytes written."""
    lookup = await cache.look(key_of(served, prompt))
    assert lookup.hit is not None
    events = ChatStream(Exchange(caller=Caller(tenant="a"), text_request=ASKED, served=served))
    written = len(events.begin())

    def take(piece: ChoiceDelta) -> bool:
        nonlocal written
        written += len(events.piece(piece))
        return True

    await lookup.hit.run(take)
    return written + len(events.end())


async def timed(work: Callable[[tuple[int, ...]], Awaitable[object]], asked: list[Any], seconds: float) -> list[float]:
    """Return sorted microseconds."""
    source = random.Random(2)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(found) < 20_000:
        prompt = source.choice(asked)
        begun = time.perf_counter()
        await work(prompt)
        found.append((time.perf_counter() - begun) * 1e6)
        if len(found) % 100 == 0:
            await asyncio.sleep(0)
    return sorted(found)


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[len(times) * 99 // 100], 1),
        "count": len(times),
    }


async def measured(
    store: EntryStore, served: ServedVariant, asked: list[Any], answer: list[ChoiceDelta], seconds: float
) -> Any:
    cache = ExactCache(GuardedStore(store, get_s=5.0, put_s=5.0), CachePolicy(mode="on"))
    end = time.perf_counter() + seconds
    filled: list[Any] = []
    for prompt in asked:
        lookup = await cache.look(key_of(served, prompt))
        generation = cache.generate(lookup, JoinTerms(), lambda: Said(answer))
        await generation.run(lambda piece: True)
        generation.cancel()
        while cache.flights:
            await asyncio.sleep(0)
        filled.append(prompt)
        if time.perf_counter() > end:
            break
    found = summary(await timed(lambda prompt: hit(cache, served, prompt), filled, seconds))
    size = await store.size()
    assert size is not None
    return {**found, "entries": size.entries, "bytes_per_entry": size.bytes // size.entries}


# ServedVariant


def body(number: int, *, stream: bool) -> bytes:
    """Return the bytes of a chat request."""
    asked = {
        "model": "mini",
        "messages": [{"role": "user", "content": f"What turns the wheel of mill number {number}, and where is it?"}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }
    data = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], port: int, path: str, *, seconds: float = 120.0) -> Generator[int, None, None]:
    """Run a server until the block ends; yield its port once it answers on `path`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"it does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        for kind in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
                break


@contextlib.contextmanager
def headrace(folder: Path, store: str) -> Generator[int, None, None]:
    port = free_port()
    folder.mkdir()
    config = folder / "headrace.toml"
    config.write_text(
        f'[server]\nport = {port}\n[storage]\nfolder = "{folder}"\n[models.mini.options]\nweights = "int8"\n'
        f'[cache.exact]\nmode = "on"\nstore = "{store}"\nwait_ms = 2000.0\n'
    )
    command = [sys.executable, "-m", "headrace", "serve", "--config", str(config)]
    with running(command, port, "/health/ready"):
        yield port


@contextlib.contextmanager
def echo() -> Generator[int, None, None]:
    port = free_port()
    command = [sys.executable, str(EDGE / "echo.py"), "--port", str(port), "--tokens-per-s", "100"]
    with running(command, port, "/"):
        yield port


async def asked_of(port: int, *, stream: bool, requests: int) -> list[float]:
    """Return the seconds of each response."""
    connection = await Connection.open(port)
    source = random.Random(3)
    try:
        found: list[float] = []
        for _ in range(requests):
            answer = await connection.ask(body(source.randrange(CHATS), stream=stream))
            found.append(answer.seconds)
        return found
    finally:
        connection.close()


async def through_servers(ports: Mapping[str, int], *, rounds: int, requests: int) -> dict[str, Any]:
    for port in ports.values():
        connection = await Connection.open(port)
        for number in range(CHATS):
            await connection.ask(body(number, stream=False))
        connection.close()
    times: dict[tuple[str, bool], list[float]] = {}
    for turn in range(rounds):
        names = list(ports)[turn % len(ports) :] + list(ports)[: turn % len(ports)]
        for name in names:
            for stream in (False, True):
                await asked_of(ports[name], stream=stream, requests=requests // 10)
                times.setdefault((name, stream), []).extend(
                    await asked_of(ports[name], stream=stream, requests=requests)
                )
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "answer_tokens": TOKENS, "rounds": rounds}
    for (name, stream), seconds in times.items():
        found[f"{name}, {'streamed' if stream else 'whole'}"] = summary(sorted(1e6 * each for each in seconds))
    return found


async def main_served(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports = {
            f"{store} hit": stack.enter_context(headrace(Path(folder) / store, store)) for store in ("memory", "sqlite")
        }
        ports["bare echo"] = stack.enter_context(echo())
        print(json.dumps(await through_servers(ports, rounds=options.rounds, requests=options.requests), indent=2))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=200, help="pieces of an answer")
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0, help="most, of each measurement")
    parser.add_argument("--served", action="store_true", help="through a server and a socket, beside an echo server")
    parser.add_argument("--rounds", type=int, default=5, help="of --served")
    parser.add_argument("--requests", type=int, default=400, help="of each kind in a round")
    options = parser.parse_args()
    if options.served:
        await main_served(options)
        return
    variant = ServedVariant(
        name="mini@int4",
        engine=NoEngine(),
        tokenizer=open_model(BUNDLED / "mini").tokenizer,
        context=32_768,
        fingerprint="fp_benchmark",
    )
    asked = prompts(options.entries, options.prompt)
    usage = TokenUsage(prompt_tokens=options.prompt, output_tokens=options.answer)
    answer = [
        *(ChoiceDelta(0, f" word{number % 10}") for number in range(options.answer)),
        ChoiceDelta(0, finish="stop", usage=usage),
    ]

    async def key(prompt: tuple[int, ...]) -> None:
        key_of(variant, prompt)

    found: dict[str, Any] = {"prompt_tokens": options.prompt, "answer_pieces": options.answer}
    found["key"] = summary(await timed(key, asked, options.seconds))
    found["memory_hit"] = await measured(MemoryStore(), variant, asked, answer, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        try:
            found["sqlite_hit"] = await measured(
                SqliteStore(database, bound_s=5.0), variant, asked, answer, options.seconds
            )
        finally:
            await database.close()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
