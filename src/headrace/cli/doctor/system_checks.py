"""Checks the system around the server: open files, ports, folders, user, clock and optional packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import headrace
from headrace.cli.doctor.check_result import CheckResult, fail, ok, warn
from headrace.cli.doctor.memory_checks import configured_memory
from headrace.config import Config
from headrace.disk import disk_space, nearest_folder
from headrace.engine.executors.cgroups import read_lines
from headrace.engine.executors.memory import gib
from headrace.errors import RequestError
from headrace.models.weight_cache import cache_folder, cache_limit
from headrace.server.process_settings import open_files_needed
from headrace.server.server import AddressError, listen

EXTRAS: Final = {  # distribution by extra
    "grpc": "grpcio",
    "hub": "huggingface-hub",
    "postgres": "asyncpg",
    "redis": "redis",
    "vector": "usearch",
}
_LEAST_STORAGE: Final = 2**30  # bytes of free disk below which there is a warning
_SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "refined-jiffies", "jiffies")
_TIME_ERROR: Final = 5  # adjtimex: the clock is not synchronised
_TIMEX_BYTES: Final = 512  # more than struct timex has on any Linux


def check_open_files(config: Config) -> Iterator[CheckResult]:
    """The server raises the soft limit by itself, up to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(config.server.connections)
    allowed = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} allowed"
    found = f"{allowed}, {needed:,} needed for {config.server.connections:,} connections"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        yield ok("open files", found)
    else:
        advice = f"Set LimitNOFILE={needed} in the service (ulimit -Hn {needed}), or lower server.connections."
        yield warn("open files", found, advice)


def check_ports(config: Config, seconds: float) -> Iterator[CheckResult]:
    server = config.server
    yield _port(server.host, server.port, "server.port", seconds)
    if server.internal_port is not None:
        yield _port(server.internal_host, server.internal_port, "server.internal_port", seconds)
    if server.grpc_port is not None:
        yield _port(server.host, server.grpc_port, "server.grpc_port", seconds)


def _port(host: str, port: int, key: str, seconds: float) -> CheckResult:
    name = key.removeprefix("server.").replace("_", " ")
    try:
        listen(host, port, reader_s=1.0).close()
    except AddressError as error:
        if port and _is_headrace(host, port, seconds):
            return ok(name, f"{host}:{port}: a Headrace server runs there")
        return fail(name, str(error), f"Stop the program that uses it (ss -ltnp), or change {key} or its host.")
    return ok(name, f"{host}:{port} is free" if port else f"any free port of {host}")


def _is_headrace(host: str, port: int, seconds: float) -> bool:
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}/health/live"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=seconds) as reply:
            return b'"live"' in reply.read(256)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def check_folders(config: Config | None) -> Iterator[CheckResult]:
    """Write a file to the cache and the storage folder, or to where they will be made, and look at the free space."""
    yield _check_cache(0 if config is None else configured_memory(config).weights)
    if config is None:
        return
    storage = config.storage.path
    problem = _why_not_writable(storage)
    if problem:
        yield fail("storage folder", problem, "Make it writable for the server's user, or change storage.folder.")
        return
    free = disk_space(storage).free
    if free < _LEAST_STORAGE:
        advice = "Free disk space, or change storage.folder: files, usage and responses are kept there."
        yield warn("storage folder", f"{storage}: {gib(free)} free", advice)
    else:
        yield ok("storage folder", f"{storage}: writable, {gib(free)} free")


def _check_cache(weights: int) -> CheckResult:
    cache = cache_folder()
    problem = _why_not_writable(cache)
    if problem:
        advice = "Set HEADRACE_CACHE to a writable folder. Without one, weights are packed again at each start."
        return warn("cache folder", problem, advice)
    try:
        limit = cache_limit(cache / "packed")
    except RequestError as error:
        return fail("cache folder", str(error), "Set HEADRACE_CACHE_GIB to a number, or unset it.")
    if limit < weights:
        advice = "Free disk space, set HEADRACE_CACHE to a folder on a larger disk, or raise HEADRACE_CACHE_GIB."
        return warn("cache folder", f"{cache}: room for {gib(limit)}, packed weights take {gib(weights)}", advice)
    return ok("cache folder", f"{cache}: writable, room for {gib(limit)} of packed weights")


def _why_not_writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)) as file:
            file.write(b"headrace")
            file.flush()
    except OSError as error:
        return f"{folder}: cannot write: {error.strerror or error}"
    return ""


def check_user() -> Iterator[CheckResult]:
    if os.geteuid() == 0:
        yield warn("user", "root", "Run the server as a user of its own that can only read its models.")
    else:
        yield ok("user", f"not root (uid {os.geteuid()})")


def check_extras() -> Iterator[CheckResult]:
    """List the optional packages. The check of the configuration fails if one is missing that it needs."""
    versions: dict[str, str] = {}
    for extra, distribution in EXTRAS.items():
        try:
            versions[extra] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    missing = [extra for extra in EXTRAS if extra not in versions]
    installed = ", ".join(f"{extra} ({version})" for extra, version in versions.items()) or "none"
    absent = f"; not installed: {', '.join(missing)}" if missing else ""
    yield ok("extras", f"{installed}{absent}")


def check_bytecode(package: Path = Path(headrace.__file__).parent) -> Iterator[CheckResult]:
    """Check that Python finds the modules compiled: compiling them takes longer than the rest of a start."""
    modules = sorted(package.rglob("*.py"))
    missing = [module for module in modules if not Path(importlib.util.cache_from_source(str(module))).exists()]
    # Modules that were never imported are not compiled yet, and will be; all of them missing means that none is kept.
    if len(missing) < len(modules) or not sys.dont_write_bytecode:
        yield ok("bytecode", "modules are compiled once")
        return
    advice = f"Unset PYTHONDONTWRITEBYTECODE, or run: {sys.executable} -m compileall -q {package}"
    yield warn("bytecode", "no module is compiled: each start compiles hundreds, for about a second", advice)


def check_clock(root: Path = Path("/"), *, now: float | None = None) -> Iterator[CheckResult]:
    """Check the wall clock, which budgets, keys and logs go by, and how fast the system reads it."""
    built = Path(__file__).stat().st_mtime
    if (time.time() if now is None else now) < built - 86_400:
        advice = "Set the clock: budgets, expiring keys and TLS depend on it. Run: timedatectl set-ntp true"
        yield fail("clock", "the clock is behind the date at which Headrace was installed", advice)
        return
    source = " ".join(read_lines(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"))
    if source in _SLOW_CLOCKS:
        advice = "Reading the time is slow. Boot with clocksource=tsc, or use kvm-clock on a virtual machine."
        yield warn("clock", f"clock source {source}", advice)
    elif _clock_state() == _TIME_ERROR:
        yield warn("clock", "not synchronised", "Synchronise it with NTP. Run: timedatectl set-ntp true")
    else:
        yield ok("clock", f"clock source {source or 'unknown'}")


def _clock_state() -> int:
    """Return the kernel's state of the clock (adjtimex), or -1 if the system does not tell."""
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return -1
