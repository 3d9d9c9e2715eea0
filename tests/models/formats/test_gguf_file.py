"""The container of GGUF files: what is read, and that every inconsistency is rejected with path, tensor and reason."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.models.formats.gguf_file import GgufFile


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def raw(keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, start: bytes = b"GGUF\x03\0\0\0") -> bytes:
    head = start + struct.pack("<QQ", len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def refused(path: Path, content: bytes) -> ModelError:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert caught.value.path == str(path)
    return caught.value


def test_files_of_the_reference_implementation_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.texts", ["x", "", "ü"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("m", matrix)
    writer.add_tensor("v", np.ones(5, np.float32))
    writer.add_tensor(
        "q", gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile.open(path)

    assert file.metadata["general.architecture"] == "llama"
    assert [file.metadata[f"a.{name}"] for name in ("number", "float", "flag", "text", "texts")] == [
        7,
        0.5,
        True,
        "Grüße",
        ["x", "", "ü"],
    ]
    assert list(np.asarray(file.metadata["a.numbers"])) == [1, 2, 3]
    assert {name: (each.type, each.shape) for name, each in file.tensors.items()} == {
        "m": ("F32", (2, 32)),
        "v": ("F32", (5,)),
        "q": ("Q8_0", (2, 32)),
    }
    np.testing.assert_array_equal(file.rows("m").view(np.float32), matrix)
    assert file.rows("v").shape == (1, 20)
    assert file.rows("q").shape == (2, 34)
    assert not file.rows("q").flags.writeable
    with pytest.raises(ModelError, match="no such tensor"):
        file.rows("other")


GOOD = [tensor("a", (32, 2), 8, 0), tensor("b", (4,), 0, 96)]


@pytest.mark.parametrize(
    ("content", "reason", "about"),
    [
        (raw([], [], start=b"GGML\x03\0\0\0"), "does not start with 'GGUF'", None),
        (raw([], [], start=b"GGUF\x01\0\0\0"), "version 1 is not supported", None),
        (raw([], [], start=b"GGUF\0\0\0\x03"), "big-endian", None),
        (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 1 << 40, 0), "At most 262144", None),
        (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 1 << 40), "At most 65536", None),
        (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 3), "is truncated", None),
        (raw([key("k", 4, bytes(4))] * 2, []), "Key 'k' is in the file twice", None),
        (raw([key("k", 13, b"")], []), "unknown type 13", None),
        (raw([key("k", 9, struct.pack("<IQ", 9, 1))], []), "array of the unsupported type 9", None),
        (raw([key("k", 9, struct.pack("<IQ", 4, 1 << 62))], []), "At most 16777216", None),
        (raw([key("k", 8, struct.pack("<Q", 1 << 63))], []), "longer than", None),
        (raw([key("k", 8, text(b"\xff\xfe"))], []), "is not UTF-8", None),
        (raw([key("general.alignment", 4, struct.pack("<I", 48))], []), "power of two", None),
        (raw([], [tensor("a", (), 0, 0)]), "0 dimensions", "a"),
        (raw([], [tensor("a", (1, 1, 1, 1, 1), 0, 0)]), "5 dimensions", "a"),
        (raw([], [tensor("a", (0, 2), 0, 0)]), "is empty", "a"),
        (raw([], [tensor("a", (1 << 40, 1 << 40), 0, 0)]), "too large", "a"),
        (raw([], [tensor("a", (33, 2), 8, 0)]), "do not fill Q8_0 blocks of 32", "a"),
        (raw([], [tensor("a", (256,), 15, 0)], bytes(512)), "Type Q8_K is not supported", "a"),
        (raw([], [tensor("a", (256,), 999, 0)], bytes(512)), "unsupported type 999", "a"),
        (raw([], [GOOD[0], tensor("a", (4,), 0, 96)], bytes(256)), "lists the tensor twice", "a"),
        (raw([], [tensor("a", (4,), 0, 32)], bytes(64)), "Expected 0", "a"),
        (raw([], GOOD, bytes(100)), "past the end of the file", "b"),
    ],
)  # fmt: skip
def test_an_inconsistent_file_is_rejected(tmp_path: Path, content: bytes, reason: str, about: str | None) -> None:
    error = refused(tmp_path / "bad.gguf", content)
    assert reason in str(error)
    assert (f"tensor '{about}'" in str(error)) == (about is not None)


def test_a_file_cut_at_any_byte_is_rejected(tmp_path: Path) -> None:
    content = raw([key("k", 8, text("value")), key("n", 9, struct.pack("<IQ", 4, 2) + bytes(8))], GOOD, bytes(112))
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(content)
    assert set(GgufFile.open(whole).tensors) == {"a", "b"}
    for size in range(len(content)):
        refused(tmp_path / "cut.gguf", content[:size])


@settings(max_examples=150, deadline=None)
@given(damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_files_are_rejected_or_stay_inside_the_file(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    content = bytearray(raw([key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))], GOOD, bytes(112)))
    for place, value in damage:
        content[place % len(content)] = value
    path = tmp_path_factory.mktemp("damaged") / "file.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    for name, entry in file.tensors.items():
        assert 0 <= entry.start <= entry.stop <= len(content)
        assert file.rows(name).nbytes == entry.stop - entry.start


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="not a regular file"):
        GgufFile.open(path)
