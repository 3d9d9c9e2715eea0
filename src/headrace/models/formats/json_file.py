"""JSON files of a model folder, read with bounds.

Owns the reading of small JSON files that come with a model (config.json and its neighbours): bounded size, strict
UTF-8, one object at the top, no duplicate keys, no NaN. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn, cast

from headrace.errors import ModelError

JSON_LIMIT = 16 * 1024 * 1024  # 16 MiB


class _RefusedError(ValueError):
    """A JSON text that the grammar allows and we do not."""


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The json module keeps the last of two equal keys; other readers keep the first, and so two programs could be
    # shown two different files.
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not JSON")


def parse_json_object(data: bytes | memoryview, *, path: Path | str | None, what: str = "file") -> dict[str, object]:
    """`data` as one JSON object; ModelError names `what` (the "file", or a part of it)."""
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8: {error.reason} at byte {error.start}", path=path) from None
    try:
        value: object = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except _RefusedError as error:
        raise ModelError(f"{what} is not acceptable JSON: {error}", path=path) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{what} is not JSON: {error.msg} at line {error.lineno}", path=path) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ModelError(f"{what} is not acceptable JSON: {str(error)[:120]}", path=path) from None
    except RecursionError:
        raise ModelError(f"{what} is JSON nested too deep", path=path) from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} must hold a JSON object, not {type(value).__name__}", path=path)
    return cast("dict[str, object]", value)


def read_text(path: Path, *, limit: int = JSON_LIMIT) -> str:
    """The text of a small file; ModelError where it is missing, longer than `limit` bytes or not UTF-8."""
    return decode_text(read_bounded(path, limit), path)


def decode_text(data: bytes, path: Path) -> str:
    """What was read of a file, as text; ModelError where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"file is not UTF-8: {error.reason} at byte {error.start}", path=path) from None


def read_json(path: Path, *, limit: int = JSON_LIMIT) -> dict[str, object]:
    """The object that a JSON file of at most `limit` bytes holds; ModelError for anything else."""
    return parse_json_object(read_bounded(path, limit), path=path)


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file; ModelError where it is missing or longer than `limit`."""
    try:
        if not path.is_file():  # a FIFO or a device would block or never end
            raise ModelError("no such file" if not path.exists() else "not a regular file", path=path)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", path=path) from None
    if len(data) > limit:
        raise ModelError(f"file is larger than {limit} bytes", path=path)
    return data
