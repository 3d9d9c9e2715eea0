"""Tenants and keys through a server that runs: what a key may use, how long it holds, and what the engine hears."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import KeyConfig, StorageConfig
from headrace.config.tenant_section import AdminConfig, TenantConfig
from headrace.gateway.accounts.key_secrets import make_secret
from headrace.gateway.accounts.tenant_labels import TenantLabels
from headrace.observe import metrics
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, MODELS, Administered, administered
from tests.support.clock import Clock
from tests.support.running_server import CHAT, asynchronous, request, say, until, words

BATCH = "/v1/batches"


def scoped(name: str, **scope: Any) -> KeyConfig:
    return declared(name, f"{name}-secret", tenant="red", **scope)


async def models(running: Administered, secret: str) -> list[str]:
    answer = await running.ask("GET", "/v1/models", **bearer(secret))
    return [each["id"] for each in answer.json["data"]]


# What a key may use


@asynchronous
async def test_a_model_out_of_scope_does_not_exist(tmp_path: Path) -> None:
    keys = (ADMIN, scoped("all"), scoped("one", models=("mini",)), scoped("variant", models=("mini@int4",)))
    async with administered(tmp_path, keys=keys, models=MODELS) as running:
        running.engine.answer = words("ok")
        assert await models(running, "all-secret") == ["mini", "mini@int4", "draft"]
        assert await models(running, "one-secret") == ["mini", "mini@int4"]
        assert await models(running, "variant-secret") == ["mini@int4"]
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", CHAT | {"max_tokens": 5}),
            ("/v1/messages/count_tokens", CHAT),
            ("/v1/responses", {"input": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            there = await running.ask("POST", path, body | {"model": "draft"}, **bearer("one-secret"))
            nowhere = await running.ask("POST", path, body | {"model": "dxxft"}, **bearer("one-secret"))
            assert there.status == nowhere.status == 404, path
            same = [re.sub(rb"req_\w+", b"", answer.body.replace(b"draft", b"dxxft")) for answer in (there, nowhere)]
            assert same[0] == same[1]  # but for the request's id
            assert b"draft" not in nowhere.body
        for path in ("/v1/models/draft", "/v1/models/dxxft"):
            assert (await running.ask("GET", path, **bearer("one-secret"))).status == 404
        assert (await running.chat("one-secret", model="mini@int4")).json["model"] == "mini@int4"
        # Without a name, the first that it may use.
        assert (await running.chat("variant-secret")).json["model"] == "mini@int4"
        assert (await running.chat("variant-secret", model="mini")).status == 404


@asynchronous
async def test_what_a_key_and_its_tenant_both_allow_is_allowed(tmp_path: Path) -> None:
    tenants = {"red": TenantConfig(models=("mini", "draft"), surfaces=("chat", "voice"))}
    keys = (ADMIN, scoped("narrow", models=("draft", "mini@int4"), surfaces=("voice", "batch")))
    async with administered(tmp_path, keys=keys, tenants=tenants, models=MODELS) as running:
        running.engine.answer = words("ok")
        assert await models(running, "narrow-secret") == ["mini@int4", "draft"]
        assert (await running.chat("narrow-secret", model="draft")).status == 200
        assert running.engine.streams[-1].request.surface == "voice"
        answer = await running.chat("narrow-secret", model="draft", surface="batch")
        assert (answer.status, answer.error["code"]) == (403, "surface_not_allowed")


@asynchronous
async def test_surfaces_and_profiles_out_of_scope_are_refused_by_name(tmp_path: Path) -> None:
    keys = (ADMIN, scoped("key", surfaces=("voice",), profiles=("standard",)))
    async with administered(tmp_path, keys=keys) as running:
        running.engine.answer = words("ok")
        assert (await running.chat("key-secret")).status == 200
        assert running.engine.streams[-1].request.surface == "voice"
        for changes in ({"surface": "agent"}, {"profile": "fast"}):
            for how in (changes, {}):
                headers = {} if how else {f"x-headrace-{name}": value for name, value in changes.items()}
                answer = await running.ask(
                    "POST", "/v1/chat/completions", CHAT | how, **bearer("key-secret"), **headers
                )
                (name,) = changes
                assert (answer.status, answer.error["type"], answer.error["code"], answer.error["param"]) == (
                    403,
                    "permission_error",
                    f"{name}_not_allowed",
                    name,
                )
        assert len(running.engine.streams) == 1


# How long a key holds


@asynchronous
async def test_a_rotated_key_holds_with_both_secrets_for_the_overlap(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        running.engine.answer = words("ok")
        wall = Clock()
        running.set_clocks(wall, Clock())
        key = await running.new_key("red")
        new = await running.did("POST", f"keys/{key['id']}/rotate", {"overlap_s": 60})
        for secret in (key["secret"], new["secret"]):
            assert (await running.chat(secret)).status == 200
        wall.now += 60
        late = await running.chat(key["secret"])
        assert (late.status, late.error["code"]) == (401, "expired_api_key")
        assert (await running.chat(new["secret"])).status == 200


@asynchronous
async def test_keys_outlive_the_server(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        await running.did("POST", "tenants", {"name": "blue", "weight": 2.0})
        key, gone = await running.new_key("blue"), await running.new_key("blue")
        await running.did("DELETE", f"keys/{gone['id']}")
    async with administered(tmp_path, keys=()) as running:
        running.engine.answer = words("ok")
        assert (await running.chat(key["secret"])).status == 200
        assert running.engine.streams[-1].request.weight == 2.0
        assert (await running.chat(gone["secret"])).status == 401
        # The configuration has no key any more. The server stays closed all the same.
        assert (await running.ask("POST", "/v1/chat/completions", CHAT)).status == 401


@asynchronous
async def test_a_stream_of_a_tenant_that_is_suspended_goes_on_to_its_end(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        await running.did("POST", "tenants", {"name": "blue"})
        secret = (await running.new_key("blue"))["secret"]
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT | {"stream": True}, **bearer(secret)))
        await until(lambda: bool(running.engine.open))
        (stream,) = running.engine.open
        say(stream, "one ")
        assert (await client.head())[0] == 200
        await running.did("PATCH", "tenants/blue", {"suspended": True})
        refused = await running.chat(secret)
        assert (refused.status, refused.error["code"]) == (403, "tenant_suspended")
        assert (await running.ask("GET", "/v1/models", **bearer(secret))).status == 403
        say(stream, "two", end=True)
        said = b""
        while chunk := await client.chunk():
            said += chunk
        assert b"two" in said
        assert said.endswith(b"[DONE]\n\n")
        # It is charged like any other.
        usage = (await running.admin("GET", "usage?tenant=blue&format=json&by=tenant")).json["rows"]
        assert [(row["requests"], row["output_tokens"] > 0) for row in usage] == [(1, True)]
        running.engine.answer = words("ok")
        await running.did("PATCH", "tenants/blue", {"suspended": False})
        assert (await running.chat(secret)).status == 200


# Batches


async def upload(running: Administered, secret: str, count: int, **body: Any) -> str:
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | body})
        for n in range(count)
    ]
    parts = (
        '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + "\n".join(lines) + "\r\n"
        "--x--\r\n"
    )
    answer = await running.ask(
        "POST", "/v1/files", parts.encode(), content_type="multipart/form-data; boundary=x", **bearer(secret)
    )
    assert answer.status == 200, answer.body
    return answer.json["id"]


async def begun(running: Administered, secret: str, count: int, **body: Any) -> str:
    given = {
        "input_file_id": await upload(running, secret, count, **body),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    answer = await running.ask("POST", BATCH, given, **bearer(secret))
    assert answer.status == 200, answer.body
    return answer.json["id"]


async def results(running: Administered, secret: str, batch: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A batch that has ended, with its lines in their order."""
    async with asyncio.timeout(120.0):
        while (found := (await running.ask("GET", f"{BATCH}/{batch}", **bearer(secret))).json)["status"] != "completed":
            await asyncio.sleep(0.01)
    lines: list[dict[str, Any]] = []
    for file in (found["output_file_id"], found["error_file_id"]):
        if file is not None:
            content = (await running.ask("GET", f"/v1/files/{file}/content", **bearer(secret))).body
            lines += [json.loads(line) for line in content.splitlines()]
    return found, sorted(lines, key=lambda line: line["custom_id"])


