"""Task "reading": answer a question from numbered passages and cite the passage, or say that the answer is not there.

The answer is the sentence that says it, followed by the passage number. Passages are about several subjects of one
domain with the same attributes, so the model must tell near passages apart. Every sentence begins with its subject,
and so does the answer that there is none: a model of ten million weights that writes from left to right can then look
up how to go on. The sentences are in words/subjects.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from training.corpus import values
from training.corpus.conversation import Conversation, Question, Turn
from training.corpus.instances import DETAIL, Instance, held_out_questions, training_conversations
from training.corpus.wording import as_typed, slots
from training.corpus.words import FOLDER, PHRASES, lists

TASK = "reading"
NOT_THERE = ": that is not in the sources."  # after the subject that was asked for
SYSTEM = PHRASES.reading["system"]


@dataclass(frozen=True)
class Attribute:
    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    name: str
    subject: str  # a text with slots
    attributes: tuple[Attribute, ...]


READ = tomllib.loads((FOLDER / "subjects.toml").read_text(encoding="utf-8"))
CHOICES: dict[str, list[str]] = READ["choices"]  # a slot's name -> what it may be
DOMAINS = tuple(
    Domain(
        each["name"],
        each["subject"],
        tuple(Attribute(name, tuple(lines["say"]), tuple(lines["ask"])) for name, lines in each["attributes"].items()),
    )
    for each in READ["domain"]
)
LISTS: dict[str, Sequence[str]] = {
    "first": lists()["first_names"],
    "last": lists()["last_names"],
    "program": lists()["programs"],
    "service": lists()["services"],
    "team": lists()["teams"],
    "goods": lists()["goods"],
    "thing": lists()["things"],
    "colour": lists()["colours"],
    "room": lists()["rooms"],
    "tree": lists()["rooms"],
    "company_name": lists()["companies"],
    **CHOICES,
}


@dataclass(frozen=True)
class Fact:
    """One sentence of the sources: what it says of which subject, and where it stands."""

    subject: str
    attribute: Attribute
    sentence: str
    passage: int


@dataclass(frozen=True)
class Asked:
    """A question as asked, its answer and its key."""

    question: str
    answer: str
    key: str
    named: bool  # whether it begins with a name


def slot_value(random: Random, slot: str) -> str:
    if slot.startswith("int_"):
        _, low, high = slot.split("_")
        return str(random.randint(int(low), int(high)))
    if slot in LISTS:
        return random.choice(LISTS[slot])
    match slot:
        case "morning":
            return values.clock_pair(random)[0]
        case "evening":
            return values.clock_pair(random)[1]
        case "year":
            return str(random.randint(2005, 2025))
        case "old_year":
            return str(random.randint(1720, 2020))
        case "title":
            return f"{slot_value(random, 'title_first')} {slot_value(random, 'title_second')}"
        case "village":
            return slot_value(random, "village_first") + slot_value(random, "village_second")
        case "city" | "date" | "weekday" | "clock" | "person" | "phone" | "address" | "street" | "company" | "version":
            draw = getattr(values, slot)
            return str(draw(random))
        case _:
            raise ValueError(f"no slot is called {slot}")


def open_slots(text: str) -> list[str]:
    """The slots of a statement but the subject's own."""
    return [name for name in slots(text) if name not in "eE"]


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def subjects(random: Random, domain: Domain, count: int) -> list[str]:
    """Different subjects of a domain, sometimes alike in all but one part (Atlas 2.1 and Atlas 2.3)."""
    names = slots(domain.subject)
    fixed = {}
    if len(names) > 1 and random.random() < 0.2:
        kept = random.choice(names)
        fixed = {kept: slot_value(random, kept)}
    found: dict[str, None] = {}
    for _ in range(200):
        drawn = {name: fixed.get(name) or slot_value(random, name) for name in names}
        found.setdefault(domain.subject.format_map(drawn))
        if len(found) == count:
            break
    return list(found)


def statement(random: Random, subject: str, attribute: Attribute) -> str:
    text = random.choice(attribute.statements)
    drawn = {name: slot_value(random, name) for name in open_slots(text)}
    return text.format_map({"E": capital(subject), **drawn})


@dataclass(frozen=True)
class Sources:
    domain: Domain
    text: str
    facts: tuple[Fact, ...]
    absent: tuple[str, ...]  # subjects of the domain that the sources do not mention


