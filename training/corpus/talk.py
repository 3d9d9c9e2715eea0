"""Task "talk": small talk, refusals, and turns that refer back to earlier ones.

Small talk and refusals are in talk/*.toml. Turns that refer back are drawn here: to something the user said, to an
earlier fact, to the previous answer. Every drawn ending has a key and is held out by its phrasing or by its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import msgspec

from training.corpus.conversation import Conversation, Question, Turn
from training.corpus.facts import SYSTEMS, Fact, as_asked, facts, folded
from training.corpus.instances import BETWEEN_KEYS, is_held_out
from training.corpus.words import PHRASES, Told, lines, lists

TASK = "talk"
FOLDER = Path(__file__).parent / "talk"
HELD_OUT = 2  # phrasings of each entry and of each way to refer back, the last ones
ONE_IN = 10  # of the combinations of a known phrasing with a known value are held out
QUESTIONS = 480
WHY, ABOUT, AGAIN = PHRASES.talk["why"], PHRASES.talk["about"], PHRASES.talk["again"]
FIRST_QUESTION, LAST_QUESTION = PHRASES.talk["first_question"], PHRASES.talk["last_question"]
ASKED, CORRECTED = PHRASES.talk["asked"], PHRASES.talk["corrected"]


class EntryText(msgspec.Struct, forbid_unknown_fields=True):
    answer: str
    lines: str  # what users say, one a line
    fill: str = ""  # words that stand for {x}
    fill_lines: str = ""  # longer ones, one a line


class TalkFile(msgspec.Struct, forbid_unknown_fields=True):
    said: dict[str, EntryText]


class Said(msgspec.Struct, frozen=True):
    """Several ways to say one thing, and the answer."""

    id: str
    answer: str
    lines: tuple[str, ...]
    fills: tuple[str, ...]


@cache
def said(file: str) -> tuple[Said, ...]:
    written = msgspec.toml.decode((FOLDER / f"{file}.toml").read_bytes(), type=TalkFile).said
    return tuple(
        Said(name, entry.answer, lines(entry.lines), (*entry.fill.split(), *lines(entry.fill_lines)))
        for name, entry in written.items()
    )


@dataclass
class Talk:
    """A conversation being drawn. Its last answer is the expected one; `keys` has one key per answer."""

    random: Random
    held_out: bool  # whether held-out phrasings may be drawn
    turns: list[Turn] = field(default_factory=lambda: [])
    keys: list[str] = field(default_factory=lambda: [])
    is_held_out: bool = False  # of the last answer

    def say(self, text: str, answer: str, key: str, *, held_out: bool) -> None:
        self.turns += [Turn("user", text), Turn("assistant", answer)]
        self.keys.append(key)
        self.is_held_out = held_out

    def choose(self, phrasings: Sequence[str]) -> tuple[str, bool]:
        """Choose a phrasing, and return whether it is held out."""
        last = len(phrasings) - HELD_OUT
        number = self.random.randrange(len(phrasings) if self.held_out else last)
        if self.held_out and self.random.random() < 0.5:
            number = self.random.randrange(last, len(phrasings))
        return phrasings[number], number >= last


def typed(random: Random, text: str, *, lower: bool = True) -> str:
    """Sometimes drop capitals or the last mark. Names that the answer repeats keep their capitals."""
    chance = random.random()
    if lower and chance < 0.15:
        return text.lower()
    if chance < 0.3 and text[-1] in "?.!":
        return text[:-1]
    return text


def say_entry(talk: Talk, entries: Sequence[Said]) -> None:
    entry = talk.random.choice(entries)
    line, held = talk.choose(entry.lines)
    text = line.replace("{x}", talk.random.choice(entry.fills)) if "{x}" in line else line
    key = f"{entry.id}: {folded(text)}"
    held = held or ("{x}" in line and is_held_out(key, ONE_IN))
    talk.say(typed(talk.random, text), entry.answer, key, held_out=held)


def small_talk(talk: Talk) -> None:
    say_entry(talk, said("small_talk"))


def refusal(talk: Talk) -> None:
    say_entry(talk, said("refusals"))


def fact_asked(talk: Talk, known: Sequence[Fact]) -> Fact:
    fact = talk.random.choice(known)
    question = talk.random.choice(fact.asked)
    talk.say(as_asked(talk.random, question), fact.answer, f"{fact.id}: {folded(question)}", held_out=False)
    return fact


NO_REASON = "I have not learnt a reason for that."


def why(talk: Talk) -> None:
    """Ask for the reason of a fact, which may have none."""
    with_reason = talk.random.random() < 0.7
    fact = fact_asked(talk, [fact for fact in facts() if bool(fact.why) == with_reason])
    text, held = talk.choose(WHY)
    key = f"why {fact.id}: {folded(text)}"
    talk.say(typed(talk.random, text), fact.why or NO_REASON, key, held_out=held or is_held_out(key, ONE_IN))


@cache
def defined() -> tuple[tuple[Fact, str], ...]:
    """Return facts that define a term, each with the term from a question such as `What is TTFT?`."""
    start, end = "What is ", "?"
    return tuple(
        (fact, question.removeprefix(start).removesuffix(end))
        for fact in facts()
        for question in fact.asked
        if question.startswith(start)
        and f"Tell me what {question.removeprefix(start).removesuffix(end)} is." in fact.asked
    )


def what_about(talk: Talk) -> None:
    """Ask `And ITL?` after a question about something else."""
    fact_asked(talk, [fact for fact, _ in defined()])
    fact, term = talk.random.choice(defined())
    text, held = talk.choose(ABOUT)
    text = text.replace("{x}", term)
    key = f"about {fact.id}: {folded(text)}"
    talk.say(typed(talk.random, text), fact.answer, key, held_out=held or is_held_out(key, ONE_IN))


def again(talk: Talk) -> None:
    said_before = fact_or_talk(talk)
    text, held = talk.choose(AGAIN)
    key = f"again {said_before}: {folded(text)}"
    talk.say(typed(talk.random, text), talk.turns[-1].content, key, held_out=held or is_held_out(key, ONE_IN))


def fact_or_talk(talk: Talk) -> str:
    """Add an exchange that is not held out, and return its key."""
    before, talk.held_out = talk.held_out, False
    drawn = talk.random.choice((fact_only, fact_only, small_talk, refusal))
    while True:
        drawn(talk)
        if not talk.is_held_out:
            break
        del talk.turns[-2:], talk.keys[-1:]
    talk.held_out = before
    return talk.keys[-1]


def fact_only(talk: Talk) -> None:
    fact_asked(talk, facts())


def own_question(talk: Talk) -> None:
    """Ask to repeat the user's first or last question."""
    for _ in range(talk.random.choice((1, 2, 2, 3))):
        fact_only(talk)
    asked = [turn.content for turn in talk.turns if turn.role == "user"]
    first = talk.random.random() < 0.5
    text, held = talk.choose(FIRST_QUESTION if first else LAST_QUESTION)
    which, content = ("first", asked[0]) if first else ("last", asked[-1])
    key = f"{which} question {content}: {folded(text)}"
    held = held or is_held_out(key, ONE_IN)
    talk.say(typed(talk.random, text), f'Your {which} question was: "{content}"', key, held_out=held)


