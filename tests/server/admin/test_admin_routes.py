"""The admin API of a server that runs: who may use it, what it takes and what it does."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import CacheConfig, ExactConfig, LedgerConfig
from headrace.config.tenant_section import AdminConfig, FastConfig, TenantConfig
from headrace.gateway.accounts.key_secrets import make_secret
from headrace.server.admin.admin_routes import AdminRoutes
from headrace.server.admin.admin_usage import UsageFilters
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, CALLER, READER, Administered, administered
from tests.support.running_server import CHAT, Client, asynchronous, request, words

PATHS = (
    ("GET", "epoch"),
    ("GET", "tenants"),
    ("POST", "tenants"),
    ("GET", "tenants/red"),
    ("PATCH", "tenants/red"),
    ("DELETE", "tenants/red"),
    ("GET", "tenants/red/limits"),
    ("PUT", "tenants/red/limits"),
    ("GET", "tenants/red/budgets"),
    ("PUT", "tenants/red/budgets"),
    ("GET", "keys"),
    ("POST", "keys"),
    ("GET", "keys/key_0"),
    ("DELETE", "keys/key_0"),
    ("POST", "keys/key_0/rotate"),
    ("GET", "usage"),
    ("GET", "budgets"),
    ("POST", "cache/invalidate"),
    ("GET", "fast"),
    ("PUT", "fast"),
    ("DELETE", "fast"),
    ("PUT", "fast/red"),
    ("DELETE", "fast/red"),
    ("GET", "audit"),
    ("GET", "requests/req_0"),
    ("GET", "live"),
    ("GET", "live/events"),
    ("GET", "latency"),
    ("GET", "lengths"),
    ("GET", "history"),
    ("GET", "feedback"),
    ("GET", "shadows"),
    ("GET", "shadows/trial"),
    ("GET", "shadows/trial/pairs"),
    ("GET", "quality"),
    ("GET", "drift"),
    ("GET", "lab"),
    ("GET", "cache/trial"),
    ("GET", "hard-cases"),
    ("GET", "canary"),
    ("POST", "canary"),
    ("POST", "canary/promote"),
    ("POST", "canary/rollback"),
    ("GET", "pins"),
    ("POST", "pins"),
    ("DELETE", "pins/pin_0"),
    ("GET", "models/mini/adapters"),
    ("POST", "models/mini/adapters"),
    ("DELETE", "models/mini/adapters/orders"),
    ("POST", "reload"),
    ("GET", "workers"),
    ("POST", "workers/drain"),
)
# What a server without keys shows to its own machine.
OPEN_HERE = (
    "live",
    "latency",
    "lengths",
    "history",
    "feedback",
    "shadows",
    "quality",
    "drift",
    "lab",
    "cache/trial",
    "canary",
    "requests/",
)


class Usage:
    def __init__(self) -> None:
        self.asked: list[UsageFilters] = []

    async def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        self.asked.append(filters)
        yield b"tenant,tokens\n"
        for number in range(10):
            yield f"red,{number}\n".encode()


class Cache:
    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        return 2


# Who may


@asynchronous
async def test_without_an_administrator_there_is_no_admin_api(tmp_path: Path) -> None:
    for keys in ((), (CALLER,)):
        async with administered(tmp_path, keys=keys) as running:
            unknown = await running.ask("GET", "/admin/v1/nothing")
            assert (unknown.status, unknown.error["code"]) == (404, "unknown_url")
            for method, path in PATHS:
                if not keys and method == "GET" and path.startswith(OPEN_HERE) and not path.endswith("/pairs"):
                    continue  # see test_live_routes
                for key in ("", "caller-secret", "wrong"):
                    answer = await running.admin(method, path, {}, key=key)
                    assert (answer.status, answer.error["code"]) == (404, "unknown_url"), path
                    assert answer.error["message"] == f"Unknown path '/admin/v1/{path}'."
            document = (await running.ask("GET", "/openapi.json")).body
            assert b"/admin/v1" not in document


@asynchronous
async def test_only_keys_with_rights_may(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        routes = {(route.method, route.path) for route in running.server.app.routes if "/admin/" in route.path}
        assert len(routes) == len(PATHS)  # each of them is tried here
        text = (Path(__file__).parents[3] / "docs" / "reference" / "admin-api.md").read_text(encoding="utf-8")
        for method, path in routes:
            assert f"`{method} {path}`" in text
        for method, path in PATHS:
            assert await running.refused(method, path, {}, key="") == (401, "missing_api_key", None)
            assert await running.refused(method, path, {}, key="wrong") == (401, "invalid_api_key", None)
            assert await running.refused(method, path, {}, key="caller-secret") == (403, "no_admin", None)
            if method != "GET":
                assert await running.refused(method, path, {}, key="reader-secret") == (403, "admin_read_only", None)
        for path in ("epoch", "tenants", "tenants/red", "keys", "keys/reader", "fast", "audit"):
            assert (await running.admin("GET", path, key="reader-secret")).status == 200
        assert await running.refused("POST", "epoch") == (405, "method_not_allowed", None)


@asynchronous
async def test_a_key_with_rights_that_was_made_opens_the_api_and_its_end_closes_it(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        key = await running.did("POST", "keys", {"name": "ops", "tenant": "red", "admin": "write"})
        assert (await running.did("GET", "epoch", key=key["secret"]))["epoch"] == 1
        await running.did("DELETE", f"keys/{key['id']}", key=key["secret"])
        assert await running.refused("GET", "epoch", key=key["secret"]) == (401, "invalid_api_key", None)


@asynchronous
async def test_replies_are_neither_kept_nor_for_other_origins(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        for path, key in (("epoch", "root-secret"), ("keys", "wrong"), ("keys/key_0", "root-secret")):
            answer = await running.admin("GET", path, key=key, origin="https://evil.example")
            assert "access-control-allow-origin" not in answer.headers
        answer = await running.ask("GET", "/v1/models", origin="https://evil.example", **bearer("root-secret"))
        assert "access-control-allow-origin" in answer.headers
        answer = await running.admin("GET", "keys")
        assert answer.headers["cache-control"] == "no-store"
        head = await running.client()
        await head.send(request("HEAD", "/admin/v1/epoch", **bearer("root-secret")))
        assert (await head.answer(to_head=True)).status == 200


# Tenants


@asynchronous
async def test_a_tenant_from_its_making_to_its_end(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        made = await running.did(
            "POST", "tenants", {"name": "blue", "weight": 2.5, "models": ["mini"], "metadata": {"plan": "gold"}}
        )
        assert (made["name"], made["source"], made["weight"], made["models"]) == ("blue", "admin", 2.5, ["mini"])
        assert (made["surfaces"], made["fail"], made["ladder"], made["limits"]["concurrent"]) == (
            None,
            "open",
            True,
            None,
        )
        assert await running.did("GET", "tenants/blue") == made
        changed = await running.did("PATCH", "tenants/blue", {"suspended": True, "unset": ["models", "weight"]})
        assert (changed["suspended"], changed["models"], changed["weight"]) == (True, None, 1.0)
        assert changed["metadata"] == {"plan": "gold"}
        limits = {"limits": {"concurrent": 4}, "surface_limits": {"voice": {"requests_per_s": 2}}}
        found = await running.did("PUT", "tenants/blue/limits", limits)
        assert found["limits"]["concurrent"] == 4
        assert found == await running.did("GET", "tenants/blue/limits")
        assert (await running.did("PUT", "tenants/blue/limits", {}))["limits"]["concurrent"] is None
        budgets = [{"limit_micros": 5_000_000, "period": "month"}]
        found = await running.did("PUT", "tenants/blue/budgets", {"budgets": budgets})
        assert found["budgets"][0]["alerts"] == [50, 80, 100]
        assert (await running.did("GET", "tenants/blue"))["budgets"] == found["budgets"]
        listed = await running.did("GET", "tenants")
        assert [each["name"] for each in listed["data"]] == ["blue", "reader", "red", "root"]
        page = await running.did("GET", "tenants?limit=1&after=blue")
        assert ([each["name"] for each in page["data"]], page["has_more"]) == (["reader"], True)
        assert await running.did("DELETE", "tenants/blue") == {"object": "tenant", "name": "blue", "deleted": True}
        assert await running.refused("GET", "tenants/blue") == (404, "tenant_not_found", "tenant")
        assert await running.refused("POST", "tenants", {"name": "blue"}) == (409, "name_taken", "name")


@asynchronous
async def test_what_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        bad: list[tuple[Any, tuple[str, str]]] = [
            ({}, ("missing_required_parameter", "name")),
            ({"name": "blue", "wieght": 1}, ("unknown_parameter", "wieght")),
            ({"name": "blue", "weight": 0}, ("invalid_value", "weight")),
            ({"name": "blue", "limits": {"speed": 1}}, ("unknown_parameter", "limits.speed")),
            ({"name": "blue", "limits": {"concurrent": 0}}, ("invalid_value", "limits.concurrent")),
            ({"name": "blue", "model_limits": {"mini": {"speed": 1}}}, ("unknown_parameter", "model_limits.speed")),
            ({"name": "blue", "surfaces": ["radio"]}, ("invalid_value", "surfaces[0]")),
            ({"name": "blue", "fail": "maybe"}, ("invalid_value", "fail")),
            (
                {"name": "blue", "budgets": [{"period": "day"}]},
                ("missing_required_parameter", "budgets[0].limit_micros"),
            ),
            ({"name": "x" * 201}, ("invalid_value", "name")),
            ({"name": "a\nb"}, ("invalid_value", "name")),
        ]
        for body, (code, parameter) in bad:
            assert await running.refused("POST", "tenants", body) == (400, code, parameter), body
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"name": "other"}, "name"),
            ({"name": "a/b"}, "name"),
            ({"name": "blue", "models": ["maxi"]}, "models"),
            ({"name": "blue", "model_limits": {"maxi": {}}}, "model_limits.maxi"),
            ({"name": "blue", "budgets": [{"period": "day", "limit_micros": 1, "then": "maxi"}]}, "budgets[0].then"),
        )
        for body, parameter in wrong:
            status, _, found = await running.refused("POST", "tenants", body)
            assert (status, found) == (400, parameter)
        assert (await running.refused("POST", "tenants", b"{"))[1] == "invalid_json"
        assert (await running.refused("POST", "tenants", b'{"name": "\\ud800"}'))[0] == 400
        assert (await running.refused("GET", "tenants?limit=0"))[2] == "limit"
        assert (await running.refused("GET", "tenants?limit=x"))[2] == "limit"
        assert (await running.refused("GET", "tenants?color=red"))[1] == "unknown_parameter"
        assert (await running.refused("GET", "tenants?after=nobody"))[2] == "after"
        assert (await running.refused("PATCH", "tenants/nobody", {"weight": 2.0}))[1] == "tenant_not_found"
        assert (await running.refused("PATCH", "tenants/red", {"weight": 2.0}))[1] == "declared_in_config"
        assert (await running.refused("POST", "tenants", b"x" * 300_000))[0] == 413
        assert (await running.did("GET", "epoch"))["epoch"] == 0


# Keys


@asynchronous
async def test_a_made_key_calls_the_server(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        running.engine.answer = words("ok")
        await running.did("POST", "tenants", {"name": "blue", "weight": 2.0})
        key = await running.did("POST", "keys", {"name": "app", "tenant": "blue", "weight": 0.5, "surface": "voice"})
        assert (await running.ask("POST", "/v1/chat/completions", CHAT, **bearer(key["secret"]))).status == 200
        made = running.engine.streams[-1].request
        assert (made.tenant, made.salt, made.weight, made.surface) == ("blue", "blue", 1.0, "voice")
        new = await running.did("POST", f"keys/{key['id']}/rotate")
        for secret in (key["secret"], new["secret"]):
            assert (await running.ask("GET", "/v1/models", **bearer(secret))).status == 200
        await running.did("POST", f"keys/{key['id']}/rotate", {"overlap_s": 0})
        for secret in (key["secret"], new["secret"]):
            assert (await running.ask("GET", "/v1/models", **bearer(secret))).status == 401
        await running.did("PATCH", "tenants/blue", {"suspended": True})


@asynchronous
async def test_keys_are_listed_without_their_secrets(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        made = [
            await running.did(
                "POST", "keys", {"name": f"k{n}", "tenant": "red", "profiles": ["fast"], "expires_in_s": 60}
            )
            for n in range(3)
        ]
        assert len({each["id"] for each in made}) == len({each["secret"] for each in made}) == 3
        listed = await running.did("GET", "keys")
        assert sorted(each["id"] for each in listed["data"][3:]) == sorted(each["id"] for each in made)
        assert [each["source"] for each in listed["data"]] == ["config"] * 3 + ["admin"] * 3
        assert not any("secret" in each or "sha256" in str(each) for each in listed["data"])
        one = await running.did("GET", f"keys/{made[0]['id']}")
        assert one == {name: value for name, value in made[0].items() if name != "secret"}
        assert one["secrets"][0]["last_four"] == made[0]["secret"][-4:]
        red = await running.did("GET", "keys?tenant=red&limit=2")
        assert ([each["tenant"] for each in red["data"]], red["has_more"]) == (["red"] * 2, True)
        rest = await running.did("GET", f"keys?tenant=red&after={red['last_id']}")
        assert (len(rest["data"]), rest["has_more"]) == (2, False)


@asynchronous
async def test_what_is_wrong_with_a_key_is_refused_by_name(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        key = {"name": "k", "tenant": "red"}
        for body, code, parameter in (
            ({"name": "k"}, "missing_required_parameter", "tenant"),
            (key | {"secret": "mine"}, "unknown_parameter", "secret"),
            (key | {"admin": "all"}, "invalid_value", "admin"),
            (key | {"expires_at": 1}, None, "expires_at"),
            (key | {"expires_at": 2_000_000_000, "expires_in_s": 5}, None, "expires_in_s"),
            (key | {"surface": "voice", "surfaces": ["chat"]}, None, "surface"),
            (key | {"models": ["maxi"]}, None, "models"),
        ):
            assert await running.refused("POST", "keys", body) == (400, code, parameter)
        assert await running.refused("POST", "keys", key | {"tenant": "nobody"}) == (404, "tenant_not_found", "tenant")
        for method, path in (("GET", "keys/key_0"), ("DELETE", "keys/key_0"), ("POST", "keys/key_0/rotate")):
            assert await running.refused(method, path) == (404, "key_not_found", "key")
        assert (await running.refused("POST", "keys/root/rotate", {"overlap_s": 0}))[1] == "declared_in_config"
        assert (await running.refused("POST", "keys/key_0/rotate", {"overlap_s": -1}))[2] == "overlap_s"


@asynchronous
async def test_a_call_with_a_secret_in_a_wrong_place_is_refused_unread(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        secret = make_secret()
        calls: tuple[tuple[str, str, Any], ...] = (
            ("GET", f"keys/{secret}", None),
            ("GET", f"keys?tenant={secret}", None),
            ("GET", f"keys?{secret}=1", None),
            ("POST", "keys", {"name": secret, "tenant": "red"}),
            ("POST", "tenants", {"name": "blue", "metadata": {"key": f"it is {secret}!"}}),
            ("POST", "tenants", {"name": "blue", secret: 1}),
        )
        for method, path, body in calls:
            answer = await running.admin(method, path, body)
            assert (answer.status, answer.error["code"]) == (400, "secret_in_request")
            assert secret.encode() not in answer.body


# Fast mode, caches, usage


@asynchronous
async def test_fast_mode(tmp_path: Path) -> None:
    fast = FastConfig(max_tokens=32, most_s=3600.0)
    async with administered(tmp_path, fast=fast) as running:
        asked = running.administration.switches.fast
        assert await running.did("GET", "fast") == {"object": "list", "data": []}
        on = await running.did("PUT", "fast", {"ttl_s": 600, "reason": "storm"})
        assert (on["tenant"], on["on"], on["reason"], on["by"], on["seconds_left"]) == (
            None,
            True,
            "storm",
            "root",
            600,
        )
        found = asked("red", "mini")
        assert found is not None
        assert found.max_tokens == 32
        off = await running.did("PUT", "fast/red", {"on": False, "ttl_s": 60, "reason": "golden customer"})
        assert (off["tenant"], off["on"]) == ("red", False)
        assert asked("red", "mini") is None
        listed = (await running.did("GET", "fast"))["data"]
        assert [(each["tenant"], each["on"]) for each in listed] == [(None, True), ("red", False)]
        await running.did("DELETE", "fast/red")
        await running.did("DELETE", "fast")
        assert asked("red", "mini") is None
        assert (await running.did("GET", "fast"))["data"] == []
        assert await running.refused("DELETE", "fast") == (404, "fast_not_set", "tenant")
        assert (await running.refused("PUT", "fast", {"ttl_s": 60}))[2] == "reason"
        assert (await running.refused("PUT", "fast", {"reason": "x"}))[2] == "ttl_s"
        assert (await running.refused("PUT", "fast", {"ttl_s": 3601, "reason": "x"}))[2] == "ttl_s"
        assert (await running.refused("PUT", "fast/nobody", {"ttl_s": 5, "reason": "x"}))[0] == 404
    # Where nothing is declared, nothing would become cheaper.
    async with administered(tmp_path, fast=FastConfig()) as running:
        assert await running.refused("PUT", "fast", {"ttl_s": 5, "reason": "x"}) == (409, "fast_not_declared", "on")
        assert (await running.admin("PUT", "fast/red", {"on": False, "ttl_s": 5, "reason": "x"})).status == 200


@asynchronous
async def test_caches(tmp_path: Path) -> None:
    events = CacheConfig(exact=ExactConfig(events={"prices": ("pricing",)}))
    async with administered(tmp_path, caches={"exact": Cache()}, cache=events) as running:
        done = await running.did("POST", "cache/invalidate", {"tags": ["docs"], "events": ["prices"], "tenant": "red"})
        assert (done["removed"], done["tags"], done["tenant"]) == ({"exact": 4}, ["docs", "pricing"], "red")
        assert (await running.did("POST", "cache/invalidate", {"all": True}))["removed"] == {"exact": 2}
        assert await running.refused("POST", "cache/invalidate", {}) == (400, None, "all")


@asynchronous
async def test_usage_is_handed_on_as_it_comes(tmp_path: Path) -> None:
    usage = Usage()
    async with administered(tmp_path, usage=usage) as running:
        answer = await running.admin("GET", "usage?tenant=red&by=key,day&first_day=2026-01-01&last_day=2026-01-31")
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert len(list(csv.DictReader(io.StringIO(answer.body.decode())))) == 10
        filters = UsageFilters(tenant="red", by=("key", "day"), first_day="2026-01-01", last_day="2026-01-31")
        assert usage.asked == [filters]
        answer = await running.admin("GET", "usage?format=json")
        assert answer.headers["content-type"] == "application/json"
        assert (await running.refused("GET", "usage?format=xml"))[2] == "format"
        assert (await running.refused("GET", "usage?first_day=yesterday"))[2] == "first_day"
        assert (await running.refused("GET", "usage?by=day,mood"))[2] == "by[1]"
    async with administered(tmp_path, usage=usage, admin=AdminConfig(export_bytes=20, poll_s=3600.0)) as running:
        assert (await running.refused("GET", "usage"))[:2] == (413, "export_too_large")
    async with administered(tmp_path, ledger=LedgerConfig(keeps="off")) as running:
        assert (await running.refused("GET", "usage"))[:2] == (404, "no_ledger")


# The audit log


@asynchronous
async def test_who_changed_what_is_in_the_audit_log(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        await running.did("POST", "tenants", {"name": "blue", "weight": 2.0}, x_request_id="req-1")
        await running.did("PATCH", "tenants/blue", {"weight": 3.0}, x_request_id="req-2")
        key = await running.did("POST", "keys", {"name": "app", "tenant": "blue"})
        await running.did("POST", f"keys/{key['id']}/rotate", {"overlap_s": 5})
        await running.did("DELETE", f"keys/{key['id']}")
        await running.did("PUT", "fast/blue", {"ttl_s": 60, "reason": "storm"})
        await running.did("DELETE", "fast/blue")
        await running.did("PUT", "tenants/blue/limits", {"limits": {"concurrent": 1}})
        await running.did("PUT", "tenants/blue/budgets", {"budgets": []})
        await running.did("POST", "cache/invalidate", {"all": True, "tenant": "blue"})
        await running.did("DELETE", "tenants/blue")
        await running.refused("DELETE", "tenants/blue")  # what is refused changes nothing
        rows = (await running.did("GET", "audit?order=asc"))["data"]
        assert [row["what"] for row in rows] == [
            "tenant.create",
            "tenant.change",
            "key.create",
            "key.rotate",
            "key.revoke",
            "fast.on",
            "fast.clear",
            "tenant.limits",
            "tenant.budgets",
            "cache.invalidate",
            "tenant.delete",
        ]
        assert {(row["who"], row["tenant"]) for row in rows} == {("root", "blue")}
        assert [row["request"] for row in rows[:2]] == ["req-1", "req-2"]
        assert (rows[1]["before"]["weight"], rows[1]["after"]["weight"]) == (2.0, 3.0)
        assert "metadata" not in rows[1]["after"]  # what has not changed
        assert rows[2]["target"] == f"key:{key['id']}"
        assert rows[5]["reason"] == "storm"
        assert rows[-1]["before"]["weight"] == 3.0
        newest = await running.did("GET", "audit?limit=2")
        assert ([row["seq"] for row in newest["data"]], newest["has_more"]) == ([11, 10], True)
        older = await running.did("GET", f"audit?limit=2&after={newest['data'][-1]['seq']}")
        assert [row["seq"] for row in older["data"]] == [9, 8]
        assert newest["head"] == f"11:{newest['data'][0]['hash']}"


@asynchronous
async def test_the_epoch_is_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        await running.did("POST", "tenants", {"name": "blue"})
        shown = await running.did("GET", "epoch")
        assert (shown["epoch"], shown["applied_epoch"], shown["loaded"]) == (1, 1, True)


# The socket


@asynchronous
async def test_who_may_open_the_socket_needs_no_key(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    admin = AdminConfig(socket=str(path), poll_s=3600.0)
    async with administered(tmp_path / "state", keys=(), admin=admin) as running:
        assert path.stat().st_mode & 0o777 == 0o600

        async def ask(method: str, target: str, body: Any = None, **headers: str) -> Any:
            client = Client(*await asyncio.open_unix_connection(str(path)))
            try:
                return await client.ask(method, target, body, **headers)
            finally:
                client.leave()

        assert (await ask("POST", "/admin/v1/tenants", {"name": "red"})).status == 200
        assert (await ask("GET", "/health/live")).status == 200
        # The port has no admin API, and is open to everybody until there is a key.
        assert (await running.ask("GET", "/v1/models")).status == 200
        assert (await running.admin("GET", "epoch", key="")).status == 404
        assert (await running.ask("GET", "/admin/v1/epoch", headrace_local="true")).status == 404
        key = (await ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "red"})).json
        assert (await running.ask("GET", "/v1/models")).status == 401
        assert (await running.ask("GET", "/v1/models", **bearer(key["secret"]))).status == 200
        assert (await ask("GET", "/v1/models")).status == 401  # for the rest it is a port like the other
        rows = (await ask("GET", "/admin/v1/audit")).json["data"]
        assert {row["who"] for row in rows} == {"local"}
    assert not path.exists()


def test_the_documentation_lists_every_route() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "admin-api.md").read_text(encoding="utf-8")
    routes = AdminRoutes(None, AdminConfig()).routes()  # type: ignore[arg-type]
    for route in routes:
        assert f"`{route.method} {route.path}`" in text
        for name in route.table or ():
            assert f"`{name}`" in text


@pytest.mark.parametrize("keys", [(ADMIN,), (READER,), (declared(admin="read", tenant="red"),)])
@asynchronous
async def test_the_openapi_document_has_the_admin_api_where_there_is_one(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    async with administered(tmp_path, keys=keys, tenants={"red": TenantConfig()}) as running:
        paths = (await running.ask("GET", "/openapi.json")).json["paths"]
        assert set(paths["/admin/v1/keys"]) == {"get", "post"}
        assert isinstance(running, Administered)
