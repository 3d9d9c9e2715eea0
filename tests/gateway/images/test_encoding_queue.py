"""Images that wait for the encoder: tenants take turns, and what no client waits for is dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.engine.interface.image_rows import AbandonedError
from headrace.gateway.images.encoding_queue import EncodingQueue
from headrace.gateway.images.feature_cache import FeatureKey
from headrace.models.vision.vision_folder import open_vision
from tests.support.models.tiny_vision import write_vision_model


class Encoding:
    """Records what is encoded. Each waits for `gate`, then ends as an encoder between two tiles does."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.began: list[str] = []
        self.counts: list[int] = []
        self.queue: EncodingQueue[str] = EncodingQueue(self.counts.append)

    async def encode(self, name: str, is_abandoned: Callable[[], bool]) -> str:
        self.began.append(name)
        await self.gate.wait()
        if is_abandoned():
            raise AbandonedError
        if name == "broken":
            raise ValueError(name)
        return name.upper()

    def ask(self, tenant: str, name: str) -> asyncio.Task[str]:
        key = FeatureKey(tenant, name.encode())
        return asyncio.create_task(self.queue.encoded(key, partial(self.encode, name)))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def left(task: asyncio.Task[str]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await settled()


def test_tenants_take_turns() -> None:
    async def run() -> None:
        made = Encoding()
        asked = [made.ask("many", f"m{number}") for number in range(4)] + [made.ask("one", "o")]
        await settled()
        assert (made.began, len(made.queue)) == (["m0"], 5)
        made.gate.set()
        assert await asyncio.gather(*asked) == ["M0", "M1", "M2", "M3", "O"]
        assert made.began == ["m0", "m1", "o", "m2", "m3"]
        assert made.counts[-1] == len(made.queue) == 0

    asyncio.run(run())


def test_an_image_that_waits_is_dropped_with_its_last_client() -> None:
    async def run() -> None:
        made = Encoding()
        first, alone, *both = (made.ask("t", name) for name in ("a", "b", "c", "c"))
        await settled()
        assert len(made.queue) == 3
        await left(alone)
        await left(both[0])
        assert len(made.queue) == 2
        made.gate.set()
        assert await asyncio.gather(first, both[1]) == ["A", "C"]
        assert made.began == ["a", "c"]

    asyncio.run(run())


def test_an_image_that_is_encoded_stops_after_its_last_client() -> None:
    async def run() -> None:
        made = Encoding()
        first = made.ask("t", "a")
        await settled()
        await left(first)
        assert len(made.queue) == 1
        behind = made.ask("t", "b")
        made.gate.set()
        assert await behind == "B"
        assert len(made.queue) == 0

    asyncio.run(run())


def test_a_client_that_comes_back_waits_for_what_goes_on_or_starts_it_again() -> None:
    async def run() -> None:
        made = Encoding()
        first = made.ask("t", "a")
        await settled()
        await left(first)
        again = made.ask("t", "a")
        await settled()
        made.gate.set()
        assert await again == "A"
        assert made.began == ["a"]

        calls = 0

        async def stopped_once(is_abandoned: Callable[[], bool]) -> str:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise AbandonedError
            return "late"

        assert await made.queue.encoded(FeatureKey("t", b"x"), stopped_once) == "late"
        assert calls == 2

    asyncio.run(run())


def test_errors_reach_every_client_and_the_next_image_goes_on() -> None:
    async def run() -> None:
        made = Encoding()
        asked = [made.ask("t", name) for name in ("broken", "broken", "b")]
        made.gate.set()
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(each) for each in errors] == ["broken", "broken", "B"]
        assert made.began == ["broken", "b"]

    asyncio.run(run())


def test_shutdown_ends_what_has_not_started() -> None:
    async def run() -> None:
        made = Encoding()
        first, second = made.ask("t", "a"), made.ask("u", "b")
        await settled()
        made.queue.close()
        made.gate.set()
        await made.queue.finish(60)
        assert await first == "A"
        await asyncio.gather(second, return_exceptions=True)
        assert second.cancelled()
        assert made.began == ["a"]

    asyncio.run(run())


def test_the_encoder_asks_before_each_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image", reason="the extra vision is not installed")
    encoder = ImageEncoder(open_vision(write_vision_model(tmp_path)))
    encoder.wait()
    tower: Any = encoder._weights.result()  # pyright: ignore[reportPrivateUsage]
    began: list[int] = []
    flag = threading.Event()
    encode = tower.encode

    def counted(tile: Any) -> Any:
        began.append(len(began))
        if len(began) == 2:
            flag.set()
        return encode(tile)

    monkeypatch.setattr(tower, "encode", counted)
    tiles = np.zeros((5, 3, 32, 32), dtype=np.float32)
    with pytest.raises(AbandonedError):
        encoder.submit(lambda: tiles, None, flag.is_set).result()
    assert began == [0, 1]
    with pytest.raises(AbandonedError):
        encoder.submit(lambda: pytest.fail("decoded"), None, flag.is_set).result()
    assert len(encoder.encode(tiles)) == 5
    encoder.close()
