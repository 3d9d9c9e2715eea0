"""Pack files: blobs come back mapped and aligned; truncated and inconsistent files are rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.models.formats.pack_file import PackFile, PackWriter
from tests.support.models.pack_files import TRAILER, change_footer


def blob(*values: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(values, dtype=np.uint8)


def write_sample(path: Path) -> Path:
    with PackWriter(path, {"layout": 3, "isa": "avx2"}) as writer:
        writer.add("a", {"format": "int4", "shape": [2, 5]}, np.arange(70, dtype=np.uint8))
        writer.add("empty", {}, blob())
        writer.add("b", {"gain": 0.5}, blob(1, 2, 3).reshape(3, 1))
    return path


def test_written_blobs_are_read_back(tmp_path: Path) -> None:
    file = PackFile.open(write_sample(tmp_path / "p"))
    assert file.meta == {"layout": 3, "isa": "avx2"}
    assert file.names == ("a", "empty", "b")
    assert file.entry_meta("a") == {"format": "int4", "shape": [2, 5]}
    assert file.entry_meta("b") == {"gain": 0.5}
    assert file.data("a").tolist() == list(range(70))
    assert file.data("b").tolist() == [1, 2, 3]
    assert file.data("empty").size == 0
    with pytest.raises(ModelError, match="no such tensor") as caught:
        file.data("c")
    assert caught.value.tensor == "c"


def test_data_is_aligned_read_only_and_outlives_the_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "p")
    arrays = [PackFile.open(path).data(name) for name in ("a", "b")]
    path.unlink()
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert arrays[1].tolist() == [1, 2, 3]


def test_nothing_appears_before_close_and_an_error_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p"
    writer = PackWriter(path, {})
    writer.add("a", {}, blob(1))
    assert not path.exists()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), PackWriter(path, {}) as writer:
        writer.add("a", {}, blob(1 // 0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        writer.add("b", {}, blob(1))


def test_metadata_that_is_not_json_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError), PackWriter(tmp_path / "p", {"x": object()}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_replaces_the_old_one_under_its_readers(tmp_path: Path) -> None:
    old = PackFile.open(write_sample(tmp_path / "p"))
    with PackWriter(tmp_path / "p", {}) as writer:
        writer.add("a", {}, blob(9))
    assert old.data("b").tolist() == [1, 2, 3]
    assert PackFile.open(tmp_path / "p").data("a").tolist() == [9]


def test_the_writer_rejects_unreadable_blobs(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "p", {})
    writer.add("a", {}, blob(1))
    with pytest.raises(ValueError, match="added before"):
        writer.add("a", {}, blob(1))
    with pytest.raises(ValueError, match="contiguous bytes"):
        writer.add("b", {}, np.zeros(4, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous bytes"):
        writer.add("b", {}, blob(1, 2, 3, 4)[::2])
    writer.abort()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = write_sample(tmp_path / "p").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ModelError):
            PackFile.open(tmp_path / "cut")


def set_entry(index: int, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(footer: dict[str, Any]) -> None:
        footer["entries"][index][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_entry(0, "offset", 0), "places it at byte 0, expected 64"),
        (set_entry(0, "offset", -64), "invalid footer"),
        (set_entry(0, "offset", 65), "places it at byte 65"),
        (set_entry(2, "offset", 64), "places it at byte 64"),
        (set_entry(2, "offset", 2**62), "places it at byte"),
        (set_entry(2, "offset", 2**64), "invalid footer"),
        (set_entry(0, "size", 2**62), "past the end"),
        (set_entry(0, "size", 130), "places it at byte 192, expected 256"),
        (set_entry(2, "size", 10**4), "past the end"),
        (set_entry(2, "size", -1), "invalid footer"),
        (set_entry(2, "size", 3.0), "invalid footer"),
        (set_entry(2, "size", "3"), "invalid footer"),
        (set_entry(2, "meta", []), "invalid footer"),
        (set_entry(2, "name", "a"), "lists it twice"),
        (set_entry(2, "name", 7), "invalid footer"),
        (lambda footer: footer["entries"].pop(), "belong to no tensor"),
        (lambda footer: footer.update(entries={}), "invalid footer"),
        (lambda footer: footer.update(meta=1), "invalid footer"),
        (lambda footer: footer.update(version=2), "version 2"),
        (lambda footer: footer.pop("version"), "invalid footer"),
        (lambda footer: footer.update(more=1), "invalid footer"),
    ],
)
def test_a_wrong_footer_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    path = change_footer(write_sample(tmp_path / "p"), change)
    with pytest.raises(ModelError, match=reason) as caught:
        PackFile.open(path)
    assert caught.value.path == str(path)


def test_an_unchanged_footer_with_a_new_checksum_is_accepted(tmp_path: Path) -> None:
    assert PackFile.open(change_footer(write_sample(tmp_path / "p"), lambda footer: None)).names == ("a", "empty", "b")


def test_another_file_and_a_changed_footer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"x" * 500)
    with pytest.raises(ModelError, match="not a pack file"):
        PackFile.open(path)
    content = bytearray(write_sample(path).read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="footer does not match its checksum"):
        PackFile.open(path)


def open_all(path: Path) -> None:
    try:
        file = PackFile.open(path)
    except ModelError:
        return
    for name in file.names:
        file.data(name).sum()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pack"
    content = bytearray(write_sample(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    open_all(path)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(footer=st.binary(max_size=120), body=st.integers(0, 3))
def test_any_signed_footer_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, footer: bytes, body: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "signed.pack"
    start = write_sample(path).read_bytes()[:64]
    trailer = TRAILER.pack(hashlib.sha256(footer).digest(), len(footer), b"HEADDONE")
    path.write_bytes(start + bytes(64 * body) + footer + trailer)
    open_all(path)


numbers = st.integers(-1, 300) | st.sampled_from([2**31, 2**62, 2**63, 2**64])
footers = st.fixed_dictionaries(
    {
        "version": st.just(1) | numbers,
        "meta": st.just({}) | st.none(),
        "entries": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.text(max_size=2),
                    "offset": st.sampled_from([64, 128, 192]) | numbers,
                    "size": st.integers(0, 130) | numbers,
                    "meta": st.just({}),
                }
            ),
            max_size=3,
        ),
    }
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(footer=footers)
def test_a_well_formed_footer_of_nonsense_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, footer: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "nonsense.pack"
    open_all(change_footer(write_sample(path), lambda old: old.update(footer)))
