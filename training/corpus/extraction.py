"""Task "extraction": turn a message into a JSON record by the schema in the prompt.

The schema is a short list of keys with types, or a JSON schema; its keys, their names and order change between prompts.
Fields that the message does not mention are null. The sentences and fields are in words/messages.toml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random

import msgspec

from training.corpus import values
from training.corpus.conversation import JSON, Conversation, Question, Turn
from training.corpus.instances import DETAIL, Instance, held_out_questions, training_conversations
from training.corpus.wording import slots
from training.corpus.words import lists, read

TASK = "extraction"


class Field(msgspec.Struct, frozen=True):
    type: str  # of JSON schema: "string", "integer", "number", "boolean" or "array" (of strings)
    names: tuple[str, ...]
    draw: tuple[str | int, ...] = ()  # empty: a sentence settles it


class Sentence(msgspec.Struct, frozen=True):
    text: str
    settles: tuple[tuple[str, bool], ...] = ()  # fields that it decides without a slot


class Group(msgspec.Struct, frozen=True):
    must: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    field: str = ""
    yes: tuple[str, ...] = ()
    no: tuple[str, ...] = ()

    @property
    def optional(self) -> bool:
        return not self.must

    @property
    def sentences(self) -> list[Sentence]:
        settled = [Sentence(text, ((self.field, text in self.yes),)) for text in (*self.yes, *self.no)]
        return [Sentence(text) for text in (*self.must, *self.may)] + settled


class Kind(msgspec.Struct, frozen=True):
    name: str
    groups: tuple[Group, ...]


class MessagesFile(msgspec.Struct):
    fields: dict[str, Field]
    phrases: dict[str, tuple[str, ...]]
    kinds: tuple[Kind, ...]


FILE = read("messages", MessagesFile)
FIELDS, KINDS, PHRASES = FILE.fields, FILE.kinds, FILE.phrases


@dataclass(frozen=True)
class Message:
    text: str
    record: dict[str, JSON]  # by the fields' own names, only what the message says
    key: str


@cache
def fields_of(kind: Kind) -> tuple[str, ...]:
    """The fields of a kind in the order of their first mention."""
    found: dict[str, None] = {}
    for group in kind.groups:
        for sentence in group.sentences:
            found.update(dict.fromkeys(slots(sentence.text)))
            found.update((name, None) for name, _ in sentence.settles)
    return tuple(found)


def consistent(random: Random, said: set[str]) -> dict[str, str]:
    """Values that must suit each other: an end after its start, an address its owner's, a flight elsewhere."""
    for earlier, later in (("start_date", "end_date"), ("date", "due_date")):
        if {earlier, later} <= said:
            month = random.choice(values.MONTHS)
            return {earlier: f"{random.randint(1, 14)} {month}", later: f"{random.randint(15, 28)} {month}"}
    for owner in ("name", "guest"):
        if {owner, "email"} <= said:
            name = values.person(random)
            return {owner: name, "email": values.email_of(random, name)}
    if {"start_time", "end_time"} <= said:
        return dict(zip(("start_time", "end_time"), values.clock_pair(random), strict=True))
    if {"from_city", "to_city"} <= said:
        return dict(zip(("from_city", "to_city"), random.sample(lists()["cities"], 2), strict=True))
    return {}


