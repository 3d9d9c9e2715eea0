"""Reads the keys of a GGUF file that belong to its architecture, and gives them the names that config.json has.

A key that nothing reads is rejected by name, because it may change what the model computes. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import numpy as np

from headrace.errors import ModelError
from headrace.models.config_json import MAX_LAYERS, ConfigJson, shorten
from headrace.models.formats.gguf_file import GgufFile, GgufValue

# Read by other means, or without an effect on the numbers.
_OTHERS: Final = frozenset(
    """
    vocab_size feed_forward_length tensor_data_layout rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor
    """.split()
)


class GgufKeys:
    """The keys of an architecture in a file, without its name, and what has been made of them so far."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file = file
        self.name = name
        start = f"{name}."
        self._own = {
            key.removeprefix(start): plain(value) for key, value in file.metadata.items() if key.startswith(start)
        }
        self._read: set[str] = set()
        self.values: dict[str, object] = {}  # by their names in config.json
        self.rope: dict[str, object] = {}  # of a stretched rope, beside what its own keys say
        self._spelled: dict[str, str] = {}

    def get(self, key: str, default: object = None) -> object:
        """Return the value of a key. An array that has the same value for all layers is that value."""
        self._read.add(key)
        return _single(self._own[key]) if key in self._own else default

    def items(self, key: str) -> list[object]:
        """Return the items of an array; of a number, that number; nothing if the file lacks the key."""
        self._read.add(key)
        value = self._own.get(key)
        return [] if value is None else cast("list[object]", value) if isinstance(value, list) else [value]

    def layers(self, key: str) -> list[object] | None:
        """Return the value of a key for each layer; None if the file lacks the key."""
        self._read.add(key)
        if key not in self._own:
            return None
        count = self.block_count()
        value = self._own[key]
        if not isinstance(value, list):
            return [value] * count
        items = cast("list[object]", value)
        if len(items) < count:
            raise self.error(key, f"Expected a value for each of {count} layers, found {len(items)}.")
        return items[:count]

    def block_count(self) -> int:
        """Return the number of layers, without those that predict further tokens."""
        count = self.get("block_count")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LAYERS:
            raise self.error("block_count", f"Expected an integer from 1 to {MAX_LAYERS}, found {shorten(count)}.")
        further = self.get("nextn_predict_layers", 0)
        if not isinstance(further, int) or isinstance(further, bool) or not 0 <= further < count:
            raise self.error("nextn_predict_layers", f"Expected less than {count}, found {shorten(further)}.")
        return count - further

    def integer(self, key: str, *, default: int | None = None) -> int:
        """Return a whole number above zero that other sizes are computed from."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise self.error(key, f"Expected an integer above zero, found {shorten(value)}.")
        return value

    def put(self, ours: str, value: object, key: str) -> None:
        """Set a value of config.json, which messages name by its key in the file."""
        self.values[ours] = value
        self._spelled[ours] = f"{self.name}.{key}"

    def take(self, ours: str, key: str) -> None:
        """Set a value of config.json to that of a key, if the file has it."""
        if key in self._own:
            self.put(ours, self.get(key), key)
        self._spelled.setdefault(ours, f"{self.name}.{key}")

    def spell(self, ours: str, name: str) -> None:
        """Set the name that messages have for a value of config.json."""
        self._spelled[ours] = name

    def spelled(self) -> dict[str, str]:
        """Return the names that messages have for values of config.json."""
        return dict(self._spelled)

    def require(self, *keys: str) -> None:
        for key in keys:
            if key not in self._own:
                raise self.error(key, "The key is missing.")

    def refuse(self, key: str, reason: str, *, unless: tuple[object, ...]) -> None:
        """Raise ModelError for a key that is there with another value than one of these."""
        value = self.get(key)
        if value is not None and value not in unless:
            raise self.error(key, f"{reason}. Found {shorten(value)}.")

    def refuse_unread(self) -> None:
        """Raise ModelError for a key that nothing has read."""
        for key, value in self._own.items():
            if value and key not in self._read and key not in _OTHERS and not key.startswith(("vision.", "mm.")):
                raise self.error(
                    key,
                    "Headrace does not know this key, and it may change what the model computes. "
                    f"Found {shorten(value)}.",
                )

    def error(self, key: str, reason: str) -> ModelError:
        return key_error(self.file, f"{self.name}.{key}", reason)

    def config(self) -> ConfigJson:
        return ConfigJson(self.values, path=self.file.path, spelled=self._spelled)


def plain(value: GgufValue | None) -> object:
    """Return arrays as lists, which compare with anything."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def key_error(file: GgufFile, key: str, reason: str) -> ModelError:
    return ModelError(f"Key {key[:120]!r}: {reason}", path=file.path)


def renamed(keys: GgufKeys, table: Mapping[str, str]) -> None:
    """Set all values of config.json that a table names."""
    for ours, key in table.items():
        keys.take(ours, key)


def _single(value: object) -> object:
    if not isinstance(value, list):
        return value
    items = cast("list[object]", value)
    return items[0] if items and all(item == items[0] for item in items) else items
