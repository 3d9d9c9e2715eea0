"""Turns the corpus into batches of tokens with a loss weight each. Does not know models.

    task modules ──draw──▶ pool of conversations ──tokens──▶ rows ──sort, cut, shuffle──▶ batches of one step each
                                            drill, lookups, exercises ──▶ rows

A pool depends only on the seed and its number. A position in the stream is two numbers, the pool's and the batch's,
from which an interrupted run resumes exactly.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from random import Random
from typing import Final, Protocol, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray

from training.corpus import arithmetic, reading
from training.corpus.conversation import CALL_BEGIN, Conversation, Question
from training.shape import CONTEXT
from training.tokenizer import ASSISTANT, BEGIN, END, USER, text_of, token_id

# How many conversations are of each task; those of tools and extraction have five times the tokens of those of facts.
MIXTURE: Final[dict[str, float]] = {
    "facts": 44,
    "reading": 34,
    "extraction": 12,
    "tools": 13,
    "triage": 9,
    "arithmetic": 12,
    "talk": 6,
}
JOINED_SHARE: Final = 0.04  # of the conversations without tools and without a system turn: they go into long rows
PROMPT_SHARE: Final = 0.1  # of the tokens that no assistant said: only these of them count
PROMPT_WEIGHT: Final = 0.5  # of each of them, so that a prompt's token counts a twentieth of an answer's
TELLING_WEIGHT: Final = 4.0  # of the tokens that decide: those that an answer begins with, and the source it cites
OPENING: Final = {"facts": 6, "reading": 8, "tools": 10}  # tokens with which an answer begins that decide; else 1
PIECES: Final = 4  # parts of a step, each of rows of similar length


JOINED: Final = "joined"  # the task that a row of several conversations counts as
DRILL: Final = "drill"  # the task of rows of which some pieces come a second time
EXERCISES: Final = "exercises"  # the task of rows of calculations without words
EXERCISE_SHARE: Final = 0.05  # of the rows, where there is a drill
LOOKUP: Final = "lookup"  # the task of rows in which what was said of something is to be found again
LOOKUP_SHARE: Final = 0.1  # of the rows, where there is a drill
COMMON: Final = 100  # tokens, the most frequent, of which nothing is named that is looked up
AT_RANDOM: Final = frozenset((DRILL, EXERCISES, LOOKUP))  # nothing foretells what no assistant says in these rows
RETOLD_SHARE: Final = 0.3  # of the conversations, where another model's answers are to be learnt

Retell = Callable[[list[list[int]]], list[list[int]]]  # from prompts to answers, the end of the turn included


class Task(Protocol):
    """A module of the corpus."""

    def conversations(self, random: Random, count: int) -> Iterator[Conversation]: ...

    def questions(self) -> list[Question]: ...


@dataclass(frozen=True)
class Row:
    task: str
    tokens: list[int]
    worth: list[float]  # weight in the loss of what the assistant says, the end of its turn included; 0 for the rest


@dataclass(frozen=True)
class Piece:
    """Rows padded to one length."""

    size: int  # tokens without the padding
    tokens: NDArray[np.int64]  # [rows, length]
    targets: NDArray[np.int64]  # [counted]
    places: NDArray[np.int64]  # [counted] of the token before each target, in the flat rows
    weights: NDArray[np.float32]  # [counted]
    tasks: NDArray[np.int64]  # [counted] number of the task for an answer's token, -1 for a prompt's


@dataclass(frozen=True)
class Drill:
    """The share of rows that only teach copying.

    Reading, extracting and calling tools are mostly copying from the prompt, and a small model finds out how to copy
    late: from text alone, not within four million tokens. A row of the drill is random tokens in pieces, and then the
    same pieces in another order, of which every token but a piece's first can be foretold by copying.
    """

    pools: int = 5  # at the beginning, in which most rows are drill: 1.3 million tokens
    first_share: float = 0.8  # of their rows
    share: float = 0.03  # of the rows of the pools after them


@dataclass(frozen=True)
class Place:
    """A position in the stream: the next batch."""

    pool: int = 0
    batch: int = 0


def load_tasks(names: Sequence[str] = tuple(MIXTURE)) -> dict[str, Task]:
    return {name: cast(Task, importlib.import_module(f"training.corpus.{name}")) for name in names}


def pool(
    tasks: Mapping[str, Task], seed: int, number: int, size: int, mixture: Mapping[str, float] = MIXTURE
) -> list[Conversation]:
    """Return about `size` conversations in the proportions of the mixture, in random order."""
    random = Random(f"{seed}/{number}")
    total = sum(mixture.get(name, 10.0) for name in tasks)
    drawn: list[Conversation] = []
    for name, task in tasks.items():
        count = max(1, round(size * mixture.get(name, 10.0) / total))
        drawn += task.conversations(Random(f"{seed}/{number}/{name}"), count)
    random.shuffle(drawn)
    return drawn


class Stream:
    """An endless stream of batches."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        tokenizer: tokenizers.Tokenizer,
        *,
        seed: int,
        step_tokens: int,
        pool_size: int = 2048,
        mixture: Mapping[str, float] = MIXTURE,
        retell: Retell | None = None,
        drill: Drill | None = None,
    ) -> None:
        self.tasks = tasks
        self.tokenizer = tokenizer
        self.names = [*tasks, JOINED, DRILL, EXERCISES, LOOKUP]
        self.drill = drill
        self.retell = retell
        self.seed = seed
        self.step_tokens = step_tokens
        self.pool_size = pool_size
        self.mixture = mixture
        special = tokenizer.get_added_tokens_decoder()
        self.ordinary = [token for token in range(tokenizer.get_vocab_size()) if token not in special]
        marks = (BEGIN, END, USER, ASSISTANT)
        self.begin, self.end, self.user, self.assistant = (token_id(tokenizer, token) for token in marks)
        self.cites = tokenizer.encode(" [", add_special_tokens=False).ids[-1]
        self.calls = token_id(tokenizer, CALL_BEGIN)

    def batches(self, place: Place) -> Iterator[tuple[Place, list[Piece]]]:
        """Yield every batch from `place`, with the position after it."""
        number, first = place.pool, place.batch
        while True:
            batches = self._batches_of(number)
            for index in range(first, len(batches)):
                after = Place(number, index + 1) if index + 1 < len(batches) else Place(number + 1, 0)
                yield after, [self._piece(rows, f"{number}/{index}/{part}") for part, rows in enumerate(batches[index])]
            number, first = number + 1, 0

    def rows(self, number: int) -> list[Row]:
        """Return the rows of a pool."""
        share = 0.0
        if self.drill is not None:
            share = self.drill.first_share if number < self.drill.pools else self.drill.share
        drilled = round(self.pool_size * share)
        others = self.pool_size - drilled if self.drill is not None else 0
        exercised, looked_up = round(others * EXERCISE_SHARE), round(others * LOOKUP_SHARE)
        rows = self._rows_of_conversations(number, self.pool_size - drilled - exercised - looked_up)
        drill = drill_rows(Random(f"{self.seed}/{number}/drill"), drilled, rows, self.ordinary)
        lookups = lookup_rows(Random(f"{self.seed}/{number}/lookups"), looked_up, rows, self.ordinary, self._marks())
        return rows + drill + lookups + self._exercises(Random(f"{self.seed}/{number}/exercises"), exercised)

    def _marks(self) -> Marks:
        def tokens(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        return Marks(
            begin=[self.begin, self.user],
            passage=tokens("\n["),
            numbers=[tokens(str(number)) for number in range(1, 10)],
            says=tokens("] A")[:1],
            stop=tokens("."),
            cites=tokens(" ["),
            cited=tokens("]"),
            answers=[self.end, self.assistant],
            not_there=tokens(reading.NOT_THERE),
            asks=[self.end, self.user],
        )

    def _exercises(self, random: Random, count: int) -> list[Row]:
        found = [arithmetic.exercises(random, random.randint(4, 12)) for _ in range(count)]
        encoded = self.tokenizer.encode_batch([text for text, _ in found], add_special_tokens=False)  # with offsets
        rows: list[Row] = []
        for (_, results), encoding in zip(found, encoded, strict=True):
            begins = [begin for begin, _ in encoding.offsets]
            worth = [0.0] * len(begins)
            for begin, end in results:
                for place in range(bisect_left(begins, begin), bisect_left(begins, end)):
                    worth[place] = 1.0
            rows.append(Row(EXERCISES, [self.begin, *encoding.ids], [0.0, *worth]))
        return rows

    def _rows_of_conversations(self, number: int, count: int) -> list[Row]:
        conversations = pool(self.tasks, self.seed, number, count, self.mixture)
        texts = [text_of(conversation.turns, conversation.tools) for conversation in conversations]
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        rows = [
            self._row(conversation.task, encoding.ids)
            for conversation, encoding in zip(conversations, encoded, strict=True)
        ]
        if self.retell is not None:
            rows = self._retold(rows, self.retell, Random(f"{self.seed}/{number}/retell"))
        random = Random(f"{self.seed}/{number}/join")
        short: list[Row] = []
        result: list[Row] = []
        for conversation, row in zip(conversations, rows, strict=True):
            plain = not conversation.tools and conversation.turns[0].role == "user"
            (short if plain and random.random() < JOINED_SHARE else result).append(row)
        return [row for row in result if len(row.tokens) <= CONTEXT] + joined(short, random)

    def _row(self, task: str, tokens: list[int]) -> Row:
        worth: list[float] = []
        opening = OPENING.get(task, 1)
        speaking, telling = False, 0  # how many of the next tokens tell
        for before, token in pairwise([self.begin, *tokens]):
            if before in (self.assistant, self.calls):
                telling = opening
            elif task == "reading" and before == self.cites:
                telling = 1
            worth.append((TELLING_WEIGHT if telling > 0 else 1.0) if speaking else 0.0)
            telling -= 1
            if token == self.assistant:
                speaking = True
            elif token == self.end:
                speaking = False
        return Row(task, tokens, worth)

    def _retold(self, rows: list[Row], retell: Retell, random: Random) -> list[Row]:
        """Return the rows, some with the last answer replaced by `retell` of the text before it."""
        chosen = [index for index, row in enumerate(rows) if random.random() < RETOLD_SHARE and any(row.worth)]
        prompts: list[list[int]] = []
        for index in chosen:
            tokens = rows[index].tokens
            prompts.append(tokens[: len(tokens) - tokens[::-1].index(self.assistant)])
        result = list(rows)
        for index, prompt, answer in zip(chosen, prompts, retell(prompts), strict=True):
            result[index] = self._row(rows[index].task, prompt + answer)
        return result

    def _batches_of(self, number: int) -> list[list[list[Row]]]:
        """Yield steps of PIECES pieces. A piece has rows of similar length; a step mixes short and long ones."""
        random = Random(f"{self.seed}/{number}/batches")
        rows = self.rows(number)
        random.shuffle(rows)
        rows.sort(key=lambda row: len(row.tokens))
        most = self.step_tokens // PIECES
        pieces: list[list[Row]] = [[]]
        for row in rows:
            # The row is the longest so far: with it, the piece would be so many rows of its length.
            if pieces[-1] and (len(pieces[-1]) + 1) * len(row.tokens) > most:
                pieces.append([])
            pieces[-1].append(row)
        random.shuffle(pieces)
        steps = max(1, round(len(pieces) / PIECES))
        ends = [len(pieces) * step // steps for step in range(steps + 1)]
        return [pieces[start:end] for start, end in pairwise(ends)]

    def _piece(self, rows: Sequence[Row], name: str) -> Piece:
        length = max(len(row.tokens) for row in rows)
        tokens = np.zeros((len(rows), length), dtype=np.int64)  # 0 is the padding
        worth = np.zeros((len(rows), length), dtype=np.float32)
        text = np.zeros((len(rows), length), dtype=np.bool_)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = row.tokens
            worth[index, : len(row.tokens)] = row.worth
            text[index, 1 : len(row.tokens)] = row.task not in AT_RANDOM  # nothing comes before the first token
        chance = np.random.default_rng([self.seed, *name.encode()]).random(tokens.shape)
        counted = (worth > 0) | (text & (chance < PROMPT_SHARE))
        places = np.flatnonzero(counted)
        tasks = np.repeat([self.names.index(row.task) for row in rows], length)[places]
        said = worth.ravel()[places]
        return Piece(
            size=sum(len(row.tokens) for row in rows),
            tokens=tokens,
            targets=tokens.ravel()[places],
            places=places - 1,
            weights=np.where(said > 0, said, np.float32(PROMPT_WEIGHT)),
            tasks=np.where(said > 0, tasks, -1),
        )


def drill_rows(random: Random, count: int, rows: Sequence[Row], ordinary: Sequence[int]) -> list[Row]:
    """Return rows of random pieces that occur twice. In half of them all `ordinary` tokens are equally likely, in the
    other half they are as frequent as in `rows`."""
    allowed = set(ordinary)
    usual = [token for row in rows for token in row.tokens if token in allowed]
    result: list[Row] = []
    for _ in range(count):
        length = random.choice((16, 24, 32, 48, 64, 96, 128))  # of the first half
        tokens = random.choices(usual if random.random() < 0.5 else ordinary, k=length)
        pieces: list[list[int]] = []
        while tokens:
            size = random.randint(3, 24)
            pieces.append(tokens[:size])
            tokens = tokens[size:]
        again = random.sample(pieces, len(pieces))
        first, second = [*chain.from_iterable(pieces)], [*chain.from_iterable(again)]
        worth = [0.0] * len(first) + [float(place > 0) for piece in again for place in range(len(piece))]
        result.append(Row(DRILL, first + second, worth))
    return result


@dataclass(frozen=True)
class Marks:
    """The tokens around a looked-up value."""

    begin: list[int]  # of a conversation, up to what the user says
    passage: list[int]  # before a passage's number
    numbers: list[list[int]]
    says: list[int]  # between it and what the passage says
    stop: list[int]
    cites: list[int]  # before the number that an answer cites
    cited: list[int]  # after it
    answers: list[int]  # between a question and its answer
    not_there: list[int]  # after the subject that was asked for
    asks: list[int]  # between an answer and the next question


def lookup_rows(random: Random, count: int, rows: Sequence[Row], ordinary: Sequence[int], marks: Marks) -> list[Row]:
    """Return rows of numbered passages, each about one subject, followed by questions about them.

    A sentence is a subject, an attribute and a value, all of random tokens. Names of several tokens share some of them,
    and subjects share attributes, so that a value is found by all of its sentence's beginning only. Reading is this in
    words, and an argument of a call or a field of a record is found so too. In a third of the rows every sentence comes
    again with its number; in the others a conversation asks for an attribute of a subject, which in four cases of ten
    is not there: then the answer says so after the subject. What is learnt is whether it is there, values and numbers.
    """
    allowed = set(ordinary) - {token for token, _ in Counter(chain(*(row.tokens for row in rows))).most_common(COMMON)}
    usual = [token for row in rows for token in row.tokens if token in allowed]
    if len(set(usual)) < COMMON:
        usual = [*ordinary]
    return [
        _lookup_row(random, usual if random.random() < 0.5 else ordinary, marks, asking=random.random() < 0.67)
        for _ in range(count)
    ]


def _lookup_row(random: Random, drawn_from: Sequence[int], marks: Marks, *, asking: bool) -> Row:
    if random.random() < 0.25:
        names = numbered_names(random, drawn_from, random.randint(3, 7), marks.numbers)
    else:
        names = made_names(random, drawn_from, random.randint(3, 7), random.choice((1, 2, 2, 3)))
    subjects = names[:-1]  # the last one is in no passage
    attributes = made_names(random, drawn_from, random.randint(2, 4), random.choice((1, 1, 2)))
    tokens, worth = [*marks.begin], [0.0] * len(marks.begin)

    def add(part: Sequence[int], weight: float = 0.0) -> None:
        tokens.extend(part)
        worth.extend([weight] * len(part))

    said: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # value and number by subject and attribute
    for place, (number, subject) in enumerate(zip(marks.numbers, subjects, strict=False)):
        add([*marks.passage, *number, *marks.says])
        for which in random.sample(range(len(attributes)), min(len(attributes), random.choice((1, 2, 2, 3)))):
            value = random.choices(drawn_from, k=random.choice((1, 1, 2, 3)))
            add([*subject, *attributes[which], *value, *marks.stop])
            said[place, which] = ([*value, *marks.stop], number)
    told = {which for _, which in said}
    pairs = [(place, which) for place in range(len(subjects)) for which in told if (place, which) not in said]
    strangers = [(len(subjects), which) for which in told]
    for place, which in random.sample(list(said), len(said)):
        if asking:
            absent = [each for each in (pairs, strangers) if each]
            if absent and random.random() < 0.4:
                place, which = random.choice(random.choice(absent))
            question = [names[place], attributes[which]]
            random.shuffle(question)
            add([*question[0], *question[1], *marks.answers])
        add(names[place][:1], 1.0 if asking else 0.0)
        add(names[place][1:])
        if (place, which) in said:
            value, number = said[place, which]
            add(attributes[which][:1], TELLING_WEIGHT if asking else 0.0)
            add(attributes[which][1:])
            add(value, 1.0)
            add(marks.cites)
            add(number, TELLING_WEIGHT)
            add(marks.cited)
        else:
            add(marks.not_there[:1], TELLING_WEIGHT)
            add(marks.not_there[1:])
        if asking:
            add(marks.asks)
    return Row(LOOKUP, tokens, worth)


def made_names(random: Random, drawn_from: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return `count` different names of `length` tokens; longer names share some tokens."""
    shared = random.choices(drawn_from, k=count)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        mixed = [random.choice(shared if random.random() < 0.5 else drawn_from) for _ in range(length)]
        found[tuple(mixed if length > 1 else random.choices(drawn_from))] = None
    return [list(name) for name in found]


def numbered_names(
    random: Random, drawn_from: Sequence[int], count: int, digits: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return `count` different names with the same start and two to four digits at the end."""
    kind = random.choices(drawn_from, k=random.choice((1, 2, 3)))
    length = random.randint(2, 4)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple([*kind, *chain.from_iterable(random.choices(digits, k=length))])] = None
    return [list(name) for name in found]


def joined(rows: Sequence[Row], random: Random) -> list[Row]:
    """Join conversations into rows of up to CONTEXT tokens, as in a long chat.

    At most one of a joined row's conversations is talk, and it comes last: it alone refers to what was said before.
    """
    talk = [row for row in rows if row.task == "talk"]
    others = [row for row in rows if row.task != "talk"]
    result: list[Row] = []
    while others:
        goal = round(CONTEXT * random.uniform(0.15, 1.0))
        lengths = accumulate(len(row.tokens) for row in others)
        count = max(1, sum(length <= goal for length in lengths))
        parts, others = others[:count], others[count:]
        if talk and sum(len(row.tokens) for row in parts) + len(talk[-1].tokens) <= CONTEXT:
            parts = [*parts, talk.pop()]
        tokens, worth = list(parts[0].tokens), list(parts[0].worth)
        for row in parts[1:]:
            tokens += row.tokens[1:]  # without a second beginning
            worth += row.worth[1:]
        if len(tokens) <= CONTEXT:
            result.append(Row(JOINED if len(parts) > 1 else parts[0].task, tokens, worth))
    return result + talk
