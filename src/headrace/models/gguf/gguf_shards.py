"""Opens a model that is one GGUF file, or split into several, as llama.cpp's tool and the package gguf write them.

The first file has the metadata, each file its own number. Writes none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headrace.errors import ModelError
from headrace.models.config_json import shorten
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.formats.shard_names import shard_name
from headrace.models.gguf.gguf_keys import key_error

_NUMBER: Final = "split.no"
_COUNT: Final = "split.count"
_TENSORS: Final = "split.tensors.count"
_ARCHITECTURE: Final = "general.architecture"


def open_gguf(path: Path) -> GgufFile:
    """Open a file; if its model is split, with all other shards. `path` may be any of them. ModelError names the shard
    that is missing, or is not of this model."""
    file = GgufFile.open(path)
    count = _number(file, _COUNT, 1)
    if count < 2:
        return file
    name = shard_name(path.name)
    if name is None or name.files != count:
        raise key_error(
            file,
            _COUNT,
            f"The model is split into {count} files, and the others cannot be found by this name. Rename the file as "
            f"it was: its name ended in -{_number(file, _NUMBER, 0) + 1:05d}-of-{count:05d}.gguf.",
        )
    places = [path.with_name(each) for each in name.all()]
    for place in places:
        if not place.exists():
            raise ModelError(
                f"The file is missing: the model is split into {count} files, of which {path.name} is one. Put all of "
                "them in one folder.",
                path=place,
            )
    shards = [file if place == path else GgufFile.open(place) for place in places]
    first = shards[0]
    for number, shard in enumerate(shards):
        _check(shard, number, first)
    joined = GgufFile.joined(shards)
    if len(joined.tensors) != (total := _number(first, _TENSORS, -1)):
        raise key_error(first, _TENSORS, f"Found {total}, but its {count} files have {len(joined.tensors)} tensors.")
    return joined


def _check(shard: GgufFile, number: int, first: GgufFile) -> None:
    """Raise ModelError for a file that does not have a place in the model of `first`."""
    count, total = _number(first, _COUNT, 1), _number(first, _TENSORS, -1)
    again = "Download the file again."
    found = _number(shard, _COUNT, 1)
    if found != count:
        raise key_error(shard, _COUNT, f"Found {found}. {first.path.name} has {count}. {again}")
    found = _number(shard, _NUMBER, -1)
    if found != number:
        raise key_error(
            shard,
            _NUMBER,
            f"Found {found}. Expected {number} by the file's name: it is another shard under this name. {again}",
        )
    found = _number(shard, _TENSORS, -1)
    if found != total:
        raise key_error(
            shard, _TENSORS, f"Found {found}. {first.path.name} has {total}: the files are of two models. {again}"
        )
    own = shard.metadata.get(_ARCHITECTURE)
    if own is not None and own != first.metadata.get(_ARCHITECTURE):
        raise key_error(shard, _ARCHITECTURE, f"Found {shorten(own)}: {first.path.name} is of another model. {again}")


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 1 << 31:
        raise key_error(file, key, f"Expected an integer, found {shorten(value)}.")
    return value