@pytest.mark.parametrize("how", ["revoked", "suspended"])
@asynchronous
async def test_a_batch_runs_on_behalf_of_its_key_and_stops_with_it(how: str, tmp_path: Path) -> None:
    storage = StorageConfig(folder=str(tmp_path), batch_running=1)
    async with administered(tmp_path, models=MODELS, storage=storage) as running:
        await running.did("POST", "tenants", {"name": "blue", "weight": 2.0})
        key = await running.new_key("blue", models=["mini"], weight=0.25)
        other = await running.new_key("blue")
        batch = await begun(running, key["secret"], 4)
        await until(lambda: len(running.engine.streams) == 1)
        sent = running.engine.streams[0].request
        assert (sent.tenant, sent.salt, sent.weight, sent.surface) == ("blue", "blue", 0.5, "batch")
        if how == "revoked":
            await running.did("DELETE", f"keys/{key['id']}")
        else:
            await running.did("PATCH", "tenants/blue", {"suspended": True})
        say(running.engine.streams[0], "done", end=True)
        await until(lambda: not running.server.durable.batches.unfinished())
        if how == "suspended":
            await running.did("PATCH", "tenants/blue", {"suspended": False})
        found, lines = await results(running, other["secret"], batch)
        done = 0 if how == "revoked" else 1  # a suspended tenant's request goes on to its end
        assert (found["request_counts"]["completed"], found["request_counts"]["failed"]) == (done, 4 - done)
        for line in lines[:done]:
            assert line["response"]["body"]["choices"][0]["message"]["content"] == "done"
        code = "key_ended" if how == "revoked" else "tenant_suspended"
        refused = [
            (line["response"]["status_code"], line["response"]["body"]["error"]["code"]) for line in lines[done:]
        ]
        assert refused == [(403, code)] * (4 - done)
        assert len(running.engine.streams) == 1


