"""Two servers on one Postgres: what an administrator does at one of them holds at the other, an epoch later."""

from __future__ import annotations

import importlib.util
import secrets
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config import CacheConfig, ExactConfig
from headrace.config.tenant_section import AdminConfig, FastConfig
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, MODELS, Administered, administered
from tests.support.programs.postgres_server import Server, serving, why_not
from tests.support.running_server import asynchronous, until, words

DSN = "TEST_ADMIN_DSN"
KEYS = (ADMIN, declared("app", "app-secret", tenant="red"))

if importlib.util.find_spec("asyncpg") is None:
    pytest.skip("asyncpg is not there: pip install 'headrace[postgres]'", allow_module_level=True)
if (reason := why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def admin(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> AdminConfig:
    """Tables of the test's own."""
    monkeypatch.setenv(DSN, postgres.dsn)
    return AdminConfig(store="postgres", dsn_env=DSN, schema=f"test_{secrets.token_hex(6)}", poll_s=0.05)


@asynccontextmanager
async def gateways(folder: Path, admin: AdminConfig) -> AsyncGenerator[tuple[Administered, Administered]]:
    cache = CacheConfig(exact=ExactConfig(mode="on"))
    fast = FastConfig(variant="@int4")
    options = {"keys": KEYS, "models": MODELS, "admin": admin, "fast": fast, "cache": cache}
    async with administered(folder / "one", **options) as one, administered(folder / "two", **options) as two:
        one.engine.answer = two.engine.answer = words("ok")
        yield one, two


async def followed(one: Administered, two: Administered) -> None:
    await until(lambda: two.administration.shared.applied_epoch == one.administration.shared.epoch)


@asynchronous
async def test_tenants_keys_and_fast_mode_converge(tmp_path: Path, admin: AdminConfig) -> None:
    async with gateways(tmp_path, admin) as (one, two):
        await one.did("POST", "tenants", {"name": "blue", "weight": 3.0})
        key = await one.new_key("blue")
        await followed(one, two)
        assert (await two.chat(key["secret"])).status == 200
        assert two.engine.streams[-1].request.weight == 3.0
        # Changes at both, each on top of the other's.
        await two.did("PATCH", "tenants/blue", {"weight": 5.0})
        await one.did("PATCH", "tenants/blue", {"metadata": {"plan": "gold"}})
        await followed(one, two)
        for each in (one, two):
            shown = await each.did("GET", "tenants/blue")
            assert (shown["weight"], shown["metadata"]) == (5.0, {"plan": "gold"})
        await two.did("PUT", "fast/blue", {"ttl_s": 60, "reason": "a storm"})
        await followed(two, one)
        assert (await one.chat(key["secret"])).json["model"] == "mini@int4"
        await one.did("DELETE", f"keys/{key['id']}")
        await followed(one, two)
        assert (await two.chat(key["secret"])).status == 401
        epochs = [await each.did("GET", "epoch") for each in (one, two)]
        assert [(each["epoch"], each["applied_epoch"]) for each in epochs] == [(6, 6)] * 2
        rows = (await two.did("GET", "audit?order=asc"))["data"]
        assert [row["what"] for row in rows] == [
            "tenant.create",
            "key.create",
            "tenant.change",
            "tenant.change",
            "fast.on",
            "key.revoke",
        ]


@asynchronous
async def test_what_is_invalidated_at_one_is_gone_at_the_other(tmp_path: Path, admin: AdminConfig) -> None:
    async with gateways(tmp_path, admin) as (one, two):
        for each in (one, two, two):
            answer = await each.chat("app-secret", temperature=0)
        assert answer.headers["x-headrace-cache"].startswith("exact")
        await one.did("POST", "cache/invalidate", {"all": True, "tenant": "red"})
        await followed(one, two)
        await until(lambda: not two.administration.invalidations.pending)
        answer = await two.chat("app-secret", temperature=0)
        assert "x-headrace-cache" not in answer.headers
        assert len(two.engine.streams) == 2


@asynchronous
async def test_budgets_that_are_set_at_one_hold_at_the_other(tmp_path: Path, admin: AdminConfig) -> None:
    async with gateways(tmp_path, admin) as (one, two):
        await one.did("POST", "tenants", {"name": "blue", "budgets": [{"limit_micros": 7, "period": "day"}]})
        key = await one.new_key("blue")
        await followed(one, two)
        assert (await two.chat(key["secret"])).status == 200
        ledger = two.server.services.ledger
        assert ledger is not None
        assert [standing.budget.limit_micros for standing in ledger.standings("blue")] == [7]


@asynchronous
async def test_a_server_that_has_never_read_the_keys_lets_nobody_in_unknown(
    tmp_path: Path, admin: AdminConfig, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateways(tmp_path, admin) as (one, _):
        await one.did("POST", "tenants", {"name": "blue"})
        key = await one.new_key("blue")
    # No key of its own, so it would be open to everybody, had others not made keys.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv(DSN, f"postgresql://tests@127.0.0.1:{nobody.getsockname()[1]}/postgres")
        async with administered(tmp_path / "three", keys=(), admin=admin) as running:
            for headers in ({}, bearer(key["secret"]), bearer("wrong")):
                answer = await running.ask("GET", "/v1/models", **headers)
                assert (answer.status, answer.error["code"]) == (503, "keys_unread")
    monkeypatch.setenv(DSN, postgres.dsn)
    async with administered(tmp_path / "three", keys=(), admin=admin) as running:
        running.engine.answer = words("ok")
        assert (await running.ask("GET", "/v1/models")).status == 401
        assert (await running.chat(key["secret"])).status == 200


def test_a_database_without_an_address_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_ADMIN_DSN", raising=False)
    path = tmp_path / "headrace.toml"
    path.write_text(f'[admin]\nstore = "postgres"\n[storage]\nfolder = "{tmp_path}"\n[server]\nport = 0\n')
    assert main(["serve", "--config", str(path)]) == 2
    assert "admin.dsn_env: The environment variable HEADRACE_ADMIN_DSN is not set" in capsys.readouterr().err
    path.write_text('[admin]\nschema = "a; DROP"\n')
    assert main(["config", "check", str(path)]) == 2
    assert "admin.schema" in capsys.readouterr().out
