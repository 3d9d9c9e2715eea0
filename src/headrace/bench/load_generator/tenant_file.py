"""Reads the tenants of a benchmark from a TOML file: each with a key, a surface, a load and a workload.

The file names environment variables in place of keys, so that it can be published with the results.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.load_generator.arrivals import ArrivalProcess
from headrace.bench.load_generator.benchmark_options import (
    LoadTenant,
    WorkloadMix,
    WorkloadOptions,
    build_mix,
    check_minimum,
)
from headrace.bench.load_generator.workloads import PrefixKind
from headrace.errors import RequestError

MOST_TENANTS: Final = 1000
MOST_FILE: Final = 1024 * 1024  # bytes: 1 MiB


class _TenantEntry(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """One [[tenant]] table; its names are those of the command's flags."""

    name: str
    key_env: str | None = None
    surface: str = ""
    rate: float | None = None
    concurrency: int | None = None
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    workload: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    spread: float | None = None
    scale: float | None = None
    prefixes: int | None = None
    prefix_tokens: int | None = None
    prefix_kind: PrefixKind | None = None
    prefix_share: float | None = None
    turns: str | None = None
    think: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenant: list[_TenantEntry]


def read_tenants(path: Path, environ: Mapping[str, str], mix: WorkloadMix) -> tuple[LoadTenant, ...]:
    """Read the file; tenants without a workload get `mix`."""
    with path.open("rb") as file:
        raw = file.read(MOST_FILE + 1)
    try:
        if len(raw) > MOST_FILE:
            raise ValueError(f"the file is longer than {MOST_FILE} bytes")
        entries = msgspec.convert(tomllib.loads(raw.decode()), _File).tenant
        if not entries or len({entry.name for entry in entries}) < len(entries) or len(entries) > MOST_TENANTS:
            raise ValueError(f"expected 1 to {MOST_TENANTS} tenants with unique names")
        return tuple(_tenant(entry, environ, mix) for entry in entries)
    except (ValueError, msgspec.ValidationError, RequestError) as error:  # tomllib's errors are ValueErrors
        raise RequestError(f"{path}: {error}", parameter="tenants") from None


def _tenant(entry: _TenantEntry, environ: Mapping[str, str], mix: WorkloadMix) -> LoadTenant:
    if entry.rate is not None and entry.concurrency is not None:
        raise RequestError(f"tenant '{entry.name}' has a rate and a concurrency. Give one of them.")
    for what, value in (
        ("rate", entry.rate),
        ("concurrency", entry.concurrency),
        ("burstiness", entry.burstiness),
    ):
        if value is not None:
            check_minimum(f"{what} of tenant '{entry.name}'", value, 1e-6)
    key = None
    if entry.key_env is not None and not (key := environ.get(entry.key_env)):
        raise RequestError(f"environment variable {entry.key_env}, the key of tenant '{entry.name}', is not set.")
    workload: dict[str, Any] = {
        each.name: value
        for each in dataclasses.fields(WorkloadOptions)
        if (value := getattr(entry, each.name)) is not None
    }
    return LoadTenant(
        name=entry.name,
        key=key,
        surface=entry.surface,
        mix=build_mix(WorkloadOptions(**workload)) if workload else mix,
        rate=entry.rate,
        concurrency=entry.concurrency,
        arrivals=entry.arrivals,
        burstiness=entry.burstiness,
    )
