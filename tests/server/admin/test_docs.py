"""Runs the shell examples of docs/how-to/administer.md, and loads the configurations that it shows."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.server.config_checks import load_config
from tests.support.admin_server import ROOT, administered
from tests.support.running_server import asynchronous

DOCS = Path(__file__).parents[3] / "docs"
ADMIN = (DOCS / "how-to" / "administer.md").read_text(encoding="utf-8")
TENANTS = (DOCS / "how-to" / "manage-tenants.md").read_text(encoding="utf-8")
CURL, COMMAND = re.findall(r"^```sh\n(.*?)^```", ADMIN, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
@asynchronous
async def test_the_examples_with_curl_work(tmp_path: Path) -> None:
    async with administered(tmp_path) as running:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euc", CURL.replace("localhost:8000", running.url.removeprefix("http://"))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HEADRACE_ADMIN_KEY": ROOT},
        )
        out, error = await process.communicate()
        assert process.returncode == 0, error.decode()
        assert b'"error"' not in out
        assert running.administration.shared.epoch == 2


@asynchronous
async def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    async with administered(tmp_path) as running:
        for line in COMMAND.splitlines():
            words = shlex.split(line)
            assert words[0] == "headrace"
            assert await asyncio.to_thread(main, [*words[1:], "--url", running.url]) == 0, line
        assert running.administration.shared.epoch == 5


def test_the_configurations_in_the_pages_are_right(tmp_path: Path) -> None:
    environ = {"OPS_KEY": "ops-secret", "RED_MOBILE_KEY": "red-secret"}
    blocks = [block for page in (TENANTS, ADMIN) for block in re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)]
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        load_config(path, environ=environ)
