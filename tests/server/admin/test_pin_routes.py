"""Pinned prompts through the admin API and the command, and in the requests of a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import WRONG_USAGE, main
from headrace.config import Config, ModelConfig, PinConfig, ServerConfig, StorageConfig
from headrace.llm import AsyncLLM
from headrace.server.server import Server
from tests.gateway.serving.test_pinned_prompts import PinningEngine
from tests.support.accounts import bearer
from tests.support.admin_server import ADMIN, CALLER, ROOT, administered
from tests.support.running_server import CHAT, FakeEngine, Running, asynchronous, living, until

SYSTEM = (
    "You answer questions about rivers, lakes and the sea. Say only what you know, and say it in one sentence. " * 2
)
NEW = {"name": "rivers", "model": "mini", "system": SYSTEM, "tenant": "red"}


@asynchronous
async def test_pins_are_made_listed_and_deleted_with_an_audit_entry(tmp_path: Path) -> None:
    declared = ModelConfig(pins=(PinConfig(name="file", text="The water ran.", public=True),))
    async with administered(tmp_path, models={"mini": declared}) as server:
        engine = PinningEngine()
        server.fleet.served["mini"].engine = engine
        made = await server.did("POST", "pins", NEW)
        assert (made["name"], made["tenant"], made["public"], made["source"]) == ("rivers", "red", False, "admin")
        await until(lambda: "red" in {salt for salt, _ in engine.pins})
        listed = (await server.did("GET", "pins"))["data"]
        assert [(pin["name"], pin["source"]) for pin in listed] == [("file", "config"), ("rivers", "admin")]
        assert SYSTEM not in str(listed)
        assert await server.did("DELETE", f"pins/{made['id']}") == {"object": "pin", "id": made["id"], "deleted": True}
        await until(lambda: "red" not in {salt for salt, _ in engine.pins})
        audit = (await server.did("GET", "audit"))["data"]
        assert [row["what"] for row in audit[:2]] == ["pin.delete", "pin.create"]
        assert SYSTEM not in str(audit)
        assert await server.refused("DELETE", f"pins/{listed[0]['id']}") == (409, "declared_in_config", "pin")
        assert await server.refused("DELETE", f"pins/{made['id']}") == (404, "pin_not_found", "pin")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": "nothing"}, (400, "model")),
        ({"tenant": "nobody"}, (404, "tenant")),
        ({"public": True}, (400, "system")),
        ({"text": "a"}, (400, "system")),
        ({"name": "a b"}, (400, "name")),
        ({"system_file": "/etc/passwd"}, (400, "system_file")),
    ],
)
def test_a_wrong_pin_is_rejected_by_name(tmp_path: Path, change: dict[str, Any], expected: tuple[int, str]) -> None:
    @asynchronous
    async def run() -> None:
        async with administered(tmp_path) as server:
            status, _, parameter = await server.refused("POST", "pins", NEW | change)
            assert (status, parameter) == expected

    run()


@asynchronous
async def test_the_pins_of_a_deleted_tenant_end_with_it(tmp_path: Path) -> None:
    async with administered(tmp_path) as server:
        engine = PinningEngine()
        server.fleet.served["mini"].engine = engine
        await server.did("POST", "tenants", {"name": "blue"})
        await server.did("POST", "pins", NEW | {"tenant": "blue"})
        await until(lambda: len(engine.pins) == 1)
        await server.did("DELETE", "tenants/blue")
        await until(lambda: not engine.pins)


@asynchronous
async def test_the_command_shows_makes_and_deletes_pins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    text = tmp_path / "system.txt"
    text.write_text(SYSTEM, encoding="utf-8")

    async def run(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["admin", *arguments, "--url", server.url])
        return code, capsys.readouterr().out

    async with administered(tmp_path / "state") as server:
        engine = PinningEngine()
        server.fleet.served["mini"].engine = engine
        code, out = await run("create-pin", "rivers", "--model", "mini", "--file", str(text), "--public")
        assert code == 0
        assert "rivers" in out
        await until(lambda: list(engine.pins.values()) == [True])
        code, out = await run("pins")
        assert code == 0
        assert out.splitlines()[1].split()[1:4] == ["rivers", "mini", "*"]
        id = out.splitlines()[1].split()[0]
        assert (await run("delete-pin", id))[0] == 0
        await until(lambda: not engine.pins)
        assert (await run("create-pin", "rivers", "--model", "mini", "--public"))[0] == WRONG_USAGE


@asynchronous
async def test_a_pin_is_found_by_its_tenant_alone_and_again_after_a_crash(tmp_path: Path) -> None:
    pin = PinConfig(name="rivers", system=SYSTEM, tenant="red")
    public = PinConfig(name="open", system=SYSTEM[::-1], public=True)
    options = {"weights": "int8", "context": 512, "kv_tokens": 2048}
    config = Config(
        server=ServerConfig(port=0, drain_s=5.0),
        storage=StorageConfig(folder=str(tmp_path)),
        keys=(ADMIN, CALLER),
        models={"mini": ModelConfig(options=options, pins=(pin, public))},
    )
    server = Server(config)
    (engine,) = server.fleet._runs.values()
    assert isinstance(engine, AsyncLLM)

    async with living(server, lambda task: Running(server, FakeEngine(), server.fleet, task)) as running:

        async def cached(secret: str, system: str) -> int:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "Where?"}]
            asked = CHAT | {"messages": messages, "max_tokens": 2}
            answer = await running.ask("POST", "/v1/chat/completions", asked, **bearer(secret))
            assert answer.status == 200, answer.body
            return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def pinned() -> list[int]:
            return [stats["blocks"]["pinned"] for stats in await engine.client.stats()]

        whole = await pinned()
        assert whole[0] > 4
        for pid in (engine.supervisor.pids[0], None):
            assert await cached("caller-secret", SYSTEM) >= 32
            assert await cached(ROOT, SYSTEM[::-1]) >= 32
            if pid is not None:
                assert await cached(ROOT, SYSTEM) < 32  # of another tenant
                os.kill(pid, signal.SIGKILL)
                while engine.supervisor.pids == [pid] or await pinned() != whole:  # the new engine computes them again
                    await asyncio.sleep(0.01)
