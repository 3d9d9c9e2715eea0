"""Reads the small JSON and text files of a model folder with bounds: size, strict UTF-8, no duplicate keys, no NaN.

Does not know what the keys mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn, cast

from headrace.errors import ModelError

JSON_LIMIT = 16 * 1024 * 1024  # 16 MiB


class _StrictnessError(ValueError):
    """Valid JSON that this reader rejects."""


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The json module keeps the last of two equal keys and other readers keep the first, so two programs could read
    # two different files.
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _StrictnessError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _reject_constant(text: str) -> NoReturn:
    raise _StrictnessError(f"{text} is not JSON")


def _only_infinity(text: str) -> float:
    return math.inf if text == "Infinity" else _reject_constant(text)


def parse_json_object(
    data: bytes | memoryview, *, path: Path | str | None, what: str = "file", infinity: bool = False
) -> dict[str, object]:
    """Parse one JSON object. Errors name `what`: the "file", or a part of it. `infinity` accepts `Infinity`."""
    constant = _only_infinity if infinity else _reject_constant
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"The {what} is not UTF-8: {error.reason} at byte {error.start}.", path=path) from None
    try:
        value: object = json.loads(text, object_pairs_hook=_unique_object, parse_constant=constant)
    except _StrictnessError as error:
        raise ModelError(f"The {what} is not acceptable JSON: {error}.", path=path) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"The {what} is not JSON: {error.msg} at line {error.lineno}.", path=path) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ModelError(f"The {what} is not acceptable JSON: {str(error)[:120]}.", path=path) from None
    except RecursionError:
        raise ModelError(f"The {what} is JSON that is nested too deep.", path=path) from None
    if not isinstance(value, dict):
        raise ModelError(f"The {what} must hold a JSON object, not {type(value).__name__}.", path=path)
    return cast("dict[str, object]", value)


def read_text(path: Path, *, limit: int = JSON_LIMIT) -> str:
    """Read a text file; raise ModelError if it is missing, longer than `limit` bytes or not UTF-8."""
    return decode_text(read_bounded(path, limit), path)


def decode_text(data: bytes, path: Path) -> str:
    """Decode the contents of a file; raise ModelError if they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"The file is not UTF-8: {error.reason} at byte {error.start}.", path=path) from None


def read_json(path: Path, *, limit: int = JSON_LIMIT, infinity: bool = False) -> dict[str, object]:
    """Read the object in a JSON file of at most `limit` bytes. `infinity` accepts `Infinity`, as Mamba's bounds use."""
    return parse_json_object(read_bounded(path, limit), path=path, infinity=infinity)


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a regular file; raise ModelError if it is missing or longer than `limit` bytes."""
    try:
        if not path.is_file():  # reading a FIFO or a device may never end
            raise ModelError(
                "The file does not exist." if not path.exists() else "The path is not a regular file.", path=path
            )
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"Cannot read the file: {error.strerror or error}.", path=path) from None
    if len(data) > limit:
        raise ModelError(f"The file is larger than {limit} bytes.", path=path)
    return data
