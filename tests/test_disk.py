"""The space of a disk, also for folders that are not made yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.disk import disk_space, nearest_folder


def test_the_closest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest_folder(tmp_path) == tmp_path
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_folder(Path("a/b")) == tmp_path


def test_the_space_of_a_folder_that_is_not_made_yet_is_that_of_its_disk(tmp_path: Path) -> None:
    assert disk_space(tmp_path / "a").total == shutil.disk_usage(tmp_path).total
