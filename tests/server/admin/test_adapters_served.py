"""Adapters of a server: as models of their own, for some tenants, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.cli import main
from headrace.config import AdapterConfig, Config, ModelConfig, ServerConfig, StorageConfig
from headrace.engine.process.engine_client import EngineClient
from headrace.models.model_folder import open_model
from headrace.server.server import Server
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, CALLER, ROOT, Administered
from tests.support.models.lora_folders import write_lora
from tests.support.remote_workers import worker_host
from tests.support.running_server import CHAT, Client, FakeEngine, asynchronous, living, until

OTHER = declared("other", "other-secret", tenant="blue")
SCOPED = declared("scoped", "scoped-secret", tenant="red", models=("tiny:open",))
OPTIONS: dict[str, Any] = {"context": 256, "kv_tokens": 2048, "threads": 1}


def config_of(folder: Path, tmp_path: Path, *, processes: int = 1, **model: Any) -> Config:
    return Config(
        server=ServerConfig(port=0, drain_s=5.0, processes=processes),
        storage=StorageConfig(folder=str(tmp_path / "state")),
        keys=(ADMIN, CALLER, OTHER, SCOPED),
        models={"tiny": ModelConfig(path=str(folder), options=OPTIONS, **model)},
    )


def running(server: Server) -> Any:
    return living(server, lambda task: Administered(server, FakeEngine(), server.fleet, task))


@asynchronous
async def test_adapters_are_models_with_tenants_caches_and_an_admin_api(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_model(tiny_folder)
    first, second, third = (write_lora(folder, tmp_path / f"a{seed}", seed=seed) for seed in range(3))
    adapters = {
        "open": AdapterConfig(path=str(first)),
        "red-only": AdapterConfig(path=str(second), tenants=("red",)),
    }
    config = config_of(
        tiny_folder, tmp_path, adapters=adapters, aliases=("small",), variants={"int4": {"weights": "int4"}}
    )
    async with running(Server(config)) as server:

        async def answered(model: str, secret: str = "caller-secret", **changes: Any) -> Any:
            asked = CHAT | {"model": model, "max_tokens": 8, "temperature": 0} | changes
            return await server.ask("POST", "/v1/chat/completions", asked, **bearer(secret))

        async def text(model: str, **changes: Any) -> str:
            answer = await answered(model, **changes)
            assert answer.status == 200, answer.body
            assert answer.json["model"] == model or model.startswith("small")
            return answer.json["choices"][0]["message"]["content"]

        async def listed(secret: str) -> list[str]:
            answer = await server.ask("GET", "/v1/models", **bearer(secret))
            return [entry["id"] for entry in answer.json["data"] if ":" in entry["id"]]

        base, opened, red = await text("tiny"), await text("tiny:open"), await text("tiny:red-only")
        assert len({base, opened, red}) == 3
        assert await text("small:open") == opened
        assert await text("tiny@int4:open") != await text("tiny@int4")
        # The same prompt again: the exact cache and the prefix cache keep the adapters apart.
        assert [await text("tiny"), await text("tiny:open"), await text("tiny:red-only")] == [base, opened, red]

        names = ["tiny:open", "tiny@int4:open"]
        assert await listed("other-secret") == names
        assert await listed("scoped-secret") == names
        assert set(await listed("caller-secret")) == {*names, "tiny:red-only", "tiny@int4:red-only"}
        hidden, unknown = await answered("tiny:red-only", "other-secret"), await answered("tiny:none", "other-secret")
        assert hidden.status == unknown.status == 404
        assert hidden.error["message"].replace("red-only", "none") == unknown.error["message"]
        assert (await answered("tiny", "scoped-secret")).status == 404
        assert (await answered("tiny:open", "scoped-secret")).status == 200
        shown = await server.ask("GET", "/v1/models/tiny:open", **bearer("caller-secret"))
        assert (shown.json["parent"], shown.json["kind"]) == ("tiny", "decoder")

        # Loaded while a stream runs.
        reader = asyncio.create_task(answered("tiny", max_tokens=64, ignore_eos=True))
        made = await server.did("POST", "models/tiny/adapters", {"name": "late", "path": str(third)})
        assert (made["id"], made["source"], made["tenants"]) == ("tiny:late", "admin", [])
        late = await text("tiny:late")
        assert late not in (base, opened, red)
        assert (await reader).status == 200
        listing = await server.did("GET", "models/tiny/adapters")
        assert [entry["name"] for entry in listing["data"]] == ["open", "red-only", "late"]
        assert listing["memory"]["tiny"][0]["loaded"] == 3

        # Replaced under the same name: caches find nothing of the one before.
        await server.did("POST", "models/tiny/adapters", {"name": "late", "path": str(first), "tenants": ["red"]})
        assert await text("tiny:late") == opened
        assert (await answered("tiny:late", "other-secret")).status == 404

        monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)

        async def command(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["admin", *arguments, "--url", server.url])
            return code, capsys.readouterr().out

        code, out = await command("load-adapter", "tiny", str(third), "--name", "shell", "--tenants", "red")
        assert code == 0, out
        code, out = await command("adapters", "tiny")
        assert code == 0
        assert "tiny:shell" in out
        assert "all" in out  # tenants of an adapter that none is named for
        assert "none" not in out
        assert (await command("unload-adapter", "tiny", "shell"))[0] == 0
        gone = await server.did("DELETE", "models/tiny/adapters/late")
        assert gone == {"object": "adapter", "id": "tiny:late", "deleted": True}
        assert (await answered("tiny:late")).status == 404
        audit = (await server.did("GET", "audit"))["data"]
        assert [row["what"] for row in audit[:5]] == [
            "adapter.unload",
            "adapter.unload",
            "adapter.load",
            "adapter.load",
            "adapter.load",
        ]

        path = "models/tiny/adapters"
        assert await server.refused("DELETE", f"{path}/open") == (409, "declared_in_config", "name")
        assert await server.refused("DELETE", f"{path}/none") == (404, "adapter_not_found", "adapter")
        assert await server.refused("POST", path, {"name": "open", "path": str(third)}) == (
            409,
            "declared_in_config",
            "name",
        )
        for body, expected in (
            ({"name": "a b", "path": str(third)}, (400, "name")),
            ({"name": "x", "path": str(tmp_path / "none")}, (400, "path")),
            ({"name": "x", "path": str(third), "tenants": ["nobody"]}, (404, "tenant")),
            ({"name": "x"}, (400, "path")),
        ):
            status, _, parameter = await server.refused("POST", path, body)
            assert (status, parameter) == expected
        assert (await server.refused("GET", "models/none/adapters"))[:2] == (404, "model_not_found")


@asynchronous
async def test_an_adapter_reaches_every_process_and_every_worker(tiny_folder: Path, tmp_path: Path) -> None:
    folder = open_model(tiny_folder)
    first, second = (write_lora(folder, tmp_path / f"a{seed}", seed=seed) for seed in range(2))
    async with worker_host(tiny_folder, None, tmp_path / "cache", "--context", "256", "--threads", "1") as remote:
        config = config_of(tiny_folder, tmp_path, processes=2, workers=(remote.address,), replicas=1)
        async with running(Server(config)) as server:
            app = server.server
            await until(lambda: app.context.is_ready and app.fronts is not None and app.fronts.are_ready)
            engine = app.fleet.served["tiny"].engine
            assert isinstance(engine, EngineClient)
            await until(lambda: [each.state for each in engine.replicas()] == ["ready", "ready"])
            place = urlsplit(server.url)
            clients = [Client(*await asyncio.open_connection(place.hostname, place.port)) for _ in range(16)]

            async def answers(model: str) -> set[tuple[int, str]]:
                """Of connections of both processes, whose requests both workers take."""
                asked = CHAT | {"model": model, "max_tokens": 6, "temperature": 0}
                found = [
                    client.ask("POST", "/v1/chat/completions", asked, **bearer("caller-secret")) for client in clients
                ]
                return {
                    (each.status, each.json["choices"][0]["message"]["content"] if each.status == 200 else "")
                    for each in await asyncio.gather(*found)
                }

            async def loaded() -> list[int]:
                memory = (await server.did("GET", "models/tiny/adapters"))["memory"]["tiny"]
                return [each["loaded"] for each in memory]

            await server.did("POST", "models/tiny/adapters", {"name": "new", "path": str(first)})
            assert await loaded() == [1, 1]  # before any request
            base, own = await answers("tiny"), await answers("tiny:new")
            assert len(base) == len(own) == 1
            assert base != own
            assert {status for status, _ in base | own} == {200}
            await server.did("POST", "models/tiny/adapters", {"name": "new", "path": str(second)})
            other = await answers("tiny:new")
            assert len(other) == 1
            assert other not in (base, own)
            await server.did("DELETE", "models/tiny/adapters/new")
            assert await answers("tiny:new") == {(404, "")}
            assert await loaded() == [1, 1]  # the first, until its memory is needed
            for each in clients:
                each.writer.close()


@asynchronous
async def test_an_adapter_that_was_loaded_is_served_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_lora(open_model(tiny_folder), tmp_path / "a", seed=1)
    config = config_of(tiny_folder, tmp_path)
    async with running(Server(config)) as server:
        await server.did("POST", "models/tiny/adapters", {"name": "kept", "path": str(path)})
    async with running(Server(config)) as server:
        asked = CHAT | {"model": "tiny:kept", "max_tokens": 4}
        assert (await server.ask("POST", "/v1/chat/completions", asked, **bearer("caller-secret"))).status == 200
        # Its files have changed since: requests are rejected, with the reason, and the base goes on.
        write_lora(open_model(tiny_folder), path, seed=2)
    async with running(Server(config)) as server:
        refused = await server.ask("POST", "/v1/chat/completions", asked, **bearer("caller-secret"))
        assert refused.status == 400
        assert "are not those that it was registered with" in refused.error["message"]
        asked["model"] = "tiny"
        assert (await server.ask("POST", "/v1/chat/completions", asked, **bearer("caller-secret"))).status == 200
