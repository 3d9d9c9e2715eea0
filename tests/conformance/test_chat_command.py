"""headrace chat against a server."""

from __future__ import annotations

import subprocess
import sys

from tests.conformance.conftest import Server


def test_the_terminal_talks_to_a_server(server: Server) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "headrace", "chat", "--url", server.url, "--max-tokens", "8"],
        input="What is paging?\nAnd why?\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("tokens, first after") == 2
    assert "of the prompt cached" in run.stdout


def test_the_servers_errors_are_shown(server: Server) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "headrace", "chat", "nobody", "--url", server.url],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Unknown model 'nobody'" in run.stdout
