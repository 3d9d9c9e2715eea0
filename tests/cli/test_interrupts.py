"""Ctrl-C in every command, at different moments: exit code 130 and no traceback."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import COMMANDS, INTERRUPTED
from headrace.cli.command_table import module_of

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HEADRACE_CACHE": str(folder / "cache"), "HEADRACE_STORAGE_FOLDER": str(folder / "state")}


def interrupted(folder: Path, moment: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command with a SIGINT at a moment (see tests/support/programs/interrupted_command.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.interrupted_command", moment, *arguments],
        cwd=ROOT,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# `headrace serve` with plain arguments imports this in place of the command's module.
STARTED = {"serve": "headrace.cli.serving.server_start"}
GENERATE = ("generate", "mini", "-p", "Tell me about lamps", "-n", "20")


@pytest.mark.parametrize(
    ("moment", "arguments"),
    [
        ("import:cyclopts", ("--help",)),
        ("import:headrace.cli.generate", GENERATE),
        ("import:numpy", GENERATE),
        ("call:headrace.models.packing:load_tensors", GENERATE),
        ("call:headrace.engine.engine:Engine.close", GENERATE),
        ("call:headrace.bench.machine:probe_machine", ("inspect", "mini")),
        ("call:headrace.server.config_checks:load_config", ("config", "show")),
        ("call:headrace.gateway.serving.variant_engines:own_engine", ("serve", "--port", "0")),
        ("call:headrace.server.assemble:assemble", ("serve", "--port", "0")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_interrupt_ends_the_command(moment: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = interrupted(tmp_path, moment, *arguments)
    assert code == INTERRUPTED
    if arguments[0] != "serve":  # which logs
        assert err == ""
    assert "Traceback" not in err
    assert "ignored" not in err


# Only what Headrace's own modules import counts: an editable install's finder imports before the first of them runs.
FIRST_IMPORT = """
import os, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        importer = sys._getframe(1)
        while importer.f_code.co_filename.startswith("<frozen importlib"):
            importer = importer.f_back
        ours = importer.f_globals["__name__"].startswith("headrace")
        if ours and not name.startswith("headrace") and name not in sys.builtin_module_names:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Interrupt())
from headrace.__main__ import run

run()
"""


def test_an_interrupt_at_the_first_import_of_a_command_is_clean(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORT, "config", "show"],
        env=environment(tmp_path),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, b"", b"")


def test_an_interrupt_after_the_work_changes_nothing(tmp_path: Path) -> None:
    code, out, err = interrupted(tmp_path, "exit", "config", "show")
    assert (code, err) == (0, "")
    assert "[server]" in out


@pytest.mark.parametrize("pieces", [1, 7, 30])
def test_ctrl_c_while_an_answer_is_printed(pieces: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "generate", "mini", "-p", "Lamps", "-n", "1500", "--ignore-eos"],
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(pieces):
        assert os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (INTERRUPTED, b"")


def test_ctrl_c_in_a_chat_stops_the_answer_and_then_the_chat(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execve(
            sys.executable, [sys.executable, "-m", "headrace", "chat", "mini"], environment(tmp_path) | {"TERM": "dumb"}
        )
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            ready, _, _ = select.select([terminal], [], [], PATIENCE)
            assert ready, shown
            shown += os.read(terminal, 65536)
        shown = shown.partition(text)[2]

    try:
        until(b"> ")
        os.write(terminal, b"Tell me a long story about lamps\n")
        until(b"lamps\r\n")
        until(b" ")  # the answer has begun
        os.write(terminal, b"\x03")
        until(b"> ")  # the answer has ended, or was stopped
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == INTERRUPTED
        assert b"Traceback" not in shown
    finally:
        os.close(terminal)


def test_every_command_ends_on_an_interrupt_while_it_is_imported(tmp_path: Path) -> None:
    running = {
        name: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.programs.interrupted_command",
                f"import:{STARTED.get(name, module_of(name))}",
                name,
            ],
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name in COMMANDS
    }
    for name, process in running.items():
        out, err = process.communicate(timeout=PATIENCE)
        assert (name, process.returncode, out, err) == (name, INTERRUPTED, b"", b"")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_a_drill_that_is_stopped_leaves_no_server(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "drill", "worker-crash"],
        env=environment(tmp_path) | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (code, b"")
    assert not Path(f"/proc/{found[0]}").exists()
    assert not list(tmp_path.glob("headrace-drill-*"))
