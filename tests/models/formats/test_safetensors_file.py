"""safetensors files: reading, writing, and rejecting every inconsistency."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        SafetensorsFile.open(path)
    assert caught.value.path == str(path)
    return caught.value


def test_files_of_the_reference_implementation_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.5
    half = np.array([1.5, -2.0], dtype=np.float16)
    counts = np.arange(3)
    safetensors.numpy.save_file({"m": matrix, "h": half, "i": counts}, path, metadata={"format": "pt"})

    file = SafetensorsFile.open(path)

    assert file.metadata == {"format": "pt"}
    assert set(file.tensors) == {"m", "h", "i"}
    assert file.tensors["i"].dtype == "I64"
    assert file.dense("m").shape == (3, 4)
    np.testing.assert_array_equal(file.dense("m").data, matrix)
    np.testing.assert_array_equal(file.dense("h").data, half.view(np.uint16))
    np.testing.assert_array_equal(file.dense("h").to_f32(), half.astype(np.float32))


def test_a_tensor_is_a_read_only_view_that_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"m": np.ones((2, 2), np.float32)}, path)
    tensor = SafetensorsFile.open(path).dense("m")
    path.unlink()
    assert tensor.data.flags.owndata is False
    assert tensor.data.flags.c_contiguous
    assert tensor.data.sum() == 4.0
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 2


def test_the_reference_implementation_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    matrix = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    write_safetensors(
        path,
        {
            "rows": ("F32", (2, 3), lambda: (row for row in matrix)),
            "scalar": ("F16", (), lambda: [np.float16(2).tobytes()]),
            "empty": ("F32", (0, 4), lambda: []),
        },
        {"format": "pt"},
    )
    read = safetensors.numpy.load_file(path)
    assert list(SafetensorsFile.open(path).tensors) == ["rows", "scalar", "empty"]
    np.testing.assert_array_equal(read["rows"], matrix)
    assert read["scalar"] == np.float16(2)
    assert read["empty"].shape == (0, 4)
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert SafetensorsFile.open(path).tensors["rows"].start % 8 == 0


def test_bfloat16_becomes_exact_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38, 0.0], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_safetensors(tmp_path / "a", {"x": ("BF16", (4,), lambda: [bits])})
    tensor = SafetensorsFile.open(tmp_path / "a").dense("x")
    assert tensor.dtype == "bf16"
    np.testing.assert_array_equal(tensor.to_f32(), (bits.astype(np.uint32) << 16).view(np.float32))


def test_a_tensor_that_an_old_writer_left_unaligned_is_copied(tmp_path: Path) -> None:
    header = json.dumps({"x": entry("F32", [2], 0, 8)}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    path = write_raw(tmp_path / "a", header, np.array([1, 2], "<f4").tobytes())
    data = SafetensorsFile.open(path).dense("x").data
    assert data.flags.aligned
    assert not data.flags.writeable
    assert data.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("pieces", [[b"1234"], [b"12345678", b"9"], []])
def test_writing_checks_the_bytes_and_leaves_no_file(tmp_path: Path, pieces: list[bytes]) -> None:
    with pytest.raises(ValueError, match="tensor 'x'"):
        write_safetensors(tmp_path / "a", {"x": ("F32", (2,), lambda: pieces)})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError):
        write_safetensors(path, {"x": ("F32", (2,), lambda: [bytes(1 // 0)])})
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_an_unsupported_dtype_is_rejected_on_access(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a", {"i": entry("I64", [1], 0, 8), "x": entry("F32", [1], 8, 12)}, bytes(12))
    file = SafetensorsFile.open(path)
    assert file.dense("x").data.tolist() == [0.0]
    with pytest.raises(ModelError, match="Cannot load dtype I64") as caught:
        file.dense("i")
    assert caught.value.tensor == "i"
    with pytest.raises(ModelError, match="no such tensor"):
        file.dense("y")


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"x": entry("F32", [2], 0, 8)}, bytes(7), "reaches past the 7 bytes"),
        ({"x": entry("F32", [2], 0, 8)}, bytes(9), "last 1 bytes of the file belong to no tensor"),
        ({"x": entry("F32", [3], 0, 8)}, bytes(8), r"holds 8 bytes, but F32 \[3\] takes 12"),
        ({"x": entry("F32", [2], 8, 0)}, bytes(8), "ends before it begins"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 2, 6)}, bytes(8), "overlaps"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 0, 4)}, bytes(4), "overlaps"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, bytes(12), "belong to no tensor"),
        ({"x": entry("F32", [1], 4, 8)}, bytes(8), "belong to no tensor"),
        ({"x": entry("Q4", [1], 0, 4)}, bytes(4), "Unknown dtype 'Q4'"),
        ({"x": entry("F4", [3], 0, 1)}, bytes(1), "whole bytes"),
        ({"x": entry("F32", [-1], 0, 4)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", [1.5], 0, 4)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", ["1"], 0, 4)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", [2**62, 2**62, 4], 0, 0)}, b"", "too large"),
        ({"x": entry("F32", [0, 2**62, 2**62], 0, 0)}, b"", "too large"),
        ({"x": entry("F32", [2**64], 0, 4)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", [1] * 17, 0, 4)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", [1], 0, 2**64)}, bytes(4), "header is invalid"),
        ({"x": entry("F32", [1], True, 4)}, bytes(4), "header is invalid"),
        ({"x": {"dtype": "F32", "shape": [1]}}, bytes(4), "header is invalid"),
        ({"x": {**entry("F32", [1], 0, 4), "more": 1}}, bytes(4), "header is invalid"),
        ({"x": [1]}, b"", "header is invalid"),
        ({"__metadata__": {"a": 1}}, b"", "header is invalid"),
        (b'{"x":', b"", "header is invalid"),
        (b"{} {}", b"", "header is invalid"),
        (b"[]", b"", "does not start with"),
        (b"", b"", "does not start with"),
        (b'{"\xff": 1}', b"", "header is invalid"),
        (b'{"__metadata__": {"a": "b", "a": "c"}}', b"", "duplicate key 'a'"),
        (b'{"x":' * 100_000, b"", "header is invalid"),
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path: Path, header: object, data: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        SafetensorsFile.open(write_raw(tmp_path / "a", header, data))


def test_a_duplicate_tensor_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("F32", [1], 0, 4))
    path = write_raw(tmp_path / "a", f'{{"x": {one}, "x": {one}}}'.encode(), bytes(4))
    assert "duplicate key 'x'" in refused(path).reason


def test_the_refusal_names_the_tensor(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a", {"model.x": entry("F32", [3], 0, 8)}, bytes(8))
    assert refused(path).tensor == "model.x"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "past the end"),
        (struct.pack("<Q", 2**63), "larger than"),
        (struct.pack("<Q", 100_000_001), "larger than"),
    ],
)
def test_a_file_shorter_than_it_says_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a").write_bytes(content)
    assert reason in refused(tmp_path / "a").reason


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "Cannot open" in refused(tmp_path / "nothing").reason
    assert "not a regular file" in refused(tmp_path).reason


def open_all(path: Path) -> None:
    """Open, and read every tensor that can be: only ModelError may come of it."""
    try:
        file = SafetensorsFile.open(path)
    except ModelError:
        return
    size = path.stat().st_size
    for name, found in file.tensors.items():
        assert 8 <= found.start <= found.stop <= size
        try:
            data = file.dense(name).data
        except ModelError:
            continue
        assert data.nbytes == found.stop - found.start
        data.sum(dtype=np.float64)


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "a"
    tensors = {"b": np.ones((2, 3), np.float32), "a": np.ones(5, np.float16), "c": np.arange(2)}
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return path.read_bytes()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(content=st.binary(max_size=200), length=st.none() | st.integers(0, 300))
def test_random_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(content if length is None else struct.pack("<Q", length) + content)
    open_all(path)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, valid: bytes, data: st.DataObject
) -> None:
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(bytes(content[:cut]))
    open_all(path)


sizes = st.integers(-2, 20) | st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63)])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F4", "", "X"]),
        "shape": st.lists(sizes, max_size=4),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    }
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(header=st.dictionaries(st.text(max_size=3), entries, max_size=3), length=st.integers(0, 64))
def test_a_well_formed_header_of_nonsense_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], length: int
) -> None:
    open_all(write_raw(tmp_path_factory.getbasetemp() / "nonsense.safetensors", header, bytes(length)))
