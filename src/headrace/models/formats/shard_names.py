"""Finds the files of a GGUF model by name: one file, or several that it is split into (NAME-00001-of-00003.gguf).

Opens none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from headrace.errors import ModelError

_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_IMAGE_PART: Final = "mmproj"


class ShardName(NamedTuple):
    """What the name of a file says: NAME-00002-of-00003.gguf."""

    stem: str
    number: int  # from 1
    files: int  # of the model

    def of(self, number: int) -> str:
        """Return the name of the shard with a number."""
        return f"{self.stem}-{number:05d}-of-{self.files:05d}.gguf"

    def all(self) -> tuple[str, ...]:
        return tuple(self.of(number) for number in range(1, self.files + 1))


def shard_name(name: str) -> ShardName | None:
    """Return what a file's name, or its path, says of a split model; None if it is not the name of a shard."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    number, count = int(found["number"]), int(found["count"])
    return ShardName(found["stem"], number, count) if 1 <= number <= count and count > 1 else None


def first_name(name: str) -> str:
    """Return the name of the first shard of a split model; of another file, its own."""
    found = shard_name(name)
    return name if found is None else found.of(1)


def all_names(name: str) -> tuple[str, ...]:
    """Return the names of all shards of a split model; of another file, its own."""
    found = shard_name(name)
    return (name,) if found is None else found.all()


def is_later_shard(name: str) -> bool:
    """Return whether a file is a shard of a split model, and not the first one."""
    return first_name(name) != name


def model_file(folder: Path) -> Path | None:
    """Return the GGUF file of the only model in a folder, or the first of its shards; None if there is no such file.

    Image parts (mmproj) do not count. ModelError if there are several models.
    """
    files = [path for path in sorted(folder.glob("*.gguf")) if _IMAGE_PART not in path.name.lower()]
    found = {first_name(path.name): path for path in reversed(files)}
    if len(found) > 1:
        shown = ", ".join(sorted(found)[:8])
        raise ModelError(
            f"The folder has no config.json, but several GGUF models. Pass one of them: {shown}.", path=folder
        )
    return next(iter(found.values()), None)


def existing_files(path: Path) -> Iterator[Path]:
    """Yield the files of a model that is one file or split into several, as far as they are there."""
    return (place for place in map(path.with_name, all_names(path.name)) if place.exists())
