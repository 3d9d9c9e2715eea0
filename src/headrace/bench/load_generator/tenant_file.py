"""Several tenants at once, from a TOML file: each with its key, its surface, its load and its workload.

Owns the file's form and its bounds. Keys are read from the environment, by the names that the file gives: a file that
says how a server was measured can be shown to anybody.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.load_generator.arrivals import ArrivalProcess
from headrace.bench.load_generator.benchmark_options import LoadTenant, WorkloadMix, WorkloadOptions, bounded, mix_of
from headrace.bench.load_generator.workloads import PrefixKind
from headrace.errors import RequestError

MOST_TENANTS: Final = 1000
MOST_FILE: Final = 1024 * 1024  # bytes: 1 MiB


class _Line(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """One [[tenant]]; the names are those of the command's flags."""

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
    tenant: list[_Line]


def read_tenants(path: Path, environ: Mapping[str, str], mix: WorkloadMix) -> tuple[LoadTenant, ...]:
    """Those that say nothing of a workload have `mix`."""
    with path.open("rb") as file:
        raw = file.read(MOST_FILE + 1)
    try:
        if len(raw) > MOST_FILE:
            raise ValueError(f"longer than {MOST_FILE} bytes")
        lines = msgspec.convert(tomllib.loads(raw.decode()), _File).tenant
        if not lines or len({line.name for line in lines}) < len(lines) or len(lines) > MOST_TENANTS:
            raise ValueError(f"expected 1 to {MOST_TENANTS} tenants, each with a name of its own")
        return tuple(_tenant(line, environ, mix) for line in lines)
    except (ValueError, msgspec.ValidationError, RequestError) as error:  # tomllib's errors are ValueErrors
        raise RequestError(f"{path}: {error}", parameter="tenants") from None


def _tenant(line: _Line, environ: Mapping[str, str], mix: WorkloadMix) -> LoadTenant:
    if line.rate is not None and line.concurrency is not None:
        raise RequestError(f"tenant '{line.name}' has a rate or a concurrency, not both")
    for what, value in (
        ("rate", line.rate),
        ("concurrency", line.concurrency),
        ("burstiness", line.burstiness),
    ):
        if value is not None:
            bounded(f"the {what} of '{line.name}'", value, 1e-6)
    key = None
    if line.key_env is not None and not (key := environ.get(line.key_env)):
        raise RequestError(f"the environment has no {line.key_env}, which is to be the key of '{line.name}'")
    asked: dict[str, Any] = {
        each.name: value
        for each in dataclasses.fields(WorkloadOptions)
        if (value := getattr(line, each.name)) is not None
    }
    return LoadTenant(
        name=line.name,
        key=key,
        surface=line.surface,
        mix=mix_of(WorkloadOptions(**asked)) if asked else mix,
        rate=line.rate,
        concurrency=line.concurrency,
        arrivals=line.arrivals,
        burstiness=line.burstiness,
    )
