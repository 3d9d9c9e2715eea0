"""Which `host` headers a server answers: a page that rebinds its name to 127.0.0.1 gets nothing."""

from __future__ import annotations

import pytest

from headrace.config import Config, KeyConfig, ServerConfig
from headrace.gateway.api_errors import ApiError
from headrace.server.http.allowed_hosts import AllowedHosts, is_loopback
from tests.support.running_server import asynchronous, request, serving


def hosts(*names: str, host: str = "127.0.0.1") -> AllowedHosts:
    found = AllowedHosts.of(Config(server=ServerConfig(host=host, hosts=names)), host)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "localhost.",
        "app.localhost:80",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
    ],
)
def test_names_of_this_machine_and_addresses_are_answered(header: str) -> None:
    allowed = hosts()
    for _ in range(2):
        allowed.check(header)
    allowed.check(None)


@pytest.mark.parametrize(
    "header", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "x" * 5000]
)
def test_a_foreign_name_is_refused(header: str) -> None:
    with pytest.raises(ApiError) as raised:
        hosts().check(header)
    assert (raised.value.status, raised.value.code) == (403, "host_not_allowed")
    assert len(raised.value.message) < 400


def test_configured_names_are_answered_on_any_address() -> None:
    allowed = hosts("llm.example.org", host="0.0.0.0")
    allowed.check("LLM.example.org:443")
    with pytest.raises(ApiError):
        allowed.check("evil.example")


def test_nothing_is_checked_with_keys_or_a_public_address_or_a_star() -> None:
    keys = (KeyConfig(name="a", key="b"),)
    assert AllowedHosts.of(Config(keys=keys), "127.0.0.1") is None
    assert AllowedHosts.of(Config(), "0.0.0.0") is None
    assert AllowedHosts.of(Config(server=ServerConfig(hosts=("*",))), "127.0.0.1") is None


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("box", False),
    ],
)
def test_loopback_addresses_are_known(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@asynchronous
async def test_a_server_without_keys_refuses_a_foreign_host_on_every_path() -> None:
    async with serving() as running:
        for path in ("/v1/models", "/health/live", "/metrics", "/docs", "/nowhere"):
            client = await running.client()
            await client.send(request("GET", path).replace(b"host: localhost", b"host: evil.example:8000"))
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed"), path
        assert (await running.ask("GET", "/v1/models")).status == 200
