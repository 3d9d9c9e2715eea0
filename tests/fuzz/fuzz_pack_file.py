"""Fuzzes the pack-file parser: `python tests/fuzz/fuzz_pack_file.py -max_total_time=30`. Needs atheris from PyPI.

Most inputs are a footer to which the harness adds a valid checksum, because a checksum error would hide all later
checks. Only ModelError may be raised.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace"]):
    from headrace.errors import ModelError
    from headrace.models.formats.pack_file import PackFile

PATH = Path(tempfile.mkdtemp()) / "fuzz.pack"
START = b"HEADPACK" + bytes(56)


def as_file(data: bytes) -> bytes:
    """First byte below 250: blocks of data, and the rest is the footer. From 250 on: the file as it is."""
    if not data or data[0] >= 250:
        return data[1:]
    footer = data[1:]
    trailer = struct.pack("<32sQ8s", hashlib.sha256(footer).digest(), len(footer), b"HEADDONE")
    return START + bytes(64 * data[0]) + footer + trailer


def one_input(data: bytes) -> None:
    PATH.write_bytes(as_file(data))
    try:
        file = PackFile.open(PATH)
    except ModelError:
        return
    for name in file.names:
        file.entry_meta(name)
        array = file.data(name)
        if array.size and array.ctypes.data % 64:
            raise AssertionError(f"{name} is not aligned")
        array.sum()


def write_seeds(folder: Path) -> None:
    entry = b'{"name":"%s","offset":%d,"size":%d,"meta":{"format":"int4","shape":[2,5]}}'
    entries = [b"", entry % (b"a", 64, 70), entry % (b"a", 64, 64) + b"," + entry % (b"b", 128, 1)]
    for blocks, listed in enumerate(entries):
        data = b'{"version":1,"meta":{"layout":1},"entries":[' + listed + b"]}"
        (folder / f"seed-{blocks}").write_bytes(bytes([(0, 2, 2)[blocks]]) + data)
    (folder / "seed-raw").write_bytes(bytes([255]) + as_file((folder / "seed-1").read_bytes()))


if __name__ == "__main__":
    seeds = Path(tempfile.mkdtemp())
    write_seeds(seeds)
    atheris.Setup([*sys.argv, str(seeds)], one_input)
    atheris.Fuzz()
