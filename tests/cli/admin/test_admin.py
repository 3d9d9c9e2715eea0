"""`headrace admin` against a server that runs: what is printed, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import FAILED, WRONG_USAGE, app, main
from headrace.config import LedgerConfig, LogConfig, ModelConfig, PriceConfig
from headrace.config.tenant_section import AdminConfig, BudgetConfig, TenantConfig
from headrace.gateway.accounts.key_secrets import make_secret, secrets_in
from headrace.observe.logs import configure_log
from headrace.server.admin.admin_usage import UsageFilters
from tests.support.accounts import declared
from tests.support.admin_server import ADMIN, ROOT, administered
from tests.support.running_server import asynchronous, until, words


@dataclass
class Done:
    code: int
    out: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Terminal:
    """Commands for a server, with a key."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str = "") -> None:
        self._capsys = capsys
        self.url = url

    async def __call__(self, *arguments: str) -> Done:
        self._capsys.readouterr()
        url = ["--url", self.url] if self.url else []
        code = await asyncio.to_thread(main, ["admin", *arguments, *url])
        captured = self._capsys.readouterr()
        return Done(code, captured.out, captured.err.strip())


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    configure_log(
        LogConfig(), io.StringIO()
    )  # the server is in this process, and its log would be among what is printed
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    yield Terminal(capsys)
    root.handlers[:], level = before
    root.setLevel(level)


class Usage:
    async def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        yield f"{filters.format} {filters.tenant} {filters.first_day} {filters.last_day} {filters.by[0]}\n".encode()


class Cache:
    async def invalidate(self, *, tenant: str | None = None, tag: str | None = None) -> int | None:
        return 1


