"""`headrace doctor`: check this machine, the configuration and what it names, and say what to do.

Each module of this package checks one concern. Changes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from headrace.cli.admin.admin_client import printable
from headrace.cli.admin.admin_output import print_table
from headrace.cli.doctor.check_result import CheckResult, fail, ok
from headrace.cli.doctor.gpu_checks import check_gpus
from headrace.cli.doctor.memory_checks import check_huge_pages, check_memory_of
from headrace.cli.doctor.processor_checks import check_cores, check_governor, check_processor
from headrace.cli.doctor.service_checks import check_services
from headrace.cli.doctor.system_checks import (
    check_bytecode,
    check_clock,
    check_extras,
    check_folders,
    check_open_files,
    check_ports,
    check_user,
)
from headrace.config import Config, ConfigError
from headrace.config.loader import find_config_file
from headrace.config.value_types import Finding
from headrace.errors import RequestError
from headrace.server.config_checks import load_config
from headrace.server.deployment_checks import check_deployment
from headrace.version import __version__

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    *,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    timeout: float = 3.0,
    json: bool = False,
) -> None:
    """Check this machine and a configuration, and print what to do about each problem.

    Usage: headrace doctor, or headrace doctor --config headrace.toml

    It checks the processor, memory, limits, ports, folders, packages, the clock, the configuration, and whether the
    services that it names answer. It changes nothing. The exit code is 1 if a check fails; warnings leave it at 0.

    Parameters
    ----------
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    timeout
        Seconds that each service may take to answer.
    json
        Print one JSON object instead of the table.
    """
    if not 0 < timeout <= 60:
        raise RequestError(f"--timeout: expected more than 0 and at most 60 seconds, found {timeout:g}.")
    file = find_config_file(config, os.environ)
    if file is not None and not file.is_file():
        raise RequestError(f"{file}: file not found. Pass a configuration file to --config.")
    results = list(_check_all(file, os.environ, timeout))
    counts = {state: sum(each.state == state for each in results) for state in ("ok", "warn", "fail")}
    if json:
        print(msgspec.json.encode({"version": __version__, "checks": results, **counts}).decode())
    else:
        _print(results)
        print(f"\n{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    if counts["fail"]:
        sys.exit(1)


def _check_all(file: Path | None, environ: Mapping[str, str], timeout: float) -> Iterator[CheckResult]:
    config, findings = _read(file, environ)
    yield from findings
    yield from check_processor()
    yield from check_cores(config)
    yield from check_governor()
    yield from check_gpus(config, timeout)
    yield from check_memory_of(config)
    yield from check_huge_pages()
    yield from check_folders(config)
    if config is not None:
        yield from check_open_files(config)
        yield from check_ports(config, timeout)
    yield from check_bytecode()
    yield from check_extras()
    if config is not None:
        yield from check_services(config, environ, timeout)
    yield from check_user()
    yield from check_clock()


def _read(file: Path | None, environ: Mapping[str, str]) -> tuple[Config | None, list[CheckResult]]:
    """Return the configuration, None if it cannot be read, and what `config check` finds."""
    read: list[Config] = []

    def check(config: Config, variables: Mapping[str, str]) -> Iterable[Finding]:
        read.append(config)
        # The check of the folders reports the storage folder.
        return (each for each in check_deployment(config, variables) if each[0] != "storage.folder")

    name = "configuration"
    try:
        config = load_config(file, environ=environ, check=check)
    except ConfigError as error:
        if not read:
            advice = "Correct the file. Ports, storage and services were not checked."
            return None, [fail(name, str(each), advice) for each in error.mistakes]
        return read[0], [fail(name, str(each), "Correct it, then run the command again.") for each in error.mistakes]
    models = ", ".join(config.models)
    return config, [ok(name, f"{'defaults (no file)' if file is None else file}: valid; models: {models}")]


def _print(results: Sequence[CheckResult]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for each in results:
        table.add_row(Text(each.state, _COLOURS[each.state]), Text(printable(each.check)), Text(printable(each.found)))
        if each.advice:
            table.add_row("", "", Text(f"-> {printable(each.advice)}", "bold"))
    print_table(table)
