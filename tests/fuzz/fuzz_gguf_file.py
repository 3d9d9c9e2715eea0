"""Fuzzes the GGUF parser: `python tests/fuzz/fuzz_gguf_file.py -max_total_time=30`. Needs atheris from PyPI.

The input is a whole file. Only ModelError may be raised, no range may leave the file, and every tensor decodes. The
metadata is read as that of a model too.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace"]):
    from headrace.errors import ModelError
    from headrace.models.formats.gguf_blocks import EXACT, decode_rows, exact_codes
    from headrace.models.formats.gguf_file import GgufFile
    from headrace.models.gguf.gguf_model import read_spec
    from headrace.models.gguf.gguf_tokenizer import read_tokenizer

PATH = Path(tempfile.mkdtemp()) / "fuzz.gguf"


def one_input(data: bytes) -> None:
    PATH.write_bytes(data)
    try:
        file = GgufFile.open(PATH)
    except ModelError:
        return
    for name, entry in file.tensors.items():
        if not 24 <= entry.start <= entry.stop <= len(data):
            raise AssertionError(f"{name}: {entry}")
        decode_rows(file.rows(name), entry.type)
        if entry.type in EXACT:
            exact_codes(file.rows(name), entry.type)
    for read in (read_spec, lambda file: read_tokenizer(file).read()):
        with contextlib.suppress(ModelError):
            read(file)


def write_seeds(folder: Path) -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def file(keys: list[bytes], tensors: list[bytes], data: bytes) -> bytes:
        head = b"GGUF\x03\0\0\0" + struct.pack("<QQ", len(tensors), len(keys)) + b"".join(keys + tensors)
        return head + bytes(-len(head) % 32) + data

    keys = [text(b"k") + struct.pack("<II", 4, 7), text(b"t") + struct.pack("<IIQ", 9, 8, 1) + text(b"x")]
    blocks = ((0, 8, 32), (8, 32, 34), (12, 256, 144), (23, 256, 136), (16, 256, 66), (29, 256, 56), (34, 256, 54))
    for index, (kind, weights, size) in enumerate(blocks):
        tensor = text(b"a") + struct.pack("<IQIQ", 1, weights, kind, 0)
        (folder / f"seed-{index}").write_bytes(file(keys, [tensor], bytes(size)))


if __name__ == "__main__":
    seeds = Path(tempfile.mkdtemp())
    write_seeds(seeds)
    atheris.Setup([*sys.argv, str(seeds)], one_input)
    atheris.Fuzz()
