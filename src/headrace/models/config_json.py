"""A typed, bounded view of a model's config.json.

Owns Config, its getters, and the bounds that no honest model passes. Every wrong type, missing key and hostile value
becomes a ModelError that names the file, the key, what was expected and what was found. Knows nothing of what the keys
mean (families do) nor of weights.

Getters agree on one rule: a missing key gives the default, where there is one, and an error where there is none. `null`
is a value of its own, which only the `optional_` getters accept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_json

MOST_LAYERS: Final = 1024
MOST_HIDDEN: Final = 1 << 17
MOST_INTERMEDIATE: Final = 1 << 20
MOST_VOCAB: Final = 1 << 23
MOST_HEADS: Final = 1 << 12
MOST_HEAD_SIZE: Final = 1 << 12
MOST_EXPERTS: Final = 1 << 12
MOST_CONTEXT: Final = 1 << 30  # tokens
LARGEST_NUMBER: Final = 1e12  # past any rope base, scale or cap; products of three of them are still finite in f32
SMALLEST_NUMBER: Final = 1e-15  # of numbers that must be above zero, for their reciprocals

T = TypeVar("T")

_MISSING: Final = object()


class Config:
    """One JSON object of a model folder; `prefix` says where in the file it stands."""

    def __init__(self, values: Mapping[str, object], *, path: Path, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.path = path

    @classmethod
    def read(cls, path: Path) -> Config:
        return cls(read_json(path), path=path)

    def with_defaults(self, defaults: Mapping[str, object]) -> Config:
        """The same object with the defaults in place of missing keys."""
        return Config({**defaults, **self._values}, path=self.path, prefix=self._prefix)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def has(self, key: str) -> bool:
        """True when the key is there and is not null."""
        return self._values.get(key) is not None

    def wrong(self, key: str, expected: str) -> ModelError:
        """An error that quotes the value of `key`."""
        found = _shown(self._values[key]) if key in self._values else "nothing"
        return self.refused(key, f"expected {expected}, found {found}")

    def refused(self, key: str, reason: str) -> ModelError:
        return ModelError(f"config key {(self._prefix + key)[:120]!r}: {reason}", path=self.path)

    def size(self, key: str, *, most: int, least: int = 1, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def optional_size(self, key: str, *, most: int, least: int = 1, default: int | None = None) -> int | None:
        if self._values.get(key, default) is None:
            return None
        return self.size(key, most=most, least=least, default=default)

    def number(
        self, key: str, *, least: float = 0.0, most: float = LARGEST_NUMBER, default: float | None = None
    ) -> float:
        """A finite number in [least, most]."""
        return self._number(key, self._get(key, default), least, most)

    def positive(self, key: str, *, most: float = LARGEST_NUMBER, default: float | None = None) -> float:
        value = self.number(key, most=most, default=default)
        if value < SMALLEST_NUMBER:
            raise self.wrong(key, "a number above zero")
        return value

    def optional_positive(
        self, key: str, *, most: float = LARGEST_NUMBER, default: float | None = None
    ) -> float | None:
        if self._values.get(key, default) is None:
            return None
        return self.positive(key, most=most, default=default)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def choice(self, key: str, table: Mapping[str, T], *, default: str | None = None) -> T:
        """What the table holds for the string at `key`."""
        name = self.text(key, default=default)
        if name not in table:
            raise self.wrong(key, f"one of {', '.join(sorted(table))}")
        return table[name]

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        """Exactly `count` finite numbers above zero."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(cast("list[object]", value)) != count:
            raise self.wrong(key, f"a list of {count} numbers")
        numbers = tuple(self._number(key, item, 0.0, LARGEST_NUMBER) for item in cast("list[object]", value))
        if any(number < SMALLEST_NUMBER for number in numbers):
            raise self.wrong(key, f"a list of {count} numbers above zero")
        return numbers

    def optional_sizes(self, key: str, *, least: int, most: int, longest: int) -> tuple[int, ...] | None:
        """A list of at most `longest` integers, or None where it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(cast("list[object]", value)) > longest:
            raise self.wrong(key, f"a list of at most {longest} integers")
        for item in cast("list[object]", value):
            if not isinstance(item, int) or isinstance(item, bool) or not least <= item <= most:
                raise self.wrong(key, f"a list of integers from {least} to {most}")
        return tuple(cast("list[int]", value))

    def optional_names(self, key: str, allowed: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """Exactly `count` of the allowed strings, or None where the key is missing or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(cast("list[object]", value)) != count:
            raise self.wrong(key, f"a list of {count} names")
        for item in cast("list[object]", value):
            if item not in allowed:
                raise self.refused(key, f"expected {' or '.join(allowed)}, found {_shown(item)}")
        return tuple(cast("list[str]", value))

    def strings(self, key: str) -> tuple[str, ...]:
        """A short list of strings; empty where the key is missing or null."""
        value = self._values.get(key)
        items = cast("list[object]", value) if isinstance(value, list) else []
        if value is not None and (not isinstance(value, list) or len(items) > 64):
            raise self.wrong(key, "a list of at most 64 strings")
        if not all(isinstance(item, str) for item in items):
            raise self.wrong(key, "a list of strings")
        return tuple(cast("list[str]", items))

    def sub(self, key: str) -> Config:
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Config(cast("dict[str, object]", value), path=self.path, prefix=f"{self._prefix}{key}.")

    def optional_sub(self, key: str) -> Config | None:
        """The object at `key`; None where it is missing, null or empty."""
        value = self._values.get(key)
        return None if value is None or value == {} else self.sub(key)

    def subs(self, key: str, *, longest: int) -> tuple[Config, ...]:
        """The objects of the list at `key`, at most `longest` of them."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(cast("list[object]", value)) > longest:
            raise self.wrong(key, f"a list of at most {longest} objects")
        items = {f"{index}": item for index, item in enumerate(cast("list[object]", value))}
        within = Config(items, path=self.path, prefix=f"{self._prefix}{key}.")
        return tuple(within.sub(index) for index in items)

    def objects(self) -> tuple[str, ...]:
        """The keys that hold objects."""
        return tuple(key for key, value in self._values.items() if isinstance(value, dict))

    def refuse(self, key: str, reason: str, *, unless: tuple[object, ...] = (None,)) -> None:
        """Raise unless the key is missing or holds one of the harmless values."""
        value = self._values.get(key)
        if value is not None and not any(type(value) is type(good) and value == good for good in unless):
            raise self.refused(key, f"{_shown(value)} is not supported: {reason}")

    def refuse_quantised(self) -> None:
        if self.has("quantization_config"):
            raise self.refused("quantization_config", "quantised checkpoints are not supported")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key, _MISSING)
        if value is not _MISSING:
            return value
        if default is None:
            raise self.refused(key, "missing")
        return default

    def _number(self, key: str, value: object, least: float, most: float) -> float:
        # An integer is compared as it is: one too large for a float must not overflow on the way here.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        raise self.wrong(key, f"a number from {least:g} to {most:g}")


def _shown(value: object) -> str:
    """The value in few characters, whatever it is: error texts are bounded too."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"the number {value}"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}…"
    if isinstance(value, list):
        return f"a list of {len(cast('list[object]', value))}"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