@asynchronous
async def test_a_batch_may_what_its_key_may(tmp_path: Path) -> None:
    async with administered(tmp_path, models=MODELS) as running:
        running.engine.answer = words("ok")
        key = await running.new_key("red", models=["mini"])
        _, lines = await results(running, key["secret"], await begun(running, key["secret"], 1, model="draft"))
        (answer,) = [line["response"] for line in lines]
        assert (answer["status_code"], answer["body"]["error"]["code"]) == (404, "model_not_found")
        _, lines = await results(running, key["secret"], await begun(running, key["secret"], 1, model="mini"))
        assert [line["response"]["status_code"] for line in lines] == [200]


# What the engine hears


@asynchronous
async def test_weight_and_salt_of_a_tenant_reach_the_engine(tmp_path: Path) -> None:
    tenants = {"red": TenantConfig(weight=3.0)}
    keys = (ADMIN, scoped("a", weight=0.5), declared("b", "b-secret"))
    async with administered(tmp_path, keys=keys, tenants=tenants) as running:
        running.engine.answer = words("ok")
        await running.did("POST", "tenants", {"name": "blue", "weight": 8.0})
        made = (await running.new_key("blue", weight=0.25))["secret"]
        for secret in ("a-secret", "b-secret", made):
            assert (await running.chat(secret)).status == 200
        sent = [stream.request for stream in running.engine.streams]
        assert [each.tenant for each in sent] == ["red", "b", "blue"]
        assert [each.weight for each in sent] == [1.5, 1.0, 2.0]
        assert len({each.salt for each in sent}) == 3
        assert all(each.salt for each in sent)
        # A change holds for the next request.
        await running.did("PATCH", "tenants/blue", {"weight": 4.0})
        await running.chat(made)
        assert running.engine.streams[-1].request.weight == 1.0


# Metrics


@asynchronous
async def test_metrics_name_no_more_tenants_than_they_may(tmp_path: Path) -> None:
    keys = (ADMIN, *(declared(f"crowd-{n}", f"crowd-{n}-secret") for n in range(200)))
    admin = AdminConfig(tenant_labels=5, poll_s=3600.0)
    async with administered(tmp_path, keys=keys, admin=admin) as running:
        running.engine.answer = words("ok")
        client = await running.client()
        for number in range(200):
            headers = bearer(f"crowd-{number}-secret")
            assert (await client.ask("POST", "/v1/chat/completions", CHAT, **headers)).status == 200
        shown = (await running.ask("GET", "/metrics")).body.decode()
        named = set(re.findall(r'tenant="(crowd-\d+)"', shown))
        assert named == {f"crowd-{n}" for n in range(5)}
        assert 'tenant="other"' in shown
        assert "-secret" not in shown
        # Who has more traffic later takes a label, and the series of who gives it up are gone.
        labels: TenantLabels = metrics._label.__self__  # type: ignore[attr-defined]
        for _ in range(2):
            labels._monotonic = lambda last=labels._ranked: last + 60.0
            for _ in range(3):
                await client.ask("POST", "/v1/chat/completions", CHAT, **bearer("crowd-199-secret"))
        shown = (await running.ask("GET", "/metrics")).body.decode()
        again = set(re.findall(r'tenant="(crowd-\d+)"', shown))
        assert len(again) == 5
        assert "crowd-199" in again
        assert len(named - again) == 1


# The storage of another server

HOLDING = """
import fcntl, sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
file = open(folder / "headrace.lock", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@asynchronous
async def test_a_server_whose_folder_is_another_servers_goes_on_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        async with administered(folder) as running:
            running.engine.answer = words("ok")
            assert (await running.chat("caller-secret")).status == 200
            # It may be a key that this server cannot read, so it is not said to be wrong.
            answer = await running.chat(make_secret())
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "keys_unread", "1")
            assert (await running.refused("POST", "tenants", {"name": "blue"}))[:2] == (503, "storage_unavailable")
            other.stdin.close()
            other.wait(120)
            # Its own from now on.
            await running.did("POST", "tenants", {"name": "blue"})
            assert (await running.chat((await running.new_key("blue"))["secret"])).status == 200
