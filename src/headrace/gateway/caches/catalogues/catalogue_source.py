"""CatalogueSource: what an author writes (TOML): questions, prompts, slots and fixed texts. Expands it into texts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headrace.gateway.caches.catalogues.catalogue_file import MOST_TEXTS, CatalogueError, CatalogueText
from headrace.gateway.caches.catalogues.question_table import SLOT, fill_slots, slot_problem

_Text = Annotated[str, Meta(min_length=1)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
_Slot = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
_DIGITS: Final = 16


class SourceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    questions: Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=64)]
    prompt: _Text | None = None  # that the model answers; exactly one of it and `text`
    text: _Text | None = None  # written by a person
    slots: dict[_Slot, tuple[_Text, ...]] = {}  # values; a slot without a list takes any value


class CatalogueSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    texts: Annotated[tuple[SourceEntry, ...], Meta(min_length=1)]
    model: str = ""  # empty: the server's default
    system: str = ""
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 256


class PlannedText(msgspec.Struct, frozen=True):
    text: CatalogueText  # as it stands in the file, without what the model will write
    prompt: str  # for the model; empty: the text is there already


def read_source(path: Path) -> CatalogueSource:
    """CatalogueError says what is wrong and where."""
    try:
        source = msgspec.toml.decode(path.read_bytes(), type=CatalogueSource)
    except OSError as error:
        raise CatalogueError(f"{path} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise CatalogueError(f"{path}: {error}.") from None
    names = [entry.name for entry in source.texts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CatalogueError(f"{path}: the name '{twice[0]}' is used twice.")
    return source


def plan_texts(source: CatalogueSource) -> list[PlannedText]:
    """Return one text for each entry and each combination of its slots' values."""
    planned: list[PlannedText] = []
    for entry in source.texts:
        if (entry.prompt is None) == (entry.text is None):
            raise CatalogueError(f"'{entry.name}' needs exactly one of prompt and text.")
        for values in itertools.product(*entry.slots.values()):
            planned.append(_planned(source, entry, dict(zip(entry.slots, values, strict=True))))
            if len(planned) > MOST_TEXTS:
                raise CatalogueError(f"'{entry.name}' makes more than {MOST_TEXTS} texts. List fewer values.")
    return planned


def _planned(source: CatalogueSource, entry: SourceEntry, values: Mapping[str, str]) -> PlannedText:
    name = entry.name
    if values:
        name += f"[{', '.join(f'{slot}={value}' for slot, value in values.items())}]"
    prompt, text = fill_slots(entry.prompt or "", values), fill_slots(entry.text or "", values)
    questions = tuple(fill_slots(question, values) for question in entry.questions)
    if prompt and (left := SLOT.findall(prompt + " ".join(questions))):
        raise CatalogueError(
            f"'{entry.name}' leaves the slot {{{left[0]}}} open, which needs a fixed text. List its values in slots, "
            "or write `text` in place of `prompt`."
        )
    made_from = _digest(source.model, source.system, str(source.max_tokens), prompt) if prompt else _digest(text)
    planned = CatalogueText(name=name, questions=questions, text=text, made_from=made_from)
    if problem := slot_problem(planned):
        raise CatalogueError(f"'{entry.name}': {problem}.")
    return PlannedText(planned, prompt)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGITS]


def kept_texts(planned: list[PlannedText], former: list[CatalogueText]) -> dict[str, CatalogueText]:
    """Return the former texts that are still right, by name, with their approval. Their questions may be new ones."""
    known = {text.name: text for text in former}
    kept: dict[str, CatalogueText] = {}
    for each in planned:
        before = known.get(each.text.name)
        if before is None or before.made_from != each.text.made_from:
            continue
        is_same = set(each.text.questions) <= set(before.questions)
        kept[before.name] = msgspec.structs.replace(
            before, questions=each.text.questions, approved=before.approved and is_same
        )
    return kept
