"""Checks the processor: instruction sets, cores, the container's CPU quota and the frequency governor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import headrace._core as _core
from headrace.bench.machine import cpu_name
from headrace.cli.doctor.check_result import CheckResult, fail, ok, warn
from headrace.config import Config, variants_of
from headrace.engine.executors.cgroups import cpu_quota, read_lines
from headrace.engine.executors.cpu_executor import choose_isa
from headrace.engine.executors.default_sizes import usable_cores
from headrace.errors import RequestError


def check_processor(root: Path = Path("/")) -> Iterator[CheckResult]:
    yield ok("processor", cpu_name(root))
    yield _instructions(root)


def _instructions(root: Path) -> CheckResult:
    name = "instruction set"
    available = _core.isa_available()
    try:
        used = choose_isa(None)
    except RequestError as error:
        if error.parameter == "HEADRACE_ARITHMETIC":
            return fail(name, str(error), "Unset HEADRACE_ARITHMETIC, or set it to native or portable.")
        return fail(name, str(error), f"Unset HEADRACE_ISA, or set it to one of {', '.join(available)}.")
    best = available[0]
    if used != best and not os.environ.get("HEADRACE_ISA"):
        return ok(name, f"the core uses {used}, the fastest of HEADRACE_ARITHMETIC=portable; this machine has {best}")
    if used != best:
        return warn(name, f"{used}, forced by HEADRACE_ISA; this machine has {best}", "Unset HEADRACE_ISA.")
    if used == "portable":
        advice = "Expect a small part of the speed. Use an x86-64 machine with AVX2, or better AVX-512, or 64-bit ARM."
        return warn(name, "portable: this processor has neither AVX2 nor NEON", advice)
    flags = next((line for line in read_lines(root / "proc/cpuinfo") if line.startswith("flags")), "").split()
    if "amx_int8" in flags and "amx" not in available:
        return warn(
            name, f"{used}; the system does not allow AMX", "Use Linux 5.16 or later to process prompts faster."
        )
    others = ", ".join(each for each in available if each != used)
    return ok(name, f"the core uses {used}" + (f" (also here: {others})" if others else ""))


def check_cores(config: Config | None, root: Path = Path("/")) -> Iterator[CheckResult]:
    """Compare the cores with the container's CPU quota and the configured threads."""
    groups = (root / "proc", root / "sys/fs/cgroup")
    cores, quota = usable_cores(*groups), cpu_quota(*groups)
    found = f"{cores} usable" + ("" if quota is None else f", CPU quota {quota:g}")
    if quota is not None and quota < 1:
        yield warn("cores", found, "Raise the quota: even one thread is throttled.")
    else:
        yield ok("cores", found)
    for name, threads in _threads(config).items():
        if threads > cores:
            yield warn(
                "threads",
                f"{name} computes with {threads} threads on {cores} cores",
                f"Set threads to at most {cores}.",
            )


def _threads(config: Config | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, model in ({} if config is None else config.models).items():
        try:
            variants = variants_of(name, model, {})
        except RequestError:
            continue  # the check of the configuration reports it
        found |= {full: each.threads for full, each in variants.items() if each.threads is not None}
    return found


def check_governor(root: Path = Path("/")) -> Iterator[CheckResult]:
    name = "cpu governor"
    governors: dict[str, int] = {}
    for file in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"):
        for governor in read_lines(file):
            governors[governor] = governors.get(governor, 0) + 1
    slow = {governor: count for governor, count in governors.items() if governor != "performance"}
    if not governors:
        yield ok(name, "set by the host: the system shows none")
    elif not slow:
        yield ok(name, "performance")
    else:
        found = ", ".join(f"{governor} on {count} CPUs" for governor, count in sorted(slow.items()))
        yield warn(name, found, "For steady latency, run as root: cpupower frequency-set -g performance")
