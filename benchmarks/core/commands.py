"""Runs installs, builds and conversions with a timeout and a log.

A command's whole process group ends with it. Engines, which stay alive, are in child.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import places

HOUR: Final = 3600.0  # seconds
_TAIL: Final = 400  # characters of a log that say why


class CommandError(Exception):
    """A command failed or timed out; the message says why."""


def run(
    command: Sequence[str | Path],
    *,
    log: str,
    seconds: float = HOUR,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a command and append its output to logs/LOG.log."""
    places.LOGS.mkdir(parents=True, exist_ok=True)
    path = places.LOGS / f"{log}.log"
    words = [str(word) for word in command]
    with path.open("ab") as out:
        out.write(f"$ {' '.join(words)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CommandError(f"{_short(words)}: not done after {seconds:.0f} s") from None
        finally:
            end_group(process)
    if status != 0:
        raise CommandError(f"{_short(words)}: exit status {status}: {tail(path)}")


def end_group(process: subprocess.Popen[bytes], *, patience: float = 5.0) -> None:
    """Kill a session leader and all its descendants."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None and kind is signal.SIGTERM:
            kind = signal.SIGKILL  # the leader is gone; what it left behind has no reason to stay
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def tail(path: Path) -> str:
    """Return the end of a log on one line."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "no log"
    return without_places(" | ".join(line.strip() for line in text[-_TAIL:].splitlines() if line.strip()))


def without_places(text: str) -> str:
    """Remove this machine's folders from a message, so that it can be committed."""
    return text.replace(str(places.REPOSITORY), ".").replace(str(Path.home()), "~")


def _short(words: Sequence[str]) -> str:
    return " ".join([Path(words[0]).name, *words[1:4]]).replace(str(places.REPOSITORY), ".")
