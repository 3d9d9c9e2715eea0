"""The CPU quota of this process's control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.executors.cgroups import cpu_quota
from headrace.engine.executors.default_sizes import usable_cores


def test_the_smallest_quota_of_the_groups_around_the_process_counts(tmp_path: Path) -> None:
    own, inner = tmp_path / "proc/self/cgroup", tmp_path / "groups/outer/inner"
    own.parent.mkdir(parents=True)
    inner.mkdir(parents=True)
    assert cpu_quota(tmp_path / "proc", tmp_path / "groups") is None
    own.write_text("0::/outer/inner\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path / "proc", tmp_path / "groups") is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path / "proc", tmp_path / "groups") == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path / "proc", tmp_path / "groups") == 0.5


def test_the_usable_cores_are_the_whole_ones_of_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    found: dict[str, int] = {}
    for quota in ("max", "50000", "100000", "390000", "1600000"):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        found[quota] = usable_cores(tmp_path, tmp_path)
    assert found == {"max": 8, "50000": 1, "100000": 1, "390000": 3, "1600000": 8}
