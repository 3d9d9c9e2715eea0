"""A Postgres server of the tests' own: on a free port of 127.0.0.1, in a folder that goes with it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 3600  # seconds that a server lives, should the tests not end it; a module may take long on a busy machine
STARTING = 30.0  # seconds


def program(name: str) -> str | None:
    """In PATH, or where Debian puts it."""
    found = shutil.which(name)
    if found is not None:
        return found
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: each.parent.name, reverse=True)
    return next((str(each / name) for each in folders if os.access(each / name, os.X_OK)), None)


def why_not() -> str | None:
    """What keeps a server from being started here."""
    missing = [name for name in ("initdb", "postgres", "timeout") if program(name) is None]
    if missing:
        return f"not found: {', '.join(missing)}"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "Postgres does not run as root, and there is no user postgres"
    return None


@dataclass
class Server:
    port: int
    process: subprocess.Popen[Any]

    @property
    def dsn(self) -> str:
        return f"postgresql://tests@127.0.0.1:{self.port}/postgres"

    def processes(self) -> list[int]:
        """The server's own and those that serve connections."""
        found: list[int] = []
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            with suppress(OSError):  # a backend ends after its client has left
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                waiting += map(int, children)
                found += map(int, children)
        return found

    @contextmanager
    def frozen(self) -> Generator[None]:
        """It takes connections, and answers nothing."""
        stopped = self.processes()
        for pid in stopped:
            with suppress(ProcessLookupError):  # a backend ends after its client has left
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):  # a backend may have ended meanwhile
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def serving() -> Generator[Server]:
    initdb, postgres = program("initdb"), program("postgres")
    assert initdb is not None
    assert postgres is not None
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    try:
        if user is not None:
            shutil.chown(folder, user, user)
        data = str(folder / "data")
        # Nothing of it has to outlive the tests, so nothing waits for the disk.
        made = [initdb, "-D", data, "-U", "tests", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, timeout=120, **_as(user))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        settings = {
            "port": port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": 40,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = ["timeout", "-s", "QUIT", str(LONGEST), postgres, "-D", data, *options]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **_as(user))
        try:
            _wait(process, port, folder / "log")
            yield Server(port, process)
        finally:
            process.send_signal(signal.SIGQUIT)  # `timeout` hands it on
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as(user: str | None) -> dict[str, Any]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": [], "cwd": "/"}


def _wait(process: subprocess.Popen[Any], port: int, log: Path) -> None:
    end = time.monotonic() + STARTING
    while time.monotonic() < end and process.poll() is None:
        if b"ready to accept connections" in log.read_bytes():
            return
        time.sleep(0.05)
    raise RuntimeError(f"Postgres did not start on port {port}: {log.read_text(errors='replace')[-2000:]}")