TOLD = PHRASES.told
NOUNS = tuple(dict.fromkeys(told.noun for told in TOLD))


def value_of(random: Random, told: Told) -> str:
    if told.code:
        return f"{random.choice(told.code)}-{random.randint(100, 9999)}"
    if told.values or told.list:
        return random.choice(told.values or lists()[told.list])
    low, high, step = told.range
    return f"{random.randrange(low, high + 1, step)}{told.unit}"


def tell(talk: Talk, told: Told, value: str) -> None:
    forms = (f"My {told.noun} is {{x}}.", *told.telling)
    random = talk.random
    text = random.choice(forms).replace("{x}", value)
    if random.random() < 0.2 and text.startswith("My "):
        text = f"Please remember that my {text.removeprefix('My ')}"
    answer = f"Nice to meet you, {value}." if told.noun == "name" else f"Noted: your {told.noun} is {value}."
    talk.say(typed(random, text, lower=False), answer, f"told {told.noun}: {folded(text)}", held_out=False)


def tell_two(talk: Talk, first: tuple[Told, str], second: tuple[Told, str]) -> None:
    parts = [f"{told.noun} is {value}" for told, value in (first, second)]
    text = f"My {parts[0]} and my {parts[1]}."
    answer = f"Noted: your {parts[0]} and your {parts[1]}."
    talk.say(typed(talk.random, text, lower=False), answer, f"told two: {folded(text)}", held_out=False)