@asynchronous
async def test_tenants(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        terminal.url = running.url
        done = await terminal("create-tenant", "blue", "--set", "weight=2", "--set", 'metadata={"plan": "gold"}')
        assert done.code == 0
        assert re.search(r"^weight +2 *$", done.out, re.MULTILINE)
        assert "gold" in done.out
        done = await terminal("change-tenant", "blue", "--set", "suspended=true", "--unset", "weight", "--json")
        assert (done.json["suspended"], done.json["weight"]) == (True, 1.0)
        assert (await terminal("change-tenant", "blue")).error == "headrace: Nothing to change. Use --set or --unset."
        done = await terminal("change-tenant", "blue", "--set", 'limits={"concurrent": 2}')
        assert re.search(r'^limits +{"concurrent": 2}$', done.out, re.MULTILINE)
        assert re.search(r"^caches +-$", done.out, re.MULTILINE)
        done = await terminal("tenants")
        assert [line.split()[0] for line in done.out.splitlines()] == ["name", "blue", "reader", "red", "root"]
        done = await terminal("tenants", "--limit", "1", "--after", "blue")
        assert "reader" in done.out
        assert "More entries exist" in done.error
        assert (await terminal("tenant", "red", "--json")).json["source"] == "config"
        assert (await terminal("delete-tenant", "blue", "--json")).json["deleted"] is True
        done = await terminal("tenant", "blue")
        assert (done.code, done.error) == (WRONG_USAGE, "headrace: Unknown tenant 'blue'.")
        done = await terminal("create-tenant", "green", "--set", "weight")
        assert (done.code, done.error) == (WRONG_USAGE, "headrace: Expected NAME=VALUE, found 'weight'.")
        done = await terminal("create-tenant", "green", "--set", "weihgt=1")
        assert "Unknown parameter 'weihgt'. Did you mean 'weight'?" in done.error


@asynchronous
async def test_keys(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        terminal.url = running.url
        flags = (
            "--models",
            "mini",
            "--surfaces",
            "chat, voice",
            "--expires-in",
            "90d",
            "--set",
            'limits={"concurrent": 2}',
        )
        done = await terminal("create-key", "app", "--tenant", "red", *flags)
        secret = done.out.splitlines()[-1]
        assert [match[1] for match in secrets_in(secret)] == [secret]
        assert done.out.count(secret) == 1
        key = running.administration.directory.identify({"x-api-key": secret})
        assert (key.models, key.surfaces, key.limits.concurrent) == ((frozenset({"mini"}),), ("chat", "voice"), 2)
        done = await terminal("rotate-key", key.key, "--overlap", "2h", "--json")
        assert done.json["secret"] != secret
        assert [each["expires_at"] is None for each in done.json["secrets"]] == [False, True]
        done = await terminal("rotate-key", key.key)
        assert re.search(
            rf"^secrets +…{secret[-4:]} of [-0-9]+ [:0-9]+ until .*, …[\w-]{{4}} of ", done.out, re.MULTILINE
        )
        done = await terminal("keys", "--tenant", "red")
        assert done.out.splitlines()[0].split()[:4] == ["id", "name", "tenant", "status"]
        assert secret[-4:] in done.out
        assert secret not in done.out
        done = await terminal("revoke-key", key.key, "--json")
        assert done.json["status"] == "revoked"
        assert (await terminal("revoke-key", "key_0")).error == "headrace: Unknown key id."
        assert (await terminal("rotate-key", key.key, "--overlap", "soon")).code == WRONG_USAGE
        assert (await terminal("create-key", "app", "--tenant", "red", "--admin", "all")).code == WRONG_USAGE


@asynchronous
async def test_fast_mode_caches_usage_and_epoch(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path, usage=Usage(), caches={"exact": Cache()}) as running:
        terminal.url = running.url
        assert (
            await terminal("fast", "on")
        ).error == "headrace: Missing --reason. The reason is written to the audit log."
        done = await terminal("fast", "on", "--for", "10m", "--reason", "a storm", "--json")
        assert (done.json["tenant"], done.json["seconds_left"]) == (None, 600)
        assert (await terminal("fast", "off", "--tenant", "red", "--reason", "x")).code == 0
        done = await terminal("fast")
        assert "a storm" in done.out
        assert [line.split()[:2] for line in done.out.splitlines()] == [["tenant", "on"], ["*", "yes"], ["red", "no"]]
        assert (await terminal("fast", "clear", "--json")).json["deleted"] is True
        assert (await terminal("fast", "clear")).code == WRONG_USAGE
        done = await terminal("invalidate", "--tag", "docs", "--tag", "prices", "--json")
        assert done.json["removed"] == {"exact": 2}
        assert (await terminal("invalidate")).code == WRONG_USAGE
        assert (await terminal("invalidate", "--all", "--tenant", "red", "--json")).json["removed"] == {"exact": 1}
        done = await terminal(
            "usage", "--csv", "--tenant", "red", "--since", "2026-01-01", "--until", "2026-02-01", "--by", "key, day"
        )
        assert done.out == "csv red 2026-01-01 2026-02-01 key\n"
        assert (await terminal("usage", "--csv", "--json")).code == WRONG_USAGE
        assert (await terminal("usage", "--json")).out == "json None 0000-00-00 9999-99-99 day\n"
        done = await terminal("epoch", "--json")
        assert (done.json["epoch"], done.json["applied_epoch"]) == (5, 5)


def words_of(done: Done) -> list[list[str]]:
    return [line.split() for line in done.out.splitlines()]


PRICED: dict[str, Any] = {
    "prices": {"mini": PriceConfig(input=1.0, output=2000.0)},
    "keys": (ADMIN, declared("app", "app-secret", tenant="red"), declared("blue", "blue-secret")),
    "tenants": {
        "red": TenantConfig(
            budgets=(
                BudgetConfig(limit_micros=20_000_000, period="day"),
                BudgetConfig(limit_micros=7_000_000, period="month", endpoint="/v1/embeddings"),
            )
        )
    },
}


@asynchronous
async def test_usage_is_a_table_in_the_currency_and_its_export_is_exact(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path, ledger=LedgerConfig(currency="EUR"), **PRICED) as running:
        terminal.url = running.url
        running.engine.answer = words("one ", "two")
        for secret in ("app-secret", "app-secret", "blue-secret"):
            assert (await running.chat(secret)).status == 200
        prompt = len(running.engine.streams[0].request.prompt)
        cost = (prompt + 2 * 2000) / 1e6
        heading, *rows = words_of(await terminal("usage"))
        assert heading == "tenant model requests input cached output seconds cost (EUR) saved".split()
        assert rows == [
            ["blue", "mini", "1", str(prompt), "0", "2", "0.0", f"{cost:.4f}", "0.00"],
            ["red", "mini", "2", str(2 * prompt), "0", "4", "0.0", f"{2 * cost:.4f}", "0.00"],
            ["total", "3", str(3 * prompt), "0", "6", "0.0", f"{3 * cost:.4f}", "0.00"],
        ]
        exact = (await terminal("usage", "--json", "--by", "tenant")).json
        assert exact["currency"] == "EUR"
        assert [row["micros"] for row in exact["rows"]] == [prompt + 4000, 2 * (prompt + 4000)]
        assert "micros" in (await terminal("usage", "--csv")).out.splitlines()[0]


@asynchronous
async def test_budgets_are_shown_with_what_is_spent_reserved_and_left(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path, **PRICED) as running:
        terminal.url = running.url
        running.engine.answer = words("one ", "two")
        assert (await running.chat("app-secret")).status == 200
        spent = len(running.engine.streams[0].request.prompt) + 4000
        running.engine.answer = None
        waiting = asyncio.create_task(running.chat("app-secret"))
        await until(lambda: len(running.engine.open) == 1)
        day, month = (await terminal("budgets", "--json")).json["data"]
        assert (day["spent_micros"], day["limit_micros"], day["endpoint"]) == (spent, 20_000_000, "")
        assert day["reserved_micros"] > 0
        assert day["left_micros"] == 20_000_000 - spent - day["reserved_micros"]
        assert month["spent_micros"] == month["reserved_micros"] == 0
        assert (month["left_micros"], month["endpoint"]) == (7_000_000, "/v1/embeddings")
        assert month["renews_at"] >= day["renews_at"]
        heading, first, second = words_of(await terminal("budgets", "--tenant", "red"))
        assert heading == "tenant period endpoint limit spent reserved left renews".split()
        assert first[:3] == ["red", day["period"], "all"]
        assert first[3:7] == [
            f"{each / 1e6:.4f}" for each in (20_000_000, spent, day["reserved_micros"], day["left_micros"])
        ]
        assert second[1:7] == [month["period"], "/v1/embeddings", "7.0000", "0.0000", "0.0000", "7.0000"]
        assert words_of(await terminal("budgets", "--tenant", "blue")) == [heading]
        assert "Unknown tenant 'nobody'" in (await terminal("budgets", "--tenant", "nobody")).error
        for stream in running.engine.open:
            running.engine.answer = words("one ", "two")
            running.engine.answer(stream)
        assert (await waiting).status == 200


@asynchronous
async def test_tables_fit_100_columns_and_lose_nothing(terminal: Terminal, tmp_path: Path) -> None:
    long, key, endpoint = "tenant-" + "n" * 57, "key-" + "k" * 60, "/v1/" + "e" * 60
    budget = BudgetConfig(limit_micros=10**15, period="day", endpoint=endpoint)
    keys = (ADMIN, declared(key, "app-secret", tenant=long))
    tenants = {long: TenantConfig(budgets=(budget,), models=("mini", "m" * 64), metadata={"plan": "p" * 64})}
    async with administered(
        tmp_path,
        keys=keys,
        tenants=tenants,
        prices=PRICED["prices"],
        models={"mini": ModelConfig(), "m" * 64: ModelConfig()},
    ) as running:
        terminal.url = running.url
        running.engine.answer = words("one")
        assert (await running.chat("app-secret", model="mini")).status == 200
        assert (await terminal("create-key", "n" * 60, "--tenant", long, "--expires-in", "90d")).code == 0
        await terminal("fast", "on", "--tenant", long, "--reason", "a storm " * 20)
        every = "day,tenant,key,endpoint,model,variant,surface"
        commands = ("tenants", f"tenant {long}", "keys", "budgets", "usage", f"usage --by {every}", "fast", "audit")
        for command in commands:
            done = await terminal(*command.split())
            assert done.code == 0, (command, done.error)
            assert max(map(len, done.out.splitlines())) <= 100, (command, done.out)
            assert done.out.count("n") >= long.count("n"), (command, done.out)
        assert [each["tenant"] for each in (await terminal("budgets", "--json")).json["data"]] == [long]


@asynchronous
async def test_the_server_comes_from_the_environment(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(tmp_path) as running:
        monkeypatch.setenv("HEADRACE_ADMIN_URL", running.url)
        assert "red" in (await terminal("tenants")).out


@asynchronous
async def test_the_audit_log_is_shown_and_verified(terminal: Terminal, tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        terminal.url = running.url
        assert "0 rows" in (await terminal("audit", "--verify")).out
        for number in range(5):
            await terminal("fast", "on", "--reason", f"storm [bold]{number}[/bold]")
        for number in range(5):
            await terminal("create-tenant", f"t{number}")
        done = await terminal("audit", "--limit", "2", "--after", "9")
        assert [line.split()[0] for line in done.out.splitlines()] == ["seq", "8", "7"]
        assert (await terminal("audit", "--verify", "--after", "9")).code == WRONG_USAGE
        done = await terminal("audit", "--limit", "2")
        assert [line.split()[0] for line in done.out.splitlines()] == ["seq", "10", "9"]
        assert "storm [bold]0[/bold]" in (await terminal("audit", "--limit", "100")).out
        done = await terminal("audit", "--verify")
        assert done.code == 0
        assert done.out.startswith("10 rows verified. Head: 10:")
        head = done.out.split()[-1]
        assert (await terminal("audit", "--head", head)).code == 0
        assert (await terminal("audit", "--verify", "--json", "--head", head)).json["good"] is True
        done = await terminal("audit", "--head", "10:" + "0" * 64)
        assert (done.code, "rebuilt" in done.error) == (WRONG_USAGE, True)
        assert (await terminal("audit", "--head", "ten")).code == WRONG_USAGE

        def tamper(connection: sqlite3.Connection) -> None:
            connection.execute("DROP TRIGGER audit_never_changes")
            connection.execute("UPDATE audit SET body = replace(body, 'storm', 'sun') WHERE seq = 3")

        await running.server.database.run(tamper)
        done = await terminal("audit", "--verify", "--json")
        assert (done.code, done.json["good"], done.json["broken_at"]) == (WRONG_USAGE, False, 3)
        assert "tampered with: row 3" in done.error


@asynchronous
async def test_a_long_audit_log_is_verified_page_by_page(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.admin.admin._PAGE_ROWS", 3)
    async with administered(tmp_path, admin=AdminConfig(audit_rows=20, poll_s=3600.0)) as running:
        terminal.url = running.url
        for number in range(30):
            await running.did("POST", "tenants", {"name": f"t{number}"})
        done = await terminal("audit", "--verify")
        assert done.code == 0
        assert int(done.out.split()[0]) <= 20


@asynchronous
async def test_by_the_socket_no_key_is_needed(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_ADMIN_KEY")
    path = tmp_path / "admin.sock"
    async with administered(tmp_path / "state", keys=(), admin=AdminConfig(socket=str(path), poll_s=3600.0)):
        terminal.url = f"unix:{path}"
        assert (await terminal("create-tenant", "red", "--json")).json["name"] == "red"
        assert "local" in (await terminal("audit")).out


@asynchronous
async def test_what_goes_wrong_is_one_line(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with administered(tmp_path) as running:
        terminal.url = running.url
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", "reader-secret")
        assert (await terminal("epoch")).code == 0
        done = await terminal("create-tenant", "blue")
        assert (done.code, done.error) == (WRONG_USAGE, "headrace: This API key may only read the admin API.")
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", "wrong")
        wrong = (await terminal("epoch")).error
        assert wrong == "headrace: Unknown API key. Check HEADRACE_ADMIN_KEY, which this command reads the key from."
        monkeypatch.delenv("HEADRACE_ADMIN_KEY")
        missing = (await terminal("epoch")).error
        assert missing.startswith("headrace: Missing API key.")
        assert missing.endswith(" Set HEADRACE_ADMIN_KEY, which this command reads the key from.")
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", "☃")
        assert (await terminal("epoch")).code == WRONG_USAGE
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    done = await terminal("epoch")
    assert done.code == FAILED
    assert done.error.startswith(f"headrace: {terminal.url}: ")
    for url in ("ftp://localhost", "http://", "http://localhost:port", f"unix:{tmp_path}/nothing"):
        terminal.url = url
        done = await terminal("epoch")
        assert done.code == (FAILED if url.startswith("unix") else WRONG_USAGE)
        assert len(done.error.splitlines()) == 1


@asynchronous
async def test_what_is_no_admin_api_is_said(terminal: Terminal) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        terminal.url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await terminal("epoch")
        assert (done.code, done.error) == (FAILED, f"headrace: {terminal.url}: not a Headrace server")


def test_secrets_are_found_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, other = make_secret(), make_secret()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "code.py").write_text(f"a = 1\nKEY = '{secret}'\n")
    # Across the parts in which a file is read, on one long line.
    (tmp_path / "long").write_text("x" * (1024 * 1024 - 20) + other + "y" * 100)
    (tmp_path / "fine").write_text("mr-" + "a" * 49 + "\n" + secret[:-1])
    assert main(["admin", "scan", str(tmp_path)]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == sorted(
        [
            f"{tmp_path}/deep/code.py:2: key that ends in {secret[-4:]}",
            f"{tmp_path}/long:1: key that ends in {other[-4:]}",
        ]
    )
    assert "Found 2 keys" in captured.err
    assert main(["admin", "scan", str(tmp_path / "fine")]) == 0
    assert capsys.readouterr().out == "No keys found\n"


def test_every_command_and_flag_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    group = app["admin"]
    names = [name for name in group if not name.startswith("-")]
    assert len(names) > 12
    for name in names:
        assert f"`headrace admin {name}" in text
        for argument in group[name].assemble_argument_collection():
            for flag in argument.names:
                assert not flag.startswith("-") or f"`{flag}" in text, (name, flag)
