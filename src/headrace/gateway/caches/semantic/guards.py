"""Refuses to share an answer between two questions if a detail differs, however near their embeddings are.

Owns the guards: pure functions of two parsed questions that return a reason or None. A guard never decides that two
questions are the same; it refuses if something that changes the answer is on only one side.

    question, candidate ──each guard in turn──▶ the first reason, or None: then the score decides
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from headrace.gateway.caches.semantic.guarded_question import ParsedQuestion, parse_question
from headrace.gateway.caches.semantic.word_forms import ALTERNATIVE, OPPOSED, key_of, prefixed_form

Guard = Callable[[ParsedQuestion, ParsedQuestion], str | None]


def language(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Another script, or stop words of another language."""
    if question.script and candidate.script and question.script != candidate.script:
        return "language"
    differs = question.language and candidate.language and question.language != candidate.language
    return "language" if differs else None


def numbers(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Other numbers, or the same in other units."""
    return "number" if Counter(question.numbers) != Counter(candidate.numbers) else None


def bounds(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Under 200 against over 200."""
    return "bound" if question.bounds and candidate.bounds and not question.bounds & candidate.bounds else None


def modality(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Do I have to against may I."""
    return "modality" if {question.modality, candidate.modality} == {"must", "may"} else None


def dates(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Other dates, times, weekdays, relative days or seasons."""
    return "date" if set(question.dates) != set(candidate.dates) else None


def identifiers(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Code, flags, paths, versions and quoted texts must be the same."""
    there = candidate.identifiers | candidate.plain
    back = question.identifiers | question.plain
    same = question.identifiers <= there and candidate.identifiers <= back
    return None if same else "identifier"


def names(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """A capitalised name on one side must appear on the other, in any case."""
    for one, other in ((question, candidate), (candidate, question)):
        for name in one.names:
            if name not in other.plain and not any(part in other.plain for part in parse_question(name).plain):
                return "name"
    return None


def negation(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Negated on one side only, unless the other uses an opposite: not active, inactive."""
    one, other = question.denied, candidate.denied
    if not one and not other:
        return None
    if one and other:
        swapped = any(key in candidate.affirmed for key in set(one) - set(other)) and any(
            key in question.affirmed for key in set(other) - set(one)
        )
        return "negation" if swapped or (len(one) % 2 != len(other) % 2 and set(one) & set(other)) else None
    denying, plain = (question, candidate) if one else (candidate, question)
    return None if all(_is_expressed_by_opposite(key, plain, denying) for key in denying.denied) else "negation"


def _is_expressed_by_opposite(key: str, plain: ParsedQuestion, denying: ParsedQuestion) -> bool:
    """True if the plain question expresses a negated key by an opposite that the other does not have."""
    against = [each for each in OPPOSED.get(key, ()) if each in plain.affirmed and each not in denying.affirmed]
    return bool(against) or any(
        len(word.lemma) > len(key) and prefixed_form(word.lemma, key) for word in plain.words if key
    )


def polarity(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """A word on one side and its opposite on the other: enable and disable, inbound and outbound."""
    one, other = set(question.affirmed), set(candidate.affirmed)
    denied = set(question.denied) - set(candidate.denied)
    one |= {against for key in denied for against in OPPOSED.get(key, ())} - other
    for key in one - other:
        if any(against in other and against not in one for against in OPPOSED.get(key, ())):
            return "polarity"
    # If both questions have both words, the order must be the same.
    for key in set(question.affirmed) & set(candidate.affirmed):
        for against in OPPOSED.get(key, ()):
            if against in question.affirmed and against in candidate.affirmed:
                here = question.affirmed.index(key) < question.affirmed.index(against)
                there = candidate.affirmed.index(key) < candidate.affirmed.index(against)
                if here != there and not _either(question, key, against):
                    return "order"
    lemmas, others = {word.lemma for word in question.words}, {word.lemma for word in candidate.words}
    for lemma in lemmas - others:
        if any(prefixed_form(lemma, each) for each in others - lemmas) and not (question.denied or candidate.denied):
            return "polarity"
    return None


def _either(question: ParsedQuestion, key: str, against: str) -> bool:
    """True if both are offered as a choice, in which the order does not matter."""
    found = [word.key if word.key in (key, against) else word.text for word in question.words]
    first, last = sorted((found.index(key), found.index(against)))
    return bool({"or", "vs", "versus"} & set(found[first:last])) or _symmetric(question)


def alternatives(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Different ones of several exclusive alternatives: staging and production."""
    one, other = set(question.affirmed), set(candidate.affirmed)
    for key in one - other:
        if any(each in other and each not in one for each in ALTERNATIVE.get(key, ())):
            return "alternative"
    return None


# Kinds that may ask for the same thing, besides equal ones and "".
_ALIKE: Final = (
    {"how", "can"},
    {"how", "what"},
    {"whether", "can"},
    {"when", "what"},
    {"who", "what"},
    {"where", "what"},
    {"where", "how"},
    {"what", "definition"},
    {"how much", "what"},
    {"how long", "what"},
    {"how often", "what"},
    {"how many", "what"},
    {"can", "should"},
    {"should", "how"},
    {"should", "what"},
    {"whether", "should"},
)


def kind(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """Who against when, why against how, whether against where."""
    one, other = question.kind, candidate.kind
    if not one or not other or one == other or {one, other} in _ALIKE:
        return None
    return None if _symmetric(question) and _symmetric(candidate) else "kind of question"


def extent(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """All of it against one of it: every user against a user."""
    if {question.extent, candidate.extent} == {"all", "one"}:
        return "extent"
    for one, other in ((question, candidate), (candidate, question)):
        if one.every & other.single - other.every - one.single:
            return "extent"
    return None


def superlatives(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """A superlative on one side only, or a different one."""
    one, other = question.superlatives, candidate.superlatives
    if one == other:
        return None
    # "Which is better" may ask the same as "which is best".
    if one and other:
        return "superlative"
    plain = candidate if one else question
    compared = {word.key for word in plain.words if word.grade == "er"}
    return None if (one or other) <= compared else "superlative"


def direction(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """The same words in exchanged roles: from A to B, from B to A; agent and object."""
    here, there = question.letters, candidate.letters
    if here != there and sorted(here) == sorted(there) and not (_symmetric(question) and _symmetric(candidate)):
        return "direction"
    if (
        question.passive == candidate.passive
        and question.fronted == candidate.fronted
        and _exchanged(question, candidate)
    ):
        return None if _symmetric(question) and _symmetric(candidate) else "direction"
    for role in {role for role, _ in question.roles} & {role for role, _ in candidate.roles}:
        here = {key for name, keys in question.roles if name == role for key in keys}
        there = {key for name, keys in candidate.roles if name == role for key in keys}
        gone, come = here - there, there - here
        if gone & set(candidate.affirmed) and come & set(question.affirmed) and not _symmetric(question):
            return "direction"
    if _to_and_from(question, candidate):
        return "direction"
    same = Counter(question.numbers) == Counter(candidate.numbers) and question.numbers != candidate.numbers
    return "direction" if same and not (_symmetric(question) and _symmetric(candidate)) else None


def _to_and_from(question: ParsedQuestion, candidate: ParsedQuestion) -> bool:
    """True if one question goes to what the other comes from: ship to Norway, ship from Norway."""
    for one, other in ((question, candidate), (candidate, question)):
        towards, origin = _first_after(one, "to"), _first_after(other, "from")
        if towards & origin and not (_first_after(one, "from") or _first_after(other, "to")):
            return True
    return False


def _first_after(question: ParsedQuestion, preposition: str) -> set[str]:
    """Return the key of the word that follows each of these prepositions."""
    keys: set[str] = set()
    for place, word in enumerate(question.words):
        if word.text == preposition and not word.ends:
            after = (each for each in question.words[place + 1 : place + 4] if each.text not in _LINKS)
            keys |= {each.key for each in list(after)[:1] if not each.small}
    return keys


def _exchanged(question: ParsedQuestion, candidate: ParsedQuestion) -> bool:
    """True if the two differ only by exchanging two words."""
    one, other = question.content, candidate.content
    if len(one) != len(other) or len(one) < 3:
        return False
    places = [place for place, (here, there) in enumerate(zip(one, other, strict=True)) if here != there]
    if len(places) != 2:
        return False
    first, second = places
    if one[first] != other[second] or one[second] != other[first]:
        return False
    # A verb and its object, or a thing and its owner, change places in good English: upload files, file upload.
    return second > first + 1 or not (
        _beside(question, one[first], one[second]) or _beside(candidate, *other[first : second + 1])
    )


_LINKS: Final = frozenset("a an the of for my your our their its this that these those".split())
_JOINTS: Final = _LINKS | frozenset("to from in on at with by and".split())


def _beside(question: ParsedQuestion, first: str, second: str) -> bool:
    """True if nothing but articles and prepositions stands between two words."""
    keys = [word.key for word in question.words]
    start = keys.index(first) if first in keys else -1
    stop = keys.index(second, start + 1) if second in keys[start + 1 :] else -1
    return start < 0 or stop < 0 or all(word.text in _JOINTS for word in question.words[start + 1 : stop])


def _symmetric(question: ParsedQuestion) -> bool:
    """A question about both alike: the difference between A and B, A or B."""
    texts = {word.text for word in question.words}
    return bool({"or", "between", "versus", "vs", "differ", "compare", "both"} & texts) or "differenc" in question.plain


_SMALL_CHANGE: Final = 2  # words on each side that may differ in a substitution


def condition(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """A restriction on only one of two otherwise equal questions: ... for gift cards."""
    for one, other in ((question, candidate), (candidate, question)):
        extra = set(one.content) - set(other.content)
        missing = set(other.content) - set(one.content)
        if not missing and (extra - _UNSAID) & one.conditions and other.content:
            return "condition"
    return None


# Words for the product itself, which restrict nothing.
_UNSAID: Final = frozenset(map(key_of, "account application product website tool system software company".split()))


def substitution(question: ParsedQuestion, candidate: ParsedQuestion) -> str | None:
    """The same sentence except for a word that is no known synonym: reset my PIN, reset my router."""
    one, other = Counter(question.content), Counter(candidate.content)
    gone, come = list((one - other).elements()), list((other - one).elements())
    if not gone or not come or len(gone) > _SMALL_CHANGE or len(come) > _SMALL_CHANGE:
        return None
    if question.denied != candidate.denied:
        return None  # "fails to start", "does not start": the word that differs may be the one that denies
    if any(not any(_derived(here, there) for there in come) for here in gone) and _same_frame(question, candidate):
        return "another word"
    return None


_ENDINGS: Final = frozenset(
    """al ally anc ant abl at ator enc ent er ful ibl ic ical ion ism ist iti ity iv less ly ment ness or ous s ship t
    tion ur y""".split()
) | {""}


def _derived(one: str, other: str) -> bool:
    """True if two words have the same root: secure and security, translate and translator."""
    root = 0
    while root < min(len(one), len(other)) and one[root] == other[root]:
        root += 1
    return root >= 5 and one[root:] in _ENDINGS and other[root:] in _ENDINGS


def _same_frame(question: ParsedQuestion, candidate: ParsedQuestion) -> bool:
    """True if the shared words, stop words included, come in the same order."""
    one = [word.key for word in question.words]
    other = [word.key for word in candidate.words]
    shared = set(one) & set(other)
    if len(shared) < 3:
        return False
    return [key for key in one if key in shared] == [key for key in other if key in shared]


GUARDS: Final[tuple[Guard, ...]] = (
    language,
    numbers,
    bounds,
    dates,
    identifiers,
    names,
    polarity,
    negation,
    alternatives,
    kind,
    modality,
    extent,
    superlatives,
    direction,
    condition,
    substitution,
)


def refusal_reason(question: str, candidate: str, guards: Sequence[Guard] = GUARDS) -> str | None:
    """Return why the candidate's answer must not be served for the question, or None."""
    one, other = parse_question(question), parse_question(candidate)
    return next((reason for guard in guards if (reason := guard(one, other)) is not None), None)