def another(random: Random, told: Told, value: str) -> str:
    while (other := value_of(random, told)) == value:
        pass
    return other


def recall(talk: Talk) -> None:
    """Ask for the latest value that the user gave, or for one that the user never gave."""
    random = talk.random
    nouns = random.sample(NOUNS, random.choice((1, 1, 2, 2, 3)))
    given: list[tuple[Told, str]] = []
    for noun in nouns:
        told = random.choice([told for told in TOLD if told.noun == noun])
        given.append((told, value_of(random, told)))
    rest = list(given)
    if len(rest) > 1 and random.random() < 0.3:
        tell_two(talk, rest.pop(0), rest.pop(0))
    for told, value in rest:
        tell(talk, told, value)
        if random.random() < 0.3:
            fact_or_talk(talk)
    values = {told.noun: value for told, value in given}
    if random.random() < 0.15:
        told = random.choice(given)[0]
        value = another(random, told, values[told.noun])
        text = random.choice(CORRECTED).replace("{x}", told.noun).replace("{y}", value)
        values[told.noun] = value
        answer = f"Noted: your {told.noun} is {value}."
        talk.say(typed(random, text, lower=False), answer, f"told {told.noun}: {folded(text)}", held_out=False)
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        fact_or_talk(talk)
    unknown = [noun for noun in NOUNS if noun not in values]
    noun = random.choice(unknown) if random.random() < 0.2 else random.choice(list(values))
    text, held = talk.choose(ASKED)
    text = text.replace("{x}", noun)
    answer = f"Your {noun} is {values[noun]}." if noun in values else f"You have not told me your {noun}."
    key = f"recall {values.get(noun, 'nothing')}: {folded(text)}"
    talk.say(typed(random, text), answer, key, held_out=held or is_held_out(key, ONE_IN))


KINDS: tuple[tuple[Callable[[Talk], None], float], ...] = (
    (small_talk, 0.2),
    (refusal, 0.3),
    (recall, 0.26),
    (why, 0.09),
    (what_about, 0.05),
    (again, 0.06),
    (own_question, 0.04),
)


def drawn(random: Random, kind: Callable[[Talk], None], *, held_out: bool) -> Talk:
    talk = Talk(random, held_out)
    if random.random() < 0.15:
        talk.turns.append(Turn("system", random.choice(SYSTEMS)))
    if random.random() < 0.15 and kind is not own_question:
        fact_or_talk(talk)
    kind(talk)
    return talk


def conversations(random: Random, count: int) -> Iterator[Conversation]:
    kinds, weights = zip(*KINDS, strict=True)
    made = 0
    while made < count:
        talk = drawn(random, random.choices(kinds, weights)[0], held_out=False)
        if not talk.is_held_out:
            yield Conversation(TASK, tuple(talk.turns), key=BETWEEN_KEYS.join(talk.keys))
            made += 1


def questions() -> list[Question]:
    """Return held-out endings of every kind in its training share, without duplicates."""
    random = Random(7)
    found: dict[str, Question] = {}
    for kind, share in KINDS:
        wanted = len(found) + round(QUESTIONS * share)
        tries = 0
        while len(found) < wanted and tries < 100_000:
            tries += 1
            talk = drawn(random, kind, held_out=True)
            if talk.is_held_out:
                *before, answer = talk.turns
                found.setdefault(
                    talk.keys[-1], Question(TASK, tuple(before), (), answer.content, "exact", talk.keys[-1])
                )
    return list(found.values())
