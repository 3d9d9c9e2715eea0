"""Coding agents edit a file through a server: Claude Code by /v1/messages, Codex by /v1/responses.

The real programs, from npm, with a real server and an engine that says prepared answers. They reach nothing but the
server: every other connection goes to a proxy that is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.output.tool_formats import TOOL_FORMATS
from headrace.observe import metrics
from tests.support.running_server import LONG, Running, asynchronous, count, say, serving, tokenizer

CLIENTS: Final = Path(__file__).parent / "node_modules"
CLAUDE: Final = CLIENTS / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
CODEX: Final = CLIENTS / "@openai" / "codex" / "bin" / "codex.js"
NODE: Final = shutil.which("node")
MISSING: Final = "node or its package is not there: run `make services`"
CODEX_MODEL: Final = "gpt-5.5"
PATCH: Final = """*** Begin Patch
*** Update File: greeting.py
@@
-print("hello")
+print("hello, \\"world\\"")
*** End Patch
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Script:
    """Says one prepared answer to each request, some characters at a time."""

    def __init__(self, running: Running, answers: Sequence[str]) -> None:
        self.prompts: list[str] = []
        self._answers = list(answers)
        served = running.fleet.served["mini"]
        served.context, served.tools = 200_000, TOOL_FORMATS["mini"]
        running.fleet.aliases |= {"coder": "mini", CODEX_MODEL: "mini"}
        running.engine.answer = self._answer

    def _answer(self, stream: OutputStream) -> None:
        self.prompts.append(tokenizer().decode(list(stream.request.prompt), skip_special_tokens=False))
        text = self._answers.pop(0) if self._answers else "The script is over."
        pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
        for place, piece in enumerate(pieces, start=1):
            say(stream, piece, end=place == len(pieces))


PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "use-coding-agents.md"


def blocks(language: str) -> list[str]:
    """The page's blocks: Claude Code's come first."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def run(script: str, running: Running, folder: Path, **environment: str) -> str:
    """Run a block of the page in a folder. Return what it printed."""
    assert NODE is not None
    programs, home = folder.parent / "bin", folder.parent / "home"
    for made in (programs, home):
        made.mkdir()
    for name, program in (("claude", CLAUDE), ("codex", CODEX)):
        (programs / name).write_text(f'#!/bin/sh\nexec "{NODE}" "{program}" "$@"\n')
        (programs / name).chmod(0o755)
    nowhere = "http://127.0.0.1:9"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-euc",
        script.replace("http://localhost:8000", url_of(running)),
        cwd=folder,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            **environment,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LONG):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text
    return text


def url_of(running: Running) -> str:
    return f"http://127.0.0.1:{running.server.listening.getsockname()[1]}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "greeting.py").write_text('print("hello")\n')
    return folder


@pytest.mark.skipif(NODE is None or not CLAUDE.is_file(), reason=MISSING)
@asynchronous
async def test_claude_code_edits_a_file(project: Path) -> None:
    file = project / "greeting.py"
    refused = count(metrics.http_requests, "/v1/messages", "400")
    async with serving() as running:
        script = Script(
            running,
            [
                "I will read it. " + call("Read", file_path=str(file)),
                call("Edit", file_path=str(file), old_string='"hello"', new_string='"hello, \\"world\\""'),
                "The greeting is longer now.",
            ],
        )
        output = await run(blocks("sh")[0], running, project, DISABLE_AUTOUPDATER="1")
    assert file.read_text() == 'print("hello, \\"world\\"")\n'
    assert "The greeting is longer now." in output
    assert (
        count(metrics.http_requests, "/v1/messages", "400") == refused
    )  # it repeats a rejected request without fields
    assert len(script.prompts) == 3
    assert "Make the greeting longer." in script.prompts[0]
    assert 'print("hello")' in script.prompts[1]  # the file that it read


@pytest.mark.skipif(NODE is None or not CODEX.is_file(), reason=MISSING)
@asynchronous
async def test_codex_edits_a_file_with_its_custom_tool(project: Path) -> None:
    async with serving() as running:
        script = Script(
            running,
            [
                "I will read it. " + call("exec_command", cmd="cat greeting.py"),
                call("apply_patch", input=PATCH),
                "The greeting is longer now.",
            ],
        )
        settings = project.parent / "codex"
        settings.mkdir()
        (provider,) = blocks("toml")
        # The container of the tests has no sandbox.
        alone = 'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        (settings / "config.toml").write_text(alone + provider.replace("http://localhost:8000", url_of(running)))
        output = await run(blocks("sh")[1], running, project, CODEX_HOME=str(settings))
    assert (project / "greeting.py").read_text() == 'print("hello, \\"world\\"")\n'
    assert "The greeting is longer now." in output
    assert len(script.prompts) == 3
    assert "Make the greeting longer." in script.prompts[0]
    assert 'print("hello")' in script.prompts[1]  # what the command printed
    assert "*** Begin Patch" in script.prompts[2]  # its own call, in the history
