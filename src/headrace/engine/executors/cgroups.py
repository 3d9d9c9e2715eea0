"""Finds the control groups of this process and reads their limits, for versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folders(controller: str, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yield the folders of this process's groups of a controller (`memory`, `cpu`) and of those around them."""
    yield root
    for line in read_lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        path = PurePosixPath(name.lstrip("/"))
        for each in (path, *path.parents):
            yield top / each


def cpu_quota(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the processors' worth of time that the groups allow, such as 1.5; None without a quota."""
    quotas: list[float] = []
    for group in cgroup_folders("cpu", proc, root):
        words = " ".join(read_lines(group / "cpu.max")).split()
        quota, period = words if len(words) == 2 else ("max", "")
        if quota == "max":  # version 1 writes -1 for no quota, which is no number here
            quota = str(read_number(group / "cpu.cfs_quota_us"))
            period = str(read_number(group / "cpu.cfs_period_us"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def read_number(path: Path) -> int | None:
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max" is no limit
