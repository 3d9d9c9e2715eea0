"""Whatever is done through the admin API: no reply, no line of the log, no row of the audit log and no byte of the
storage has the secret of a key, but for the one reply that tells it."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import LogConfig
from headrace.gateway.accounts.key_secrets import make_secret, secrets_in
from headrace.observe.logs import configure_log
from tests.support.accounts import bearer
from tests.support.admin_server import ROOT, Administered, administered
from tests.support.running_server import CHAT, asynchronous, words

STEPS = 40


@pytest.fixture(params=["text", "json"])
def logged(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    configure_log(LogConfig(format=request.param, level="debug"), stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


class Tried:
    """Random calls of every kind, good ones and bad ones, with secrets where they belong and where they do not."""

    def __init__(self, running: Administered, seed: int) -> None:
        self.running = running
        self.draw = random.Random(seed)
        self.told: dict[str, str] = {}  # secrets by their keys
        self.secrets: set[str] = set()
        self.replies: list[bytes] = []
        self.statuses: set[int] = set()

    def secret(self) -> str:
        """One that is good, was good, or never was."""
        known = sorted(self.secrets)
        return self.draw.choice([*known, make_secret()]) if known else make_secret()

    def text(self) -> str:
        texts = ["red", "blue", "nobody", "a text", self.secret(), f"see {self.secret()}!", "", "ü☃", "\x1b[31m"]
        return self.draw.choice(texts)

    def value(self) -> Any:
        return self.draw.choice([self.text(), [self.text()], {self.text(): self.text()}, 1, True, None])

    async def step(self) -> None:
        draw = self.draw
        keys = [*self.told, "root", "key_0", self.secret()]
        bodies: list[Any] = [
            {"name": self.text(), "tenant": draw.choice(["red", "blue", self.text()])},
            {"name": "k", "tenant": "red", "admin": draw.choice(["read", "write"])},
            {"name": draw.choice(["blue", f"t{draw.randrange(9)}", self.text()]), "metadata": {"a": self.text()}},
            {"ttl_s": 60, "reason": self.text()},
            {"overlap_s": draw.choice([0, 60])},
            {"tags": [self.text()], "tenant": draw.choice([None, "red", self.text()])},
            {self.text(): self.value()},
            self.text().encode(),
        ]
        key, body = draw.choice(keys), draw.choice(bodies)
        if draw.random() < 0.15:
            await self.send(
                "POST", "keys", {"name": "app", "tenant": "red", "admin": draw.choice([None, "write"])}, ROOT
            )
        method, path = draw.choice(
            [
                ("POST", "keys"),
                ("POST", "keys"),
                ("POST", "tenants"),
                ("POST", f"keys/{key}/rotate"),
                ("DELETE", f"keys/{key}"),
                ("GET", f"keys/{key}"),
                ("GET", f"keys?tenant={key}&limit=5"),
                ("GET", f"keys?{key}=1"),
                ("GET", "audit"),
                ("GET", f"tenants/{key}"),
                ("PATCH", f"tenants/{key}"),
                ("PUT", "fast"),
                ("PUT", "fast/red"),
                ("POST", "cache/invalidate"),
                ("DELETE", "fast"),
            ]
        )
        sent = None if method in ("GET", "DELETE") else body
        caller = draw.choice([ROOT, ROOT, ROOT, "", self.secret()])
        await self.send(method, path, sent, caller)
        if self.secrets and draw.random() < 0.3:
            answer = await self.running.ask("POST", "/v1/chat/completions", CHAT, **bearer(self.secret()))
            self.replies += [answer.body, repr(answer.headers).encode()]

    async def send(self, method: str, path: str, body: Any, key: str) -> None:
        answer = await self.running.admin(method, path, body, key=key)
        self.statuses.add(answer.status)
        reply = answer.body
        if answer.status == 200 and "secret" in answer.json:
            told = answer.json.pop("secret")
            (found,) = [match[1] for match in secrets_in(told)]
            assert found == told
            self.told[answer.json["id"]] = told
            self.secrets.add(told)
            reply = json.dumps({name: value for name, value in answer.json.items() if name != "secret"}).encode()
        self.replies += [reply, repr(answer.headers).encode()]


@pytest.mark.parametrize("seed", range(2))
@asynchronous
async def test_no_secret_gets_anywhere(seed: int, tmp_path: Path, logged: io.StringIO) -> None:
    async with administered(tmp_path) as running:
        running.engine.answer = words("ok")
        tried = Tried(running, seed)
        await running.did("POST", "tenants", {"name": "blue"})
        for _ in range(STEPS):
            await tried.step()
        assert tried.statuses >= {200, 400, 401}
        assert len(tried.secrets) > 3
        # As the id of a request a secret is the client's own fault; the audit log has it all the same not.
        await running.did("POST", "tenants", {"name": "green"}, x_request_id=next(iter(tried.secrets)))
        rows = await running.did("GET", "audit?limit=1000")
        assert len(rows["data"]) > 5
        for place in ("metrics", "docs", "openapi.json"):
            tried.replies.append((await running.ask("GET", f"/{place}")).body)
        tried.replies.append(json.dumps(rows).encode())
        log = logged.getvalue()
    assert "tenant.create" in log
    storage = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"tenant.create" in storage
    for place in (*tried.replies, log.encode(), storage):
        assert [match[1] for match in secrets_in(place.decode("latin-1"))] == []


@asynchronous
async def test_a_secret_in_a_wrong_place_of_any_request_is_shown_nowhere(tmp_path: Path, logged: io.StringIO) -> None:
    async with administered(tmp_path) as running:
        running.engine.answer = words("ok")
        made = (await running.new_key("red"))["secret"]
        replies: list[bytes] = []
        for secret in (made, "caller-secret"):  # of a key that was made, and of one of the configuration
            key = bearer(secret)
            for method, path, body, headers in (
                ("GET", "/v1/models", None, {"x-request-id": secret}),
                ("GET", f"/{secret}", None, {}),
                ("GET", f"/v1/{secret}/models", None, {}),
                ("PUT", f"/v1/files/{secret}", None, {}),
                ("GET", f"/v1/models?key={secret}", None, {}),
                ("POST", "/v1/chat/completions", CHAT | {secret: 1}, {}),
                ("POST", "/v1/chat/completions", CHAT | {"user": secret}, {"x-request-id": secret}),
                ("POST", f"/admin/v1/{secret}", {}, {}),
                ("GET", f"/admin/v1/keys/{secret}", None, {"x-request-id": secret}),
            ):
                for caller in (key, {}):
                    answer = await running.ask(method, path, body, **headers, **caller)
                    assert answer.headers["x-request-id"] != secret
                    replies += [answer.body if secret not in str(body) else b"", repr(answer.headers).encode()]
        unknown = await running.ask("GET", f"/v1/caller-secret/{made}")
        assert unknown.error["message"] == "Unknown path '/v1/mr-***/mr-***'."
        replies.append((await running.ask("GET", "/metrics")).body)
        log = logged.getvalue()
    assert "unknown_url" in log
    assert "ignored" in log
    for secret in (made, "caller-secret"):
        for place in (log.encode(), *replies):
            assert secret.encode() not in place


def test_the_secret_of_a_key_is_never_part_of_what_is_kept(tmp_path: Path) -> None:
    from headrace.gateway.accounts.account_records import KeyRecord, SecretRecord, encode_value, key_json

    secret = make_secret()
    record = KeyRecord(
        name="a",
        tenant="b",
        secrets=(SecretRecord(sha256="ab" * 32, last_four=secret[-4:], created=1),),
        created=1,
    )
    assert secret not in encode_value(record)
    assert "ab" * 32 not in json.dumps(key_json("key_1", record, 2.0))
