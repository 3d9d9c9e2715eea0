"""Task "triage": give a support message a label and a priority by the rules in the prompt.

The offered labels, their names and order, the names of the priorities and the wording of the rules change between
prompts. If no offered label fits, the label is `other`. The sentences are in words/complaints.toml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

import msgspec

from training.corpus import values
from training.corpus.conversation import Conversation, Question, Turn
from training.corpus.instances import DETAIL, Instance, held_out_questions, training_conversations
from training.corpus.words import read

TASK = "triage"
OTHER = "other"

SCALES = (
    ("urgent", "high", "normal", "low"),
    ("urgent", "high", "normal", "low"),
    ("P1", "P2", "P3", "P4"),
    ("critical", "high", "medium", "low"),
)
PLACES = ("urgent", "high", "normal")


class Category(msgspec.Struct, frozen=True):
    labels: tuple[str, ...]  # names of this category; a prompt uses one of them
    subjects: tuple[str, ...]
    troubles: tuple[str, ...]  # each follows any of the subjects
    reach: str = "any"
    asks: bool = False


class ComplaintsFile(msgspec.Struct):
    phrases: dict[str, tuple[str, ...]]
    updates: dict[str, tuple[str, ...]]
    reach: dict[str, dict[str, tuple[str, ...]]]
    categories: tuple[Category, ...]


FILE = read("complaints", ComplaintsFile)
CATEGORIES, PHRASES = FILE.categories, FILE.phrases


def filled(random: Random, sentence: str) -> str:
    """The sentence with its slots filled."""
    if "{" not in sentence:
        return sentence
    return sentence.format_map(
        {
            "month": random.choice(values.MONTHS),
            "weekday": values.weekday(random),
            "clock": values.clock(random),
            "price": random.randint(5, 300),
            "number": random.randint(3, 59),
            "service": values.one(random, "services"),
            "status": random.choice((500, 502, 503, 504)),
            "colour": values.one(random, "colours"),
            "version": values.version(random),
            "order": values.code(random, random.choice(("A-", "B-", "C-", "K-"))),
            "goods": values.one(random, "goods"),
            "thing": values.one(random, "things"),
            "city": values.city(random),
            "floor": random.randint(1, 9),
            "room": random.randint(101, 420),
            "first": values.one(random, "first_names"),
            "person": values.person(random),
            "team": values.one(random, "teams"),
            "phone": values.phone(random),
        }
    )


def reaching(category: Category, level: str) -> tuple[str, ...]:
    """The sentences that tell how far a trouble of this category reaches."""
    if category.reach == "fraud":
        return FILE.reach["fraud"][level]
    return FILE.reach["any"][level] + (FILE.reach["work"][level] if category.reach == "work" else ())


def message(random: Random, category: Category, level: str) -> tuple[str, str]:
    """A message, and the key of its cause and reach."""
    subject, trouble = random.choice(category.subjects), random.choice(category.troubles)
    reach = "" if category.asks else random.choice(reaching(category, level))
    cause = filled(random, f"{subject} {trouble}")
    if "Could you add" in cause:
        cause = cause.removesuffix(".") + "?"
    if cause.startswith(("I would like to know", "I wonder")):
        cause = cause.removesuffix("?") + "."
    sentences = [cause, filled(random, reach)] if reach else [cause]
    leans_back = " it" in f" {reach.lower()}" or "this" in reach
    if reach and not leans_back and random.random() < 0.3:
        sentences.reverse()
    if random.random() < 0.25:
        sentences.insert(random.randint(0, len(sentences)), filled(random, random.choice(PHRASES["asides"])))
    if random.random() < 0.5:
        opening = filled(random, random.choice(PHRASES["openings"]))
        sentences[0] = f"{opening}{chr(10) if opening.endswith(',') else ' '}{sentences[0]}"
    if random.random() < 0.45:
        sentences.append(filled(random, random.choice(PHRASES["closings"])))
    text = " ".join(sentences)
    return text, f"{subject} {trouble}{DETAIL}{text}"


def offered(random: Random, category: Category) -> tuple[tuple[str, ...], str]:
    """The labels that the prompt offers, and the right one among them."""
    others = [each for each in CATEGORIES if each is not category]
    chosen = random.sample(others, random.randint(3, 6))
    fits = random.random() > 0.1
    if fits:
        chosen.append(category)
    names = {each.labels: each.labels[0] if random.random() < 0.5 else random.choice(each.labels) for each in chosen}
    labels = list(names.values())
    random.shuffle(labels)
    if not fits or random.random() < 0.5:
        labels.append(OTHER)
    return tuple(labels), names[category.labels] if fits else OTHER


def answer(label: str, priority: str) -> str:
    return json.dumps({"label": label, "priority": priority}, ensure_ascii=False)


def instance(random: Random, more: Sequence[int] = ()) -> Instance:
    """`more`: how many messages come beyond the one or two that are evaluated, one of these."""
    category = random.choice(CATEGORIES)
    labels, label = offered(random, category)
    scale = random.choice(SCALES)
    rule = random.choice(PHRASES["rules"]).format(*scale)
    header = random.choice(PHRASES["instructions"])
    prompt = f"{header}\nLabels: {', '.join(labels)}\nPriority: {rule}."
    level = random.choice(PLACES)
    text, key = message(random, category, level)
    names: dict[str, str] = dict(zip(PLACES, scale[:3], strict=True))
    priority = scale[3] if category.asks else names[level]

    in_system = random.random() < 0.5
    turns = [Turn("system", prompt)] if in_system else []
    heading = random.choice(("Message: ", "", "Message:\n"))
    first = text if in_system else f"{prompt}\n\n{heading}{text}"
    turns += [Turn("user", first), Turn("assistant", answer(label, priority))]
    keys = [key]
    further = 0
    chance = random.random()
    if chance < 0.15 and not category.asks:  # the same trouble, later
        later = random.choice([place for place in PLACES if place != level])
        news = filled(random, random.choice(FILE.updates[later]))
        turns += [Turn("user", news), Turn("assistant", answer(label, names[later]))]
        keys.append(f"{key} then {later}")
    elif chance < 0.4:
        further = 1
    if more:
        further += random.choice(more)
    for _ in range(further):  # another message under the same rules
        known = {name: each for each in CATEGORIES for name in each.labels}
        listed = [name for name in labels if name != OTHER]
        name = random.choice(listed)
        second = known[name]
        level = random.choice(PLACES)
        text, key = message(random, second, level)
        priority = scale[3] if second.asks else names[level]
        before = "" if in_system else random.choice(("Next message: ", "Next: ", "And this one: ", "Another message: "))
        turns += [Turn("user", before + text), Turn("assistant", answer(name, priority))]
        keys.append(key)
    return Instance(tuple(turns), tuple(keys), ("json",) * len(keys))


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    return training_conversations(TASK, partial(instance, more=(1, 2, 3, 4)), random, count)


def questions() -> list[Question]:
    return held_out_questions(TASK, instance, 5, 480)