def sources(random: Random) -> Sources:
    domain = random.choice(DOMAINS)
    passages = random.choice((2, 3, 3, 3, 4, 4, 5)) if random.random() < 0.97 else random.randint(6, 9)
    strangers = random.choice((0, 0, 0, 1)) if passages > 2 else 0
    found = subjects(random, domain, passages - strangers + 1)
    present, absent = found[:-1], found[-1:]
    shared = random.sample(domain.attributes, random.randint(2, 4))  # what most of the subjects have
    about: list[tuple[Domain, str, list[Attribute]]] = []
    for subject in present:
        count = random.choice((1, 2, 2, 2, 3))
        about.append((domain, subject, random.sample(shared, min(count, len(shared)))))
    for _ in range(strangers):
        other = random.choice([each for each in DOMAINS if each is not domain])
        attributes = random.sample(other.attributes, random.choice((1, 2)))
        about.append((other, subjects(random, other, 1)[0], attributes))
    random.shuffle(about)
    lines: list[str] = []
    facts: list[Fact] = []
    for number, (kind, subject, attributes) in enumerate(about, start=1):
        sentences: list[str] = []
        for attribute in attributes:
            sentence = statement(random, subject, attribute)
            sentences.append(sentence)
            if kind is domain:
                facts.append(Fact(subject, attribute, sentence, number))
        lines.append(f"[{number}] {' '.join(sentences)}")
    return Sources(domain, "\n".join(lines), tuple(facts), tuple(absent))


def found_answer(fact: Fact) -> str:
    return f"{fact.sentence} [{fact.passage}]"


def not_there(subject: str) -> str:
    return capital(subject) + NOT_THERE


def asked(random: Random, given: Sources, last: Fact | None, absent_share: float) -> tuple[Asked, Fact | None]:
    """A question to the sources; after another one it may be short (`And the Porto office?`)."""
    chance = random.random()
    known = {(fact.subject, fact.attribute.name) for fact in given.facts}
    if last is not None and chance < 0.2:
        others = [fact for fact in given.facts if fact.attribute is last.attribute and fact.subject != last.subject]
        if others:
            fact = random.choice(others)
            return Asked(f"And {fact.subject}?", found_answer(fact), key_of(fact.subject, fact.attribute), True), fact
    if chance < 0.75 - absent_share:
        fact = random.choice(given.facts)
    elif chance < 1 - absent_share:
        popular = [fact for fact in given.facts if sum(each.attribute is fact.attribute for each in given.facts) > 1]
        fact = random.choice(popular or given.facts)
    else:
        pairs = [(subject, fact.attribute) for subject in given.absent for fact in given.facts]
        mentioned = sorted({fact.subject for fact in given.facts})
        everything = {fact.attribute.name: fact.attribute for fact in given.facts}
        inside = [
            (subject, attribute)
            for subject in mentioned
            for attribute in everything.values()
            if (subject, attribute.name) not in known
        ]
        outside = [
            (subject, attribute)
            for subject in mentioned
            for attribute in given.domain.attributes
            if attribute.name not in everything
        ]
        subject, attribute = random.choice(
            random.choice([each for each in (pairs, pairs, inside, inside, outside) if each])
        )
        question = random.choice(attribute.questions).format(e=subject)
        return Asked(question, not_there(subject), key_of(subject, attribute), False), None
    question = random.choice(fact.attribute.questions).format(e=fact.subject)
    return Asked(question, found_answer(fact), key_of(fact.subject, fact.attribute), False), fact


def key_of(subject: str, attribute: Attribute) -> str:
    return f"{subject}: {attribute.name}"


def instance(
    random: Random, questions_asked: Sequence[int] = (1, 1, 1, 2, 2, 3), absent_share: float = 0.2
) -> Instance:
    given = sources(random)
    questions: list[Asked] = []
    last: Fact | None = None
    for _ in range(random.choice(questions_asked)):
        one, last = asked(random, given, last, absent_share)
        if one.key not in [each.key for each in questions]:  # an answer is to be read from the sources, not from above
            questions.append(one)
    layout = random.randrange(6)
    turns: list[Turn] = []
    if layout == 0:
        turns.append(Turn("system", f"{random.choice(SYSTEM)}\n\n{given.text}"))
    elif layout in (1, 2):
        turns.append(Turn("system", random.choice(SYSTEM)))
    keys: list[str] = []
    for number, one in enumerate(questions):
        question = as_typed(random, one.question, starts_with_name=one.named, lower=False)
        if number == 0 and layout in (1, 3):
            question = f"{given.text}\n\n{question}"
        elif number == 0 and layout in (2, 4):
            question = f"Sources:\n{given.text}\n\nQuestion: {question}"
        elif number == 0 and layout == 5:
            question = f"{question}\n\n{given.text}"
        turns += [Turn("user", question), Turn("assistant", one.answer)]
        keys.append(f"{one.key}{DETAIL}{one.question} {given.text}")
    return Instance(tuple(turns), tuple(keys), ("cited",) * len(keys))


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    # More questions to the same sources than are evaluated: most of what is read is then learnt from several times. And
    # more to which there is no answer: to see that something is lacking is learnt last.
    draw = partial(instance, questions_asked=(2, 3, 4, 5, 6, 7, 8), absent_share=0.35)
    return training_conversations(TASK, draw, random, count)


def questions() -> list[Question]:
    return held_out_questions(TASK, instance, 2, 480)
