"""Task "facts": questions about LLM latency and Headrace. Every fact has one answer and many wordings of its question.

The facts are in facts/*.toml. The last two questions of each are held out of training. Training uses the others, their
rephrasings, questions about the terms that a fact defines, and variations in typing.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random

import msgspec

from training.corpus.conversation import Conversation, Question, Turn
from training.corpus.instances import BETWEEN_KEYS, is_held_out
from training.corpus.rephrasing import rephrased, with_synonyms
from training.corpus.wording import as_typed, lower_first
from training.corpus.words import PHRASES, lines

TASK = "facts"
FOLDER = Path(__file__).parent / "facts"
HELD_OUT = 2  # the last questions of each fact
BY_HAND_SHARE = 0.7  # share of training questions that people wrote

ARTICLES = ("a ", "an ", "the ")
ONE_DEFINED, SEVERAL_DEFINED = PHRASES.facts["one_defined"], PHRASES.facts["several_defined"]
# Each for about half of the terms, so that its words are known when a held-out question uses them.
SOME_DEFINED = PHRASES.facts["some_defined"]
BEFORE, AFTER, SYSTEMS = (PHRASES.facts[name] for name in ("before", "after", "systems"))
BETWEEN = PHRASES.facts["between"]  # a turn of politeness between two questions, and what is said to it
ORDINARY = set(
    """
    a am are as at by can compare could define do does explain for from give how i if in is may must my name of on say
    should some state static symmetric tell the these to what when where which who whose why will with list one only
    among after against any base canary encoder exact frequency goodput prefill recompute small trace under
    """.split()
)


class FactEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A fact in a file."""

    answer: str
    questions: str  # one a line
    why: str = ""
    terms: tuple[str, ...] = ()  # what the answer defines, with its article where one is said
    plural_terms: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()  # commands, flags and settings that the fact is about


