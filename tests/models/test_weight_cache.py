"""The cache of packed weights keeps within its bound and leaves room on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.models.weight_cache import cache_limit, delete_abandoned, evict_until_fits, has_room

GIB = 2**30


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    disk = SimpleNamespace(total=100 * GIB, free=50 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    monkeypatch.delenv("HEADRACE_CACHE_GIB", raising=False)
    return disk


def packed(folder: Path, *sizes: int) -> list[Path]:
    """Files in the order of their last use, the oldest first."""
    paths = [folder / f"{number}.pack" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(bytes(size))
        os.utime(path, (number, number))
    return paths


def test_a_twentieth_of_the_disk_and_at_most_2_gib_stay_free(disk: SimpleNamespace, tmp_path: Path) -> None:
    missing = tmp_path / "packed" / "of" / "nothing"
    assert cache_limit(missing) == 48 * GIB
    disk.total = 20 * GIB
    assert cache_limit(missing) == 49 * GIB
    disk.free = 1 * GIB
    assert cache_limit(missing) == 0
    disk.total = 4000 * GIB
    disk.free = 1000 * GIB
    assert cache_limit(missing) == 64 * GIB


def test_what_is_in_the_cache_can_make_room(disk: SimpleNamespace, tmp_path: Path) -> None:
    old, young = packed(tmp_path, 1000, 2000)
    disk.free = 2 * GIB + 100
    assert cache_limit(tmp_path) == 3100
    assert evict_until_fits(tmp_path, 1000, cache_limit(tmp_path))
    assert (old.exists(), young.exists()) == (False, True)


def test_what_cannot_fit_evicts_nothing(disk: SimpleNamespace, tmp_path: Path) -> None:
    (only,) = packed(tmp_path, 1000)
    disk.free = 2 * GIB
    assert not evict_until_fits(tmp_path, 1001, cache_limit(tmp_path))
    assert only.exists()


def test_a_deleted_file_that_a_process_still_maps_makes_no_room(disk: SimpleNamespace, tmp_path: Path) -> None:
    packed(tmp_path, 1000)
    disk.free = 2 * GIB + 500
    assert evict_until_fits(tmp_path, 1000, cache_limit(tmp_path))
    assert not has_room(tmp_path, 1000)  # the disk is as full as before
    disk.free += 1000
    assert has_room(tmp_path, 1000)


def test_a_smaller_bound_of_the_user_holds(
    disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_GIB", "1.5")
    assert cache_limit(tmp_path) == 1.5 * GIB


def test_what_a_killed_process_began_to_pack_is_deleted(tmp_path: Path) -> None:
    old, young = tmp_path / ".a.pack.0f.part", tmp_path / ".b.pack.0f.part"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    delete_abandoned(tmp_path)
    assert (old.exists(), young.exists()) == (False, True)
