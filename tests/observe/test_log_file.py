"""A log file of bounded size: rotated between lines, kept as often as configured, and never in the way of a request."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.observe.log_file import RotatingFile


def line(number: int) -> str:
    return f"line {number:04}\n"  # 10 bytes


def test_a_full_file_is_rotated_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "headrace.log"
    file = RotatingFile(path, most_bytes=50, keep=2)
    for number in range(17):
        file.write(line(number))
    assert {each.name: each.read_text() for each in path.parent.iterdir()} == {
        "headrace.log": "".join(map(line, range(15, 17))),
        "headrace.log.1": "".join(map(line, range(10, 15))),
        "headrace.log.2": "".join(map(line, range(5, 10))),
    }
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
    file.close()


def test_a_new_process_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(3):
        file = RotatingFile(path, most_bytes=20, keep=1)
        file.write(line(number))
        file.close()
    assert (path.read_text(), Path(f"{path}.1").read_text()) == (line(2), line(0) + line(1))


def test_without_kept_files_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, most_bytes=20, keep=0)
    for number in range(3):
        file.write(line(number))
    assert [each.name for each in tmp_path.iterdir()] == ["log"]
    assert path.read_text() == line(2)
    file.close()


def test_threads_lose_and_split_no_line(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", most_bytes=500, keep=100)
    threads = [threading.Thread(target=lambda: [file.write(line(n)) for n in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = [each for path in tmp_path.iterdir() for each in path.read_text().splitlines(keepends=True)]
    assert sorted(lines) == sorted(map(line, list(range(200)) * 4))


def test_a_line_longer_than_a_file_is_written_whole(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", most_bytes=20, keep=1)
    file.write("x" * 100 + "\n")
    assert (tmp_path / "log").stat().st_size == 101
    file.close()


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"log.file: Cannot write '.*': Is a directory"):
        RotatingFile(tmp_path, most_bytes=20, keep=1)