class FactsFile(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    facts: dict[str, FactEntry]


class Fact(msgspec.Struct, frozen=True):
    id: str
    topic: str
    answer: str
    why: str  # the answer to "why is that?", empty where there is none
    asked: tuple[str, ...]  # all questions to learn from
    by_hand: tuple[str, ...]  # those of them that were written, and not made from others or from terms
    held_out: tuple[str, ...]  # questions for evaluation only
    documents: tuple[str, ...]


def folded(question: str) -> str:
    """Return the question without capitals and punctuation."""
    kept = "".join(letter for letter in question.casefold() if letter not in ".,;:!?'\"")
    return " ".join(kept.split())


def bare(question: str) -> str:
    """Return the question without capitals, punctuation and articles."""
    return " ".join(word for word in folded(question).split() if word not in ("a", "an", "the"))


def key_of(fact: Fact, question: str) -> str:
    return f"{fact.id}: {folded(question)}"


@cache
def all_written() -> tuple[tuple[str, str, FactEntry], ...]:
    """Return topic, name and entry of every fact in the files."""
    files = [msgspec.toml.decode(path.read_bytes(), type=FactsFile) for path in sorted(FOLDER.glob("*.toml"))]
    return tuple((file.topic, name, fact) for file in files for name, fact in file.facts.items())


@cache
def held_out_wordings() -> frozenset[str]:
    """Return the held-out questions of all facts, which no wording in training may equal."""
    return frozenset(bare(question) for _, _, fact in all_written() for question in lines(fact.questions)[-HELD_OUT:])


@cache
def facts() -> tuple[Fact, ...]:
    return tuple(read(topic, name, fact) for topic, name, fact in all_written())


def read(topic: str, name: str, written: FactEntry) -> Fact:
    questions = lines(written.questions)
    by_hand = questions[:-HELD_OUT]
    rewritten = [wording for question in by_hand for wording in rephrased(question)]
    asked = {bare(question): question for question in (*rewritten, *defining(written), *by_hand)}
    return Fact(
        id=name,
        topic=topic,
        answer=written.answer,
        why=written.why,
        asked=tuple(question for key, question in asked.items() if key not in held_out_wordings()),
        by_hand=by_hand,
        held_out=questions[-HELD_OUT:],
        documents=written.documents,
    )


def digest(answer: str) -> str:
    """Return a short digest of an answer, by which finished weights remember what they learnt."""
    return blake2b(answer.encode(), digest_size=4).hexdigest()


def digests() -> dict[str, str]:
    """Return the digest of each fact's answer by its id."""
    return {fact.id: digest(fact.answer) for fact in facts()}


def defining(written: FactEntry) -> Iterator[str]:
    """Yield questions about the terms that an answer defines."""
    for terms, forms in ((written.terms, ONE_DEFINED), (written.plural_terms, SEVERAL_DEFINED)):
        for term in terms:
            name = next((term.removeprefix(article) for article in ARTICLES if term.startswith(article)), term)
            some = [form for form in SOME_DEFINED if is_held_out(f"{form} {term}", 2)]
            yield from (form.format(full=term, bare=name) for form in (*forms, *some))


def starts_with_name(question: str) -> bool:
    """Return whether the first word keeps its capital anywhere. Only known ordinary words lose it."""
    first = re.split(r"[ ']", question, maxsplit=1)[0].strip(string.punctuation)
    return first.casefold() not in ORDINARY


def as_asked(random: Random, question: str) -> str:
    """Vary a question as different users would type it."""
    chance = random.random()
    if chance < 0.12:
        typed = question.lower()
        return typed.rstrip("?.") if random.random() < 0.5 else typed
    if chance < 0.2:
        before = random.choice(BEFORE)
        return before + (question if starts_with_name(question) else lower_first(question))
    if chance < 0.25:
        return question + random.choice(AFTER)
    if chance < 0.28 and not starts_with_name(question):
        return f"Could you please tell me: {lower_first(question)}"
    return as_typed(random, question, starts_with_name=starts_with_name(question))


LITTLE = frozenset(
    """
    a am an and are as at be by can could do does for from give have how i if in is it its may me my of on or please
    should so tell than that the there this to was what what's when where which who why will with would you
    """.split()
)
SYNONYM_SHARE = 0.35  # share of training questions
DROPPED_SHARE = 0.25  # share of training questions


def with_dropped_words(random: Random, question: str) -> str:
    """Drop words from a question, mostly short function words.

    What is asked follows from few of a question's words, and wordings that nobody thought of have those in common.
    """
    kept = [word for word in question.split() if random.random() > (0.4 if word.casefold() in LITTLE else 0.06)]
    return " ".join(kept) or question


def with_some_synonyms(random: Random, question: str) -> str:
    """Replace some words by synonyms, in a share of the questions."""
    text = with_synonyms(random, question) if random.random() < SYNONYM_SHARE else question
    return question if bare(text) in held_out_wordings() else text


def question_and_answer(
    random: Random, fact: Fact, wording: Callable[[Random, str], str] | None = None
) -> tuple[tuple[Turn, Turn], str]:
    question = random.choice(fact.by_hand if random.random() < BY_HAND_SHARE else fact.asked)
    text = question if wording is None else wording(random, question)
    return (Turn("user", as_asked(random, text)), Turn("assistant", fact.answer)), key_of(fact, question)


def conversations(random: Random, count: int, times: Mapping[str, int] | None = None) -> Iterator[Conversation]:
    """Yield conversations that end with each fact equally often: facts come from shuffled rounds of all.

    `times` says how often a fact comes in a round, by its id; once by default.
    """
    known = facts()
    round_of = [fact for fact in known for _ in range((times or {}).get(fact.id, 1))]
    order: list[Fact] = []
    for _ in range(count):
        if not order:
            order = random.sample(round_of, len(round_of))
        last = order.pop()
        turns: list[Turn] = [Turn("system", random.choice(SYSTEMS))] if random.random() < 0.2 else []
        keys: list[str] = []
        for fact in (*random.sample(known, random.choice((0, 0, 0, 0, 1, 1, 2))), last):
            if keys and random.random() < 0.15:
                thanks, welcome = random.choice(BETWEEN)
                turns += [Turn("user", thanks), Turn("assistant", welcome)]
            (user, assistant), key = question_and_answer(random, fact, with_some_synonyms)
            if random.random() < DROPPED_SHARE:
                user = replace(user, content=with_dropped_words(random, user.content))
            turns += (user, assistant)
            keys.append(key)
        yield Conversation(TASK, tuple(turns), key=BETWEEN_KEYS.join(keys))


@dataclass(frozen=True)
class Emphasised:
    """This task with some facts several times as often as the others."""

    times: Mapping[str, int]  # by the facts' ids

    def conversations(self, random: Random, count: int) -> Iterator[Conversation]:
        return conversations(random, count, self.times)

    def questions(self) -> list[Question]:
        return questions()

    def growth(self) -> float:
        """Return how many times as many conversations leave the other facts as often as before."""
        return 1.0 + sum(times - 1 for times in self.times.values()) / len(facts())


def questions() -> list[Question]:
    """Return the held-out questions: the first of a fact alone, the second after another fact or a system turn."""
    random = Random(4)
    found: list[Question] = []
    for fact in facts():
        for number, question in enumerate(fact.held_out):
            before: tuple[Turn, ...] = ()
            if number == 1 and random.random() < 0.5:
                before = (Turn("system", random.choice(SYSTEMS)),)
            elif number == 1:
                before, _ = question_and_answer(
                    random, random.choice([other for other in facts() if other is not fact])
                )
            turns = (*before, Turn("user", question))
            found.append(Question(TASK, turns, (), fact.answer, "fact", key_of(fact, question)))
    return found
