"""Reads a model's config.json with types and bounds.

A wrong type, a missing key or a value outside its bounds raises a ModelError that names the file, the key, the expected
value and the value found. Does not know what the keys mean: families do.

A getter returns its default for a missing key, and raises if it has none. Only the `optional_` getters accept `null`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_json

MAX_LAYERS: Final = 1024
MAX_HIDDEN: Final = 1 << 17
MAX_INTERMEDIATE: Final = 1 << 20
MAX_VOCAB: Final = 1 << 23
MAX_HEADS: Final = 1 << 12
MAX_HEAD_SIZE: Final = 1 << 12
MAX_EXPERTS: Final = 1 << 12
MAX_CONTEXT: Final = 1 << 30  # tokens
MAX_NUMBER: Final = 1e12  # larger than any rope base, scale or cap; a product of three is still finite in f32
MIN_NUMBER: Final = 1e-15  # for numbers that must be above zero, so that reciprocals stay finite

T = TypeVar("T")

_MISSING: Final = object()


class ConfigJson:
    """One JSON object of a model folder. `prefix` is its place in the file, such as `rope_scaling.`."""

    def __init__(
        self,
        values: Mapping[str, object],
        *,
        path: Path,
        prefix: str = "",
        read: set[str] | None = None,
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        """`read` collects the full names of the keys that were looked up. `spelled` has the names that messages use for
        full names, if the values come from a file that has others."""
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set() if read is None else read
        self._spelled: Mapping[str, str] = {} if spelled is None else spelled
        self.path = path

    @classmethod
    def read(cls, path: Path) -> ConfigJson:
        return cls(read_json(path, infinity=True), path=path)

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigJson:
        """Return a copy in which missing keys have these defaults."""
        return self._with({**defaults, **self._values}, self._prefix)

    def with_value(self, key: str, value: object) -> ConfigJson:
        """Return a copy with another value."""
        return self._with({**self._values, key: value}, self._prefix)

    def renamed(self, names: Mapping[str, str]) -> ConfigJson:
        """Return a copy that has the values of a family's own keys (the first of each pair) under the usual ones too,
        where it lacks those. Messages name the own keys."""
        values, spelled = dict(self._values), dict(self._spelled)
        for own, usual in names.items():
            if self.has(own) and usual not in values:
                values[usual] = values[own]
                spelled[self._prefix + usual] = self._prefix + own
        return ConfigJson(values, path=self.path, prefix=self._prefix, read=self._read, spelled=spelled)

    def unread(self) -> list[tuple[str, str, object]]:
        """Return the prefix, name and value of the keys that nothing has looked up; also of objects that were read."""
        found: list[tuple[str, str, object]] = []
        for key, value in self._values.items():
            name = self._prefix + key
            if name not in self._read:
                found.append((self._prefix, key, value))
            elif isinstance(value, dict) and f"{name}." in self._read:
                found += self.sub(key).unread()
        return found

    def values(self) -> dict[str, object]:
        """Return a copy of the keys and values."""
        return dict(self._values)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self._value(key) is not None

    def mismatch(self, key: str, expected: str) -> ModelError:
        """Build an error that says what was expected and quotes the value found."""
        found = shorten(self._values[key]) if key in self._values else "nothing"
        return self.error(key, f"Expected {expected}, found {found}.")

    def error(self, key: str, reason: str) -> ModelError:
        name = self._prefix + key
        return ModelError(f"Key {self._spelled.get(name, name)[:120]!r}: {reason}", path=self.path)

    def size(self, key: str, *, maximum: int, minimum: int = 1, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.mismatch(key, f"an integer from {minimum} to {maximum}")
        return value

    def optional_size(self, key: str, *, maximum: int, minimum: int = 1, default: int | None = None) -> int | None:
        if self._value(key, default) is None:
            return None
        return self.size(key, maximum=maximum, minimum=minimum, default=default)

    def number(
        self, key: str, *, minimum: float = 0.0, maximum: float = MAX_NUMBER, default: float | None = None
    ) -> float:
        """Return a finite number in [minimum, maximum]."""
        return self._number(key, self._get(key, default), minimum, maximum)

    def positive(self, key: str, *, maximum: float = MAX_NUMBER, default: float | None = None) -> float:
        value = self.number(key, maximum=maximum, default=default)
        if value < MIN_NUMBER:
            raise self.mismatch(key, "a number above zero")
        return value

    def optional_positive(self, key: str, *, maximum: float = MAX_NUMBER, default: float | None = None) -> float | None:
        if self._value(key, default) is None:
            return None
        return self.positive(key, maximum=maximum, default=default)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.mismatch(key, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.mismatch(key, "a string")
        return value

    def choice(self, key: str, table: Mapping[str, T], *, default: str | None = None) -> T:
        """Look up the string at `key` in the table."""
        name = self.text(key, default=default)
        if name not in table:
            raise self.mismatch(key, f"one of {', '.join(sorted(table))}")
        return table[name]

    def bounds(self, key: str) -> tuple[float, float] | None:
        """Return a pair of numbers of at least 0 in order, of which the second may be infinite; None if missing or
        null."""
        value = self._value(key)
        if value is None:
            return None
        pair = [_number_of(item) for item in cast("list[object]", value)] if isinstance(value, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None or not 0.0 <= pair[0] <= pair[1]:
            raise self.mismatch(key, "two numbers of at least 0 in order, such as [0.0, Infinity]")
        return self._number(key, pair[0], 0.0, MAX_NUMBER), pair[1]

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        """Return exactly `count` finite numbers above zero."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(cast("list[object]", value)) != count:
            raise self.mismatch(key, f"a list of {count} numbers")
        numbers = tuple(self._number(key, item, 0.0, MAX_NUMBER) for item in cast("list[object]", value))
        if any(number < MIN_NUMBER for number in numbers):
            raise self.mismatch(key, f"a list of {count} numbers above zero")
        return numbers

    def numbers(self, key: str, count: int, *, maximum: float) -> tuple[float, ...]:
        """Return exactly `count` numbers from 0 to `maximum`."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(cast("list[object]", value)) != count:
            raise self.mismatch(key, f"a list of {count} numbers")
        return tuple(self._number(key, item, 0.0, maximum) for item in cast("list[object]", value))

    def optional_sizes(self, key: str, *, minimum: int, maximum: int, max_items: int) -> tuple[int, ...] | None:
        """Return a list of at most `max_items` integers, or None if the key is missing or null."""
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(cast("list[object]", value)) > max_items:
            raise self.mismatch(key, f"a list of at most {max_items} integers")
        for item in cast("list[object]", value):
            if not isinstance(item, int) or isinstance(item, bool) or not minimum <= item <= maximum:
                raise self.mismatch(key, f"a list of integers from {minimum} to {maximum}")
        return tuple(cast("list[int]", value))

    def optional_names(self, key: str, allowed: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """Return exactly `count` of the allowed strings, or None if the key is missing or null."""
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(cast("list[object]", value)) != count:
            raise self.mismatch(key, f"a list of {count} names")
        for item in cast("list[object]", value):
            if item not in allowed:
                raise self.error(key, f"Expected {' or '.join(allowed)}, found {shorten(item)}.")
        return tuple(cast("list[str]", value))

    def names_of(self, key: str, allowed: tuple[str, ...], *, most: int) -> tuple[str, ...]:
        """Return a list of 1 to `most` of the allowed strings."""
        value = self._get(key, None)
        items = cast("list[object]", value) if isinstance(value, list) else []
        if not 1 <= len(items) <= most or any(item not in allowed for item in items):
            raise self.mismatch(key, f"a list of at most {most} of {', '.join(allowed)}")
        return tuple(cast("list[str]", items))

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of at most 64 strings, empty if the key is missing or null."""
        value = self._value(key)
        items = cast("list[object]", value) if isinstance(value, list) else []
        if value is not None and (not isinstance(value, list) or len(items) > 64):
            raise self.mismatch(key, "a list of at most 64 strings")
        if not all(isinstance(item, str) for item in items):
            raise self.mismatch(key, "a list of strings")
        return tuple(cast("list[str]", items))

    def sub(self, key: str) -> ConfigJson:
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.mismatch(key, "an object")
        prefix = f"{self._prefix}{key}."
        self._read.add(prefix)
        return self._with(cast("dict[str, object]", value), prefix)

    def optional_sub(self, key: str) -> ConfigJson | None:
        """Return the object at `key`, or None if it is missing, null or empty."""
        value = self._value(key)
        return None if value is None or value == {} else self.sub(key)

    def subs(self, key: str, *, max_items: int) -> tuple[ConfigJson, ...]:
        """Return the objects in the list at `key`, at most `max_items`."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(cast("list[object]", value)) > max_items:
            raise self.mismatch(key, f"a list of at most {max_items} objects")
        items = {f"{index}": item for index, item in enumerate(cast("list[object]", value))}
        within = ConfigJson(items, path=self.path, prefix=f"{self._prefix}{key}.")
        return tuple(within.sub(index) for index in items)

    def names(self) -> tuple[str, ...]:
        """Return all keys."""
        return tuple(self._values)

    def objects(self) -> tuple[str, ...]:
        """Return the keys that hold objects."""
        return tuple(key for key, value in self._values.items() if isinstance(value, dict))

    def refuse(self, key: str, reason: str, *, unless: tuple[object, ...] = (None,)) -> None:
        """Raise unless the key is missing, null or one of the values in `unless`."""
        value = self._value(key)
        if value is not None and not any(type(value) is type(good) and value == good for good in unless):
            raise self.error(key, f"{shorten(value)} is not supported: {reason}.")

    def quantisation(self) -> ConfigJson | None:
        """Return `quantization_config`, or None if the model is not quantised. What nothing looks up in it is about how
        the codes were found, and `unread` leaves it out."""
        key = "quantization_config"
        if not self.has(key):
            return None
        section = self.sub(key)
        self._read.discard(f"{self._prefix}{key}.")
        return section

    def _with(self, values: Mapping[str, object], prefix: str) -> ConfigJson:
        return ConfigJson(values, path=self.path, prefix=prefix, read=self._read, spelled=self._spelled)

    def _value(self, key: str, default: object = None) -> object:
        self._read.add(self._prefix + key)
        return self._values.get(key, default)

    def _get(self, key: str, default: object) -> object:
        value = self._value(key, _MISSING)
        if value is not _MISSING:
            return value
        if default is None:
            raise self.error(key, "The key is missing.")
        return default

    def _number(self, key: str, value: object, minimum: float, maximum: float) -> float:
        # Compare integers as they are: one that is too large for a float would overflow.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum:
            return float(value)
        raise self.mismatch(key, f"a number from {minimum:g} to {maximum:g}")


def _number_of(value: object) -> float | None:
    """Return a number, which may be infinite: as such, or as an object that transformers writes for it."""
    if isinstance(value, dict):
        return math.inf if value == {"__float__": "Infinity"} else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if value <= MAX_NUMBER or value == math.inf else None


def shorten(value: object) -> str:
    """Describe a value of any size in a few characters."""
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
