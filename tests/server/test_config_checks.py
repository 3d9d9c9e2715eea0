"""Rules between keys of the configuration: what other machines reach needs keys, as the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import AdminConfig, Config, ConfigError, KeyConfig, ServerConfig
from headrace.server.config_checks import check_config, load_config

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "secure-a-server.md").read_text(encoding="utf-8")
KEYS = (KeyConfig(name="site", key="secret"),)


def findings(keys: tuple[KeyConfig, ...] = (), **server: Any) -> list[str]:
    return [where for where, _ in check_config(Config(server=ServerConfig(**server), keys=keys), {})]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "192.0.2.1", "gateway.example.org"])
def test_a_public_address_without_keys_needs_a_yes(host: str) -> None:
    assert findings(host=host) == ["server.host"]
    assert findings(host=host, insecure=True) == []
    assert findings(KEYS, host=host) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_address_needs_no_keys(host: str) -> None:
    assert findings(host=host) == []


@pytest.mark.parametrize("name", ["metrics_need_key", "docs_need_key"])
def test_what_needs_a_key_needs_one_that_exists(name: str) -> None:
    assert findings(**{name: True}) == [f"server.{name}"]
    assert findings(KEYS, **{name: True}) == []
    config = Config(server=ServerConfig(**{name: True}), admin=AdminConfig(socket="/tmp/socket"))
    assert list(check_config(config, {})) == []


def test_the_internal_port_is_another_one_and_not_public() -> None:
    assert findings(internal_port=8000) == ["server.internal_port"]
    assert findings(internal_port=9400) == []
    assert findings(internal_port=0, port=0) == []
    assert findings(grpc_port=8000) == findings(grpc_port=9400, internal_port=9400) == ["server.grpc_port"]
    assert findings(grpc_port=9500, internal_port=9400) == []
    assert findings(KEYS, internal_port=9400, internal_host="0.0.0.0") == ["server.internal_host"]
    assert findings(KEYS, internal_port=9400, internal_host="0.0.0.0", metrics_need_key=True) == []


def test_serve_refuses_as_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.partition("server.host: ")[2] in PAGE
    assert said.endswith("or allow it with --insecure (server.insecure = true)")


def test_a_key_from_the_environment_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[server]\nhost = "0.0.0.0"\n\n[[keys]]\nname = "site"\nkey_env = "SITE_KEY"\n')
    assert load_config(path, environ={"SITE_KEY": "secret"}).server.host == "0.0.0.0"
    with pytest.raises(ConfigError, match="SITE_KEY"):
        load_config(path, environ={})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ('[cache.exact]\nmode = "on"', "cache.exact.store"),
        ('[cache.semantic]\nmode = "on"\nembedder = "mini"', "cache.semantic.mode"),
        ('[cache.results]\nmode = "on"', "cache.results.store"),
        ("[drift]\nshare = 0.5", "drift.share"),
        ("[surfaces.chat.ladder]\npreset = true", "surfaces.chat.ladder"),
        ('[pipelines.docs]\nstages = ["generate"]', "pipelines.docs"),
    ],
)
def test_several_processes_need_state_that_they_can_share(tmp_path: Path, changes: str, key: str) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f"[server]\nprocesses = 2\n{changes}\n")
    with pytest.raises(ConfigError, match=rf"{key}: this needs server.processes = 1"):
        load_config(file, environ={})
    file.write_text(f"[server]\nprocesses = 1\n{changes}\n")
    load_config(file, environ={})


def test_several_processes_do_not_count_addresses(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[server]\nprocesses = 2\naddress_requests_per_s = 5\n")
    with pytest.raises(ConfigError, match="each process would count for itself"):
        load_config(file, environ={})
