"""The examples of docs/how-to/use-the-api.md, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import Server

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to" / "use-the-api.md").read_text(encoding="utf-8")
SHELL = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def values(text: str) -> list[dict[str, object]]:
    """JSON values one after another."""
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(text.rstrip()):
        value, end = decoder.raw_decode(text, place)
        found.append(value)
        place = end
        while place < len(text) and text[place].isspace():
            place += 1
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
@pytest.mark.parametrize("script", SHELL, ids=range(len(SHELL)))
def test_shell_examples_work(script: str, server: Server, tmp_path: Path) -> None:
    host = server.url.removeprefix("http://")
    script = script.replace("localhost:8000", host)
    run = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    answers = values(run.stdout)
    assert len(answers) == sum("curl" in line for line in script.splitlines()) - script.count("file=$(")
    for answer in answers:
        assert "error" not in answer or answer["error"] is None, answer


@pytest.mark.parametrize("script", PYTHON, ids=range(len(PYTHON)))
def test_python_examples_work(script: str, server: Server) -> None:
    script = script.replace("http://localhost:8000", server.url)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
