"""A variant's engine is replaced under traffic: no request fails, and the new weights answer."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import Config, ModelConfig, PinConfig, ServerConfig, StorageConfig
from headrace.engine.process.supervisor import StartError
from headrace.errors import RequestError
from headrace.gateway.images.image_reader import ImageReader
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.llm import AsyncLLM
from headrace.models.model_folder import BUNDLED
from headrace.server.server import Server
from tests.support.accounts import bearer
from tests.support.admin_server import ADMIN, CALLER, ROOT
from tests.support.models.tiny_vision import data_url, picture, write_vision_model
from tests.support.running_server import CHAT, FakeEngine, Running, asynchronous, living, until

SYSTEM = "You answer questions about rivers, lakes and the sea. Say only what you know, in one short sentence. " * 2


@asynchronous
async def test_no_request_fails_while_the_weights_are_swapped(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED / "mini", folder)
    options: dict[str, Any] = {"weights": "int8", "context": 512, "kv_tokens": 4096}
    pin = PinConfig(name="rivers", system=SYSTEM, tenant="red")
    config = Config(
        server=ServerConfig(port=0, drain_s=20.0),
        storage=StorageConfig(folder=str(tmp_path / "state")),
        keys=(ADMIN, CALLER),
        models={"mini": ModelConfig(path=str(folder), options=options, pins=(pin,))},
    )
    server = Server(config)
    async with living(server, lambda task: Running(server, FakeEngine(), server.fleet, task)) as running:
        old = server.fleet._runs["mini"]
        assert isinstance(old, AsyncLLM)

        async def chat(**changes: Any) -> Any:
            answer = await running.ask("POST", "/v1/chat/completions", CHAT | changes, **bearer("caller-secret"))
            assert answer.status == 200, answer.body
            return answer.json

        async def reload(model: str = "mini") -> Any:
            return await running.ask("POST", "/admin/v1/reload", {"model": model}, **bearer(ROOT))

        long = asyncio.create_task(chat(max_tokens=400, ignore_eos=True))
        await until(lambda: bool(old.client._streams))
        traffic = [asyncio.create_task(chat(max_tokens=2)) for _ in range(4)]
        done = await reload()
        assert (done.status, done.json["model"], done.json["changed"]) == (200, "mini", False)
        new = server.fleet._runs["mini"]
        assert isinstance(new, AsyncLLM)
        assert new is not old
        assert (await chat(max_tokens=2))["usage"]["completion_tokens"] == 2
        assert (await long)["usage"]["completion_tokens"] == 400  # on the engine on which it began
        await asyncio.gather(*traffic)
        await until(lambda: not server.fleet._retiring)
        assert old.supervisor.pids[0] is None or old.supervisor._stopping
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where?"}]
        usage = (await chat(messages=messages, max_tokens=2))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 32  # the new engine has the pins

        # a folder that cannot be loaded changes nothing
        serving = server.fleet._runs["mini"]
        (folder / "config.json").write_text("{}")
        refused = await reload()
        assert refused.status >= 400
        assert server.fleet._runs["mini"] is serving
        assert (await chat(max_tokens=2))["usage"]["completion_tokens"] == 2
        unknown = await reload("nothing")
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


@asynchronous
async def test_an_engine_that_does_not_start_leaves_the_old_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.gateway.serving.fleet import Fleet

    fleet = Fleet.of(Config(models={"mini": ModelConfig(options={"weights": "int8"})}))
    old = fleet._runs["mini"]

    async def fails(self: AsyncLLM) -> None:
        raise StartError("no memory")

    monkeypatch.setattr(AsyncLLM, "start", fails)
    with pytest.raises(StartError):
        await fleet.reload("mini")
    assert fleet._runs["mini"] is old
    with pytest.raises(RequestError, match="cannot be reloaded"):
        await fleet.reload("other")
    fleet.abandon()


@asynchronous
async def test_the_encoder_of_images_is_replaced_too_and_the_old_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL.Image", reason="the extra vision is not installed")
    from headrace.gateway.serving.fleet import Fleet

    folder = write_vision_model(tmp_path / "model")
    options = {"weights": "f32", "kv": "f32", "threads": 1, "context": 256, "cache": False}
    fleet = Fleet.of(Config(models={"see": ModelConfig(path=str(folder), options=options)}))
    is_replaced = threading.Event()  # the old encoder is busy until then
    await fleet.start()
    try:
        old = fleet.served["see"].images
        assert old is not None
        old._encoder._thread.submit(is_replaced.wait)
        encoding = asyncio.create_task(measured_and_encoded(old))
        await until(lambda: len(old._queue) == 1)
        await fleet.reload("see")
        is_replaced.set()
        new = fleet.served["see"].images
        assert new is not None
        assert new is not old
        assert await encoding  # by the old encoder
        await until(lambda: not fleet._retiring)
        with pytest.raises(RuntimeError, match="shutdown"):
            old._encoder.submit(lambda: np.zeros((1, 3, 32, 32), np.float32))
        assert await measured_and_encoded(new)

        make, made = fleet._makers["see"], list[ServedVariant]()

        async def fails(self: AsyncLLM) -> None:
            raise StartError("no memory")

        def remember() -> tuple[ServedVariant, AsyncLLM]:
            served, engine = make()
            made.append(served)
            return served, engine

        fleet._makers["see"] = remember
        monkeypatch.setattr(AsyncLLM, "start", fails)
        with pytest.raises(StartError):
            await fleet.reload("see")
        unused = made[0].images
        assert unused is not None
        with pytest.raises(RuntimeError, match="shutdown"):
            unused._encoder.submit(lambda: np.zeros((1, 3, 32, 32), np.float32))
        assert fleet.served["see"].images is new
    finally:
        is_replaced.set()
        await fleet.close()


async def measured_and_encoded(reader: ImageReader) -> bool:
    measured = await reader.measured([{"url": data_url(picture(70, 40, 1))}])
    return bool(await reader._features("", measured[0]))
