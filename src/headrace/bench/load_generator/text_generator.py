"""Generates texts with a given number of the server's tokens, from common words.

Words are separated by blanks, and tokenizers do not merge tokens across those, so a text has the sum of its words'
tokens plus a constant. Words of one token each are preferred: a text of n tokens then has n words.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FIRST: Final = "the"  # first word of every text: without a blank before it, a word may have other tokens
OPENING: Final = 8  # words after the first that differ from run to run
_ENOUGH: Final = 128  # one-token words that make the others unnecessary
_GROUP: Final = 32  # words counted together at first
_FEW: Final = 16  # words counted one by one if groups give no result

WORDS: Final = tuple(
    """
    able about above across act add after again age ago air all almost alone along already also always among animal
    another answer any appear apple area arm army around arrive art ask away baby back bad bag ball bank base basic bath
    be bear beat beautiful become bed before begin behind believe below best better between big bird black blood blue
    board boat body bone book both bottom box boy branch bread break bridge bright bring broad brother brown build
    burn business busy buy by call camp can capital car card care carry case cat catch cause cell center century
    certain chair chance change check child choose church circle city class clean clear climb clock close cloth cloud
    coal coast coat cold collect color come common company complete condition consider contain control cook cool copy
    corn corner correct cost count country course cover create cross crowd cry current cut dance dark daughter day dead
    deal death decide deep degree depend desert design desk detail develop die differ dinner direct discover distance
    divide do doctor dog dollar door double down draw dream dress drink drive drop dry during each ear early earth ease
    east easy eat edge effect egg eight either electric element else end enemy energy engine enough enter equal even
    evening event ever every exact example except excite exercise expect experience explain express eye face fact fair
    fall family famous far farm fast father favor fear feed feel feet fell few field fight figure fill final find fine
    finger finish fire first fish fit five flat floor flow flower fly follow food foot force foreign forest form forward
    found four free fresh friend from front fruit full fun game garden gas gather general gentle get girl give glad
    glass go gold good govern grand grass gray great green ground group grow guess guide gun hair half hand happen happy
    hard have head hear heart heat heavy help here high hill history hit hold hole home hope horse hot hour house how
    huge human hundred hunt hurry ice idea imagine inch industry insect instant instrument interest invent iron island
    job join joy jump just keep key kill kind king knew know lady lake land language large last late laugh law lay lead
    learn least leave left leg length less let letter level lie life lift light like line list listen little live local
    locate log lone long look lost loud love low machine made mail main major make man many map mark market mass master
    match material matter may mean measure meat meet melody member men metal method middle might mile milk million mind
    mine minute miss mix modern moment money month moon more morning most mother motion mount mountain mouth move much
    music must name nation natural nature near necessary neck need neighbor never new next night nine noise noon north
    nose note nothing notice noun now number object observe occur ocean off offer office often oil old once one only
    open operate opposite order organ other our out over own oxygen page paint pair paper parent part particular party
    pass past path pattern pay people perhaps period person phrase pick picture piece pitch place plain plan plane plant
    play please plural poem point poor populate port pose position possible post pound power practice prepare present
    press pretty print probable problem process produce product proper property protect prove provide pull push put
    question quick quiet quite quote race radio rail rain raise range rather reach read ready real reason receive record
    red region remember repeat reply represent require rest result rich ride right ring rise river road rock roll room
    root rope rose round row rub rule run safe sail salt same sand save say scale school science score sea search season
    seat second section see seed seem select self sell send sense sentence separate serve set settle seven several shape
    share sharp sheet shell shine ship shoe shop short should shoulder shout show side sight sign silent silver similar
    simple since sing single sister sit six size skill skin sky sleep slip slow small smell smile snow soft soil soldier
    solution solve some son song soon sound south space speak special speech speed spell spend spoke spot spread spring
    square stand star start state station stay steam steel step stick still stone stood stop store story straight
    strange stream street stretch string strong student study subject substance subtract success such sudden sugar
    suggest suit summer sun supply support sure surface surprise swim syllable symbol system table tail take talk tall
    teach team teeth tell temperature ten term test than thank them then there these thick thin thing think third though
    thought thousand three through throw thus tie time tiny tire together tone too tool top total touch toward town
    track trade train travel tree triangle trip trouble truck true try tube turn twenty two type under unit until up use
    usual valley value vary verb very view village visit voice vowel wait walk wall want war warm wash watch water wave
    way weather week weight well went west wheel when where white whole why wide wife wild will win wind window wing
    winter wire wish with woman wonder wood word work world would write wrong yard year yellow yes yet young
    """.split()
)

CountTokens = Callable[[str], Awaitable[int]]  # counts a text's tokens, including any constant overhead


class WordCosts(msgspec.Struct, frozen=True):
    """The tokens of words that follow a blank."""

    words: tuple[str, ...]
    tokens: tuple[int, ...]
    first: int  # of FIRST, after a blank
    constant: int  # of any text in addition to its words

    @property
    def exact(self) -> bool:
        """True if texts of any length can be generated exactly."""
        return 1 in self.tokens

    def of(self, words: int) -> float:
        """Return the expected tokens of this many words."""
        return words * sum(self.tokens) / len(self.tokens)


async def measure(count: CountTokens, words: Sequence[str] = WORDS, *, most: int) -> WordCosts:
    """Find words of one token by counting groups and halving those with more; `most`: limit of counted texts."""
    once, many = await count(FIRST), await count(" ".join([FIRST] * 9))
    first = max(1, round((many - once) / 8))
    constant = once - first
    known: dict[str, int] = {}
    groups = deque(list(words[place : place + _GROUP]) for place in range(0, len(words), _GROUP))
    budget = most - 2
    while groups and budget > 0 and sum(tokens == 1 for tokens in known.values()) < _ENOUGH:
        group = groups.popleft()
        budget -= 1
        total = await count(f"{FIRST} {' '.join(group)}") - once
        if total == len(group):
            known |= dict.fromkeys(group, 1)
        elif len(group) == 1:
            known[group[0]] = max(1, total)
        elif total > 0:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    if not known:
        for word in words[:_FEW]:
            known[word] = max(1, await count(f"{FIRST} {word}") - once)
    ones = tuple(word for word, tokens in known.items() if tokens == 1)
    if len(ones) >= _ENOUGH:
        return WordCosts(ones, (1,) * len(ones), first, constant)
    return WordCosts(tuple(known), tuple(known.values()), first, constant)


class TextGenerator:
    """Generates texts by name: the same name, seed and nonce give the same text; the nonce changes its opening."""

    def __init__(self, costs: WordCosts, *, seed: int, nonce: str) -> None:
        """An empty nonce makes later runs with this seed repeat the texts."""
        self.costs = costs
        self._words: NDArray[np.object_] = np.array(costs.words, dtype=object)
        self._tokens = np.array(costs.tokens)
        self._even = (
            costs.tokens[0] if len(set(costs.tokens)) == 1 else 0
        )  # if all words have the same number of tokens
        self._by_cost = {cost: np.flatnonzero(self._tokens == cost) for cost in sorted(set(costs.tokens), reverse=True)}
        self._seed = seed
        self._nonce = nonce

    def text(self, name: str, tokens: int) -> tuple[str, int]:
        """Return a text and its tokens: exactly `tokens` if one-token words are known; at least FIRST."""
        opening = self._draw(f"opening {self._nonce} {self._seed} {name}", OPENING)
        # A word has at least one token, so this many words suffice.
        rest = self._draw(f"rest {self._seed} {name}", max(0, tokens - OPENING))
        places = np.concatenate([opening, rest])
        left = tokens - self.costs.first
        if self._even:
            places = places[: max(0, left // self._even)]
            left -= len(places) * self._even
        else:
            sums = np.cumsum(self._tokens[places])
            kept = int(np.searchsorted(sums, left, side="right"))
            left -= int(sums[kept - 1]) if kept else 0
            places = places[:kept]
            fills: list[int] = []
            for cost, those in self._by_cost.items():
                while left >= cost:
                    fills.append(int(those[len(fills) % len(those)]))
                    left -= cost
            places = np.concatenate([places, np.array(fills, dtype=places.dtype)])
        words: list[str] = self._words[places].tolist()
        return " ".join([FIRST, *words]), tokens - left

    def _draw(self, name: str, count: int) -> NDArray[np.int64]:
        # An extendable hash: seeding a random generator for each text would take longer than the text.
        drawn = np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * count), dtype="<u4")
        return (drawn % len(self._words)).astype(np.int64)