def message(random: Random, kind: Kind) -> Message:
    chosen: list[Sentence] = []
    said: set[str] = set()
    for group in kind.groups:
        # a field is said once: a second, other value would have no right answer
        fitting = [sentence for sentence in group.sentences if not said.intersection(slots(sentence.text))]
        if not fitting or (group.optional and random.random() < 0.3):
            continue
        sentence = random.choice(fitting)
        chosen.append(sentence)
        said.update(slots(sentence.text))
    record: dict[str, JSON] = {}
    texts: dict[str, str] = {}
    for name in sorted(said):
        texts[name], record[name] = values.draw_of(FIELDS[name].draw)(random)
    for name, text in consistent(random, said).items():
        texts[name] = record[name] = text
    for sentence in chosen:
        record.update(sentence.settles)
    written = [sentence.text.format_map(texts) for sentence in chosen]
    written = [text[0].upper() + text[1:] for text in written]
    if random.random() < 0.25:
        if len(written) == 1 or random.random() < 0.5:
            written.insert(0, random.choice(PHRASES["first_asides"]))
        else:
            written.insert(random.randint(1, len(written) - 1), random.choice(PHRASES["later_asides"]))
    text = " ".join(written)
    if random.random() < 0.4:
        text = f"{random.choice(PHRASES['openings'])}\n{text}"
    return Message(text, record, f"{kind.name}: {' '.join(sentence.text for sentence in chosen)}{DETAIL}{text}")


def schema(random: Random, kind: Kind, said: dict[str, JSON]) -> dict[str, str]:
    """The fields to extract and the names that this schema gives them: up to two are not in the message."""
    absent = [name for name in fields_of(kind) if name not in said]
    present = list(said)
    asked = random.sample(present, min(len(present), random.randint(2, 5)))
    asked += random.sample(absent, min(len(absent), random.choice((0, 0, 1, 1, 2))))
    if random.random() < 0.6:
        random.shuffle(asked)
    else:
        asked.sort(key=fields_of(kind).index)
    names: dict[str, str] = {}
    for name in asked:
        others = {called for other in fields_of(kind) if other != name for called in (other, *FIELDS[other].names)}
        known = [called for called in FIELDS[name].names if called not in others] or [name]
        names[name] = known[0] if random.random() < 0.6 else random.choice(known)
    return names


def written_schema(random: Random, names: dict[str, str]) -> str:
    types = {called: FIELDS[name].type for name, called in names.items()}
    form = random.randrange(4)
    if form == 0:
        return "Keys: " + ", ".join(f"{called} ({kind})" for called, kind in types.items())
    if form == 1:
        return "Keys:\n" + "\n".join(f"- {called}: {kind}" for called, kind in types.items())
    if form == 2:
        return "Schema: " + json.dumps(types)
    properties = {
        called: {"type": kind, "items": {"type": "string"}} if kind == "array" else {"type": kind}
        for called, kind in types.items()
    }
    return "JSON schema: " + json.dumps({"type": "object", "properties": properties})


def answer(record: dict[str, JSON], names: dict[str, str]) -> str:
    return json.dumps({called: record.get(name) for name, called in names.items()}, ensure_ascii=False)


def instance(random: Random, more: Sequence[int] = ()) -> Instance:
    """`more`: how many messages come beyond the one or two that are evaluated, one of these."""
    kind = random.choice(KINDS)
    first = message(random, kind)
    names = schema(random, kind, first.record)
    prompt = f"{random.choice(PHRASES['instructions'])}\n{written_schema(random, names)}"
    in_system = random.random() < 0.5
    if in_system:
        turns = [Turn("system", prompt), Turn("user", first.text)]
    else:
        heading = random.choice(("Message:\n", "Message: ", ""))
        turns = [Turn("user", f"{prompt}\n\n{heading}{first.text}")]
    turns.append(Turn("assistant", answer(first.record, names)))
    keys = [first.key]
    further = (random.random() < 0.25) + (random.choice(more) if more else 0)
    for _ in range(further):  # of the same kind, under the same schema
        second = message(random, kind)
        heading = "" if in_system else random.choice(("Next message:\n", "Message:\n", "And this one: "))
        turns += [Turn("user", heading + second.text), Turn("assistant", answer(second.record, names))]
        keys.append(second.key)
    return Instance(tuple(turns), tuple(keys), ("json",) * len(keys))


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    return training_conversations(TASK, partial(instance, more=(1, 1, 2, 3)), random, count)


def questions() -> list[Question]:
    return held_out_questions(TASK, instance, 3, 480)
