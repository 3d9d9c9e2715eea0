"""CatalogueText: one text of a catalogue and the questions that it answers; reads and writes files of them (JSONL)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headrace.errors import HeadraceError

MOST_TEXTS: Final = 20_000  # of a catalogue
MOST_BYTES: Final = 64 * 1024**2
MOST_CHARACTERS: Final = 1000  # of a question


class CatalogueError(HeadraceError):
    """A catalogue's file that cannot be used."""


class CatalogueText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    questions: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=MOST_CHARACTERS)], ...], Meta(min_length=1)]
    text: str
    approved: bool = False
    model: str = ""  # that wrote it; empty: a person
    output_tokens: Annotated[int, Meta(ge=0)] = 0
    machine_s: Annotated[float, Meta(ge=0)] = 0.0  # prefill and decode
    ending: str = "stop"  # length: it was cut
    made_from: str = ""  # digest of the prompt and the model, so that a rebuild keeps what did not change


def read_texts(path: Path) -> list[CatalogueText]:
    """Return the texts of a file. CatalogueError names the line that is wrong."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CatalogueError(f"{path} has more than {MOST_BYTES >> 20} MiB.")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CatalogueError(f"{path} cannot be read: {error.strerror}.") from None
    texts: list[CatalogueText] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            texts.append(msgspec.json.decode(line, type=CatalogueText))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CatalogueError(f"{path}, line {number}: {error}.") from None
    if len(texts) > MOST_TEXTS:
        raise CatalogueError(f"{path} has {len(texts)} texts. Expected at most {MOST_TEXTS}.")
    return texts


def write_texts(path: Path, texts: Sequence[CatalogueText]) -> None:
    """Replace a file at once: a server that reads it sees the former or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in texts))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def version_of(texts: Sequence[CatalogueText]) -> str:
    """Return the version of the approved texts: a digest of them and their questions."""
    digest = hashlib.sha256()
    for each in sorted((each for each in texts if each.approved), key=lambda each: each.name):
        digest.update(msgspec.json.encode((each.name, each.questions, each.text)))
    return digest.hexdigest()[:12]
