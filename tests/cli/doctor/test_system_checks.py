"""What `headrace doctor` says about files, folders, ports and the clock."""

from __future__ import annotations

import importlib.metadata
import py_compile
import resource
import shutil
import socket
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.doctor import system_checks
from headrace.cli.doctor.system_checks import (
    check_bytecode,
    check_clock,
    check_extras,
    check_folders,
    check_open_files,
    check_ports,
)
from headrace.config import Config, ServerConfig, StorageConfig
from tests.test_docs import ROOT


def test_a_hard_limit_below_the_connections_is_a_warning() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("open files have no limit here")
    (few,) = check_open_files(Config(server=ServerConfig(connections=1)))
    (many,) = check_open_files(Config(server=ServerConfig(connections=hard)))
    assert (few.state, many.state) == ("ok", "warn")
    assert f"LimitNOFILE={hard + 512}" in many.advice


def test_a_port_of_a_running_headrace_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                body = b'{"status":"live"}'
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        (found,) = check_ports(Config(server=ServerConfig(port=port)), 30.0)
        thread.join()
    assert (found.state, found.found) == ("ok", f"127.0.0.1:{port}: a Headrace server runs there")


def test_a_storage_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(file / "cache"))
    cache, storage = check_folders(Config(storage=StorageConfig(folder=str(file / "storage"))))
    assert (cache.state, storage.state) == ("warn", "fail")
    assert "HEADRACE_CACHE" in cache.advice
    assert "storage.folder" in storage.advice


def test_modules_that_are_compiled_at_each_start_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    module = tmp_path / "module.py"
    module.write_text("")
    for keeps, state in ((False, "warn"), (True, "ok")):
        monkeypatch.setattr(sys, "dont_write_bytecode", not keeps)
        (found,) = check_bytecode(tmp_path)
        assert found.state == state
        assert found.advice == "" or f"-m compileall -q {tmp_path}" in found.advice
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(module))
    assert [each.state for each in check_bytecode(tmp_path)] == ["ok"]


def test_little_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1_000_000, free=1000))
    found = list(check_folders(Config(storage=StorageConfig(folder=str(tmp_path)))))
    assert [each.state for each in found] == ["warn", "warn"]


def test_a_bound_of_the_cache_that_is_no_number_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("HEADRACE_CACHE_GIB", "plenty")
    (found,) = check_folders(None)
    assert (found.state, "'plenty'" in found.found) == ("fail", True)


def test_every_extra_of_a_service_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: extras[name][0].split(">")[0] for name in system_checks.EXTRAS} == system_checks.EXTRAS
    # What a command or an option names itself when it is missing; zstd is in the standard library of later Pythons.
    assert set(extras) - set(system_checks.EXTRAS) == {"encryption", "pdf", "train", "vision", "yaml", "zstd"}

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    (found,) = check_extras()
    assert found.found == "none; not installed: grpc, hub, postgres, redis, vector"


def test_a_clock_that_is_behind_fails_and_a_slow_one_is_a_warning(tmp_path: Path) -> None:
    (behind,) = check_clock(tmp_path, now=0.0)
    assert (behind.state, "timedatectl" in behind.advice) == ("fail", True)
    folder = tmp_path / "sys/devices/system/clocksource/clocksource0"
    folder.mkdir(parents=True)
    (folder / "current_clocksource").write_text("hpet\n")
    (slow,) = check_clock(tmp_path)
    assert (slow.state, slow.found) == ("warn", "clock source hpet")
