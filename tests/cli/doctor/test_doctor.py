"""`headrace doctor`: one table for machine and configuration, an exit code, and advice for whatever is wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import FAILED, WRONG_USAGE, main
from headrace.cli.doctor import gpu_checks
from tests.support.documentation import free_port

Checks = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_STORAGE_FOLDER", str(tmp_path / "storage"))
    monkeypatch.setenv("HEADRACE_SERVER_PORT", "0")
    monkeypatch.setattr(gpu_checks, "open_gpus", lambda: None)


@pytest.fixture
def checks(capsys: pytest.CaptureFixture[str]) -> Checks:
    """Run the command for a configuration; return its exit code and the last result of each check."""

    def run(text: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
        Path("headrace.toml").write_text(text)
        code = exit_code("doctor", "--json", "--timeout", "0.5")
        return code, {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}

    return run


def exit_code(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(str(ended.code))


def test_the_table_fits_100_columns_and_ends_with_the_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / ("long" * 40)))
    assert exit_code("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0].split()[:2] == ["ok", "configuration"]
    assert lines[-1].endswith("warnings, 0 failures")


def test_whatever_is_wrong_says_what_to_do(checks: Checks) -> None:
    code, found = checks()
    assert code == 0
    names = {"configuration", "processor", "instruction set", "cores", "cpu governor", "memory", "huge pages"}
    names |= {"cache folder", "storage folder", "open files", "port", "bytecode", "extras", "user", "clock"}
    assert set(found) == names
    assert {name for name, each in found.items() if bool(each["advice"]) == (each["state"] == "ok")} == set()


def test_mistakes_of_the_configuration_fail_like_in_config_check(
    checks: Checks, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checks("default_model = 'x'\n[models.mini]\npath = 'nowhere/at/all'\n")
    assert code == FAILED
    assert found["configuration"]["state"] == "fail"
    assert "memory" in found  # the rest is checked all the same
    main(["config", "check"])
    assert found["configuration"]["found"] in capsys.readouterr().out.splitlines()


def test_a_file_that_is_no_toml_leaves_the_machine_to_check(checks: Checks) -> None:
    code, found = checks("[")
    assert code == FAILED
    assert found["configuration"]["advice"].endswith("were not checked.")
    assert "instruction set" in found
    assert "port" not in found


def test_a_missing_file_and_a_wrong_timeout_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--config", "none.toml") == WRONG_USAGE
    assert exit_code("doctor", "--timeout", "0") == WRONG_USAGE
    assert "none.toml: file not found" in capsys.readouterr().err


def test_a_port_that_another_program_has_fails(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("HEADRACE_SERVER_PORT", str(port))
        code, found = checks()
    assert code == FAILED
    assert found["port"]["found"].startswith(f"cannot listen on 127.0.0.1:{port}")
    assert "server.port" in found["port"]["advice"]


def test_models_that_do_not_fit_into_memory_fail(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "0.01")
    code, found = checks("[models.mini]\n")
    assert code == FAILED
    assert found["memory"]["state"] == "fail"
    assert "10.2 MiB available" in found["memory"]["found"]
    assert "int4" in found["memory"]["advice"]


def test_services_that_do_not_answer_fail_without_their_secrets(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE", f"redis://:hunter2@127.0.0.1:{free_port()}/0")
    monkeypatch.setenv("LEDGER", f"postgresql://u:hunter2@127.0.0.1:{free_port()}/x")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and answers nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        code, found = checks(
            f"""
            cache.exact = {{mode = "on", store = "redis", redis_env = "CACHE"}}
            ledger = {{store = "postgres", dsn_env = "LEDGER"}}
            models.far.upstream = {{url = "{url}", kind = "vllm"}}
            """
        )
    assert code == FAILED
    states = {name: found[name]["state"] for name in ("redis of cache.exact", "postgres of ledger", "upstream far")}
    assert set(states.values()) == {"fail"}
    assert "within 0.5 s" in found["upstream far"]["found"] or "in time" in found["upstream far"]["found"]
    assert "CACHE" in found["redis of cache.exact"]["advice"]
    assert "hunter2" not in json.dumps(found)
