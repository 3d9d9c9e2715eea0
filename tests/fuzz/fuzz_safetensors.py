"""Fuzzes the safetensors parser: `python tests/fuzz/fuzz_safetensors.py -max_total_time=30`. Needs atheris from PyPI.

The input is a whole file. Half of the inputs start with the correct header length, so that the fuzzer reaches the code
behind it. Only ModelError may be raised, and no range may leave the file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace"]):
    from headrace.errors import ModelError
    from headrace.models.formats.safetensors_file import SafetensorsFile

PATH = Path(tempfile.mkdtemp()) / "fuzz.safetensors"


def as_file(data: bytes) -> bytes:
    """An even first byte: header, then as many zeros as the second byte says. An odd one: the file as it is."""
    if len(data) < 2 or data[0] % 2:
        return data[1:]
    return len(data[2:]).to_bytes(8, "little") + data[2:] + bytes(data[1])


def one_input(data: bytes) -> None:
    content = as_file(data)
    PATH.write_bytes(content)
    try:
        file = SafetensorsFile.open(PATH)
    except ModelError:
        return
    for name, entry in file.tensors.items():
        if not 8 <= entry.start <= entry.stop <= len(content):
            raise AssertionError(f"{name}: {entry}")
        try:
            file.dense(name).data.sum()
        except ModelError:
            continue


def write_seeds(folder: Path) -> None:
    headers = [
        b"{}",
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"b":{"dtype":"I64","shape":[1],"data_offsets":[2,10]}}',
    ]
    for index, (header, zeros) in enumerate(zip(headers, (0, 16, 10), strict=True)):
        (folder / f"seed-{index}").write_bytes(bytes([0, zeros]) + header)


if __name__ == "__main__":
    seeds = Path(tempfile.mkdtemp())
    write_seeds(seeds)
    atheris.Setup([*sys.argv, str(seeds)], one_input)
    atheris.Fuzz()
