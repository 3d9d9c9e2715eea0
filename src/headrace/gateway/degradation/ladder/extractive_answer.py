"""An answer from the request's own sources without a model: the sentences that answer the question, quoted, each with
the number of its source; or that it is not in the sources.

Owns the weighing of sentences. A sentence is scored by BM25 over the question's words, by whether the names and numbers
that are asked about are there (in it, before it, or in its source), and by whether it has a thing of the kind that is
asked for. A logistic function of that says how likely it is the answer; its weights and the least confidence were
fitted on the training half of the reading task (`benchmarks/ladder.py fit`). Further sentences are taken only where
they are nearly as good and say something else. The same input gives the same answer. Knows no model and no language but
its lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from headrace.gateway.degradation.ladder.question_terms import (
    STOP,
    QuestionTerm,
    QuestionTerms,
    parse_questions,
    stem,
    without_accents,
)
from headrace.gateway.degradation.ladder.sentence_entities import has_kind
from headrace.gateway.degradation.ladder.sentences import TextSpan, split_sentences
from headrace.gateway.degradation.shaping.conversation import Message
from headrace.gateway.degradation.shaping.folded_words import ANY_WORD, folded, raw_words, words
from headrace.gateway.degradation.shaping.sources import extract_numbered_passages, extract_tagged_sources
from headrace.gateway.requests.text_request import ChoiceDelta, SourceText, TokenUsage

NOT_THERE: Final = "That is not in the sources."
_K1: Final = 1.2
_B: Final = 0.4  # sentences differ in length for good reasons, so that counts for less than with documents
_CARRIED: Final = 0.9  # what a word counts that stands in the sentence which an `it` means
_LOOKED_AT: Final = 24  # sentences that are weighed in full, by question
_IT: Final = frozenset(
    """
    it its he she they his her their this these er sie es dies diese il elle ils elles ce el ella ellos hij zij het
    """.split()
)
_FIRST: Final = re.compile(r"\w+")


class SentenceWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Of what is found out about a sentence; the sum goes through a logistic function."""

    bias: float = -0.04
    said: float = 4.49  # share of what is asked that the sentence says
    around: float = 0.5  # and that only its source says
    named_around: float = -1.5  # share of the names that only its source has
    named_missing: float = -9.8  # and that it has not either
    kind: float = 1.37  # it has what is asked for
    no_kind: float = -3.38  # it has not
    nothing_asked: float = 2.35  # there are names alone in the question
    nothing_new: float = -3.0  # it says only what the question says
    other_thing: float = -2.56  # it is about another thing of the same sort


class ExtractOptions(msgspec.Struct, frozen=True, kw_only=True):
    least: float = 0.5  # confidence below which it is not in the sources
    quotes: int = 2  # for each question
    margin: float = 0.2  # by which the score of a further sentence may be lower than the best one's
    says: float = 0.5  # share of what is asked that a further sentence must say
    other: float = 0.5  # most share of its words that it may have in common with one that was taken
    not_there: str = NOT_THERE
    most_sources: int = 64
    most_characters: int = 200_000  # of all sources
    weights: SentenceWeights = msgspec.field(default_factory=SentenceWeights)


class Quote(msgspec.Struct, frozen=True):
    text: str  # as it stands in the source
    number: int  # of the source, from 1
    id: str
    start: int  # characters into the source
    end: int
    confidence: float


class ExtractedAnswer(msgspec.Struct, frozen=True):
    text: str
    quotes: tuple[Quote, ...]  # none: it is not in the sources
    confidence: float  # of the best sentence, taken or not


class _Sentence(msgspec.Struct):
    source: int
    start: int
    end: int
    places: dict[str, list[TextSpan]]  # where the stems stand that any question asks for
    length: int  # words, about
    means: _Sentence | None  # the one that its `it` means
    carried: frozenset[str]  # that one's stems


class ScoredSentence(msgspec.Struct):
    """A sentence beside a question."""

    sentence: _Sentence
    features: tuple[float, ...]
    score: float  # before the logistic function

    @property
    def confidence(self) -> float:
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, self.score))))


def question_and_sources(
    messages: Sequence[Message], given: Sequence[SourceText] = ()
) -> tuple[str, list[str], tuple[SourceText, ...]]:
    """The question, the user's earlier turns, and the sources: those given as a field, else those that messages have.

    Tags come before passages that an application has numbered itself.
    """
    rest, sources = (list(messages), tuple(given)) if given else extract_tagged_sources(messages)
    texts: list[str] = []
    for message in rest:
        text = str(message.get("content") or "")
        if not sources or message["role"] == "user":
            found, text = extract_numbered_passages(text)
            sources = sources or found
        if message["role"] == "user":
            texts.append(text)
    return (texts[-1] if texts else ""), texts[:-1], sources


def extract_answer(
    question: str, sources: Sequence[SourceText], *, before: Sequence[str] = (), options: ExtractOptions | None = None
) -> ExtractedAnswer:
    """`before`: the user's earlier turns, oldest first."""
    options = options or ExtractOptions()
    weighed = score_sentences(question, sources, before=before, options=options)
    quotes: list[Quote] = []
    best = 0.0
    for candidates in weighed:
        best = max(best, candidates[0].confidence if candidates else 0.0)
        for each in _chosen(candidates, sources, options):
            quote = _quote(each, sources)
            if all((quote.number, quote.start) != (other.number, other.start) for other in quotes):
                quotes.append(quote)
    if not quotes:
        return ExtractedAnswer(options.not_there, (), best)
    return ExtractedAnswer(" ".join(f"{quote.text} [{quote.number}]" for quote in quotes), tuple(quotes), best)


def score_sentences(
    question: str, sources: Sequence[SourceText], *, before: Sequence[str] = (), options: ExtractOptions
) -> list[list[ScoredSentence]]:
    """For each question that is asked, its sentences, likeliest first."""
    sources = _bounded(sources, options)
    texts = [source.text for source in sources]

    @lru_cache(maxsize=256)
    def is_name(word: str) -> bool:
        return _is_name(word, texts)

    asked = parse_questions(question, before, is_name=is_name)
    if not asked or not sources:
        return []
    split = _split(texts, {term.stem for each in asked for term in each.terms})
    return [_weigh_one(each, split, texts, options.weights) for each in asked]


def _bounded(sources: Sequence[SourceText], options: ExtractOptions) -> list[SourceText]:
    """As many as may be looked at, the last one cut."""
    found: list[SourceText] = []
    left = options.most_characters
    for source in sources[: options.most_sources]:
        found.append(SourceText(source.id, source.text[:left]))
        left -= len(source.text)
        if left <= 0:
            break
    return found


def _is_name(word: str, texts: Sequence[str]) -> bool:
    """Whether the sources write it with a capital within a sentence."""
    wanted = word[:1].upper() + word[1:]
    for text in texts:
        at = text.find(f" {wanted}")
        while at >= 0:
            after = text[at + 1 + len(wanted) : at + 2 + len(wanted)]
            if at > 0 and text[at - 1] not in ".!?:\n" and not after.isalnum():
                return True
            at = text.find(f" {wanted}", at + 1)
    return False


def _split(texts: Sequence[str], wanted: set[str]) -> list[_Sentence]:
    likely = re.compile(rf"\b(?:{'|'.join(sorted(re.escape(each[:3]) for each in wanted))})\w*", re.ASCII)
    found: list[_Sentence] = []
    for place, text in enumerate(texts):
        hits = _hits(text, wanted, likely)
        hit = next(hits, None)
        if hit is None:
            continue
        before: _Sentence | None = None
        for start, end in split_sentences(text):
            places: dict[str, list[TextSpan]] = {}
            while hit is not None and hit[1][0] < end:
                places.setdefault(hit[0], []).append(hit[1])
                hit = next(hits, None)
            first = _FIRST.match(text, start)
            means = before if first is not None and first[0].lower() in _IT else None
            carried = means.carried | means.places.keys() if means is not None else frozenset[str]()
            before = _Sentence(place, start, end, places, text.count(" ", start, end) + 1, means, carried)
            found.append(before)
    return found


def _hits(text: str, wanted: set[str], likely: re.Pattern[str]) -> Iterator[tuple[str, TextSpan]]:
    """The words whose stems are wanted, in order. In plain ASCII only those are looked at that begin like one."""
    plain = text.isascii()
    for mark in likely.finditer(text.lower()) if plain else ANY_WORD.finditer(text):
        key = stem(mark[0] if plain else folded(mark[0]))
        if key in wanted:
            yield key, mark.span()


def _conflicts(sentence: _Sentence | None, question: QuestionTerms, text: str) -> bool:
    """Whether it is about another thing of the same sort: `refund policy` where the question says `security policy`.
    `text`: of its source."""
    if sentence is None:
        return False
    start, end = sentence.start, sentence.end
    for one, other in question.pairs:
        here, there = sentence.places.get(one), sentence.places.get(other)
        if there and not here and all(_content(words(text[max(start, at - 32) : at])[-1:]) for at, _ in there):
            return True
        if here and not there and all(_content(words(text[at : min(end, at + 32)])[:1]) for _, at in here):
            return True
    return _conflicts(sentence.means, question, text)


def _content(beside: Sequence[str]) -> bool:
    return bool(beside) and without_accents(beside[0]) not in STOP


def _weigh_one(
    question: QuestionTerms, split: Sequence[_Sentence], texts: Sequence[str], weights: SentenceWeights
) -> list[ScoredSentence]:
    terms = question.terms
    mean = sum(each.length for each in split) / max(len(split), 1)
    rarity: dict[str, float] = {}
    inside: list[set[str]] = [set() for _ in texts]
    for term in terms:
        having = [each for each in split if term.stem in each.places]
        rarity[term.stem] = math.log(1.0 + (len(split) - len(having) + 0.5) / (len(having) + 0.5))
        for each in having:
            inside[each.source].add(term.stem)
    named = [term for term in terms if term.named]
    asks = [term for term in terms if not term.named]
    found: list[ScoredSentence] = []
    silent: dict[int, list[_Sentence]] = {}  # sentences that say nothing of it, by source: all of one score alike
    for each in split:
        around = inside[each.source]
        if each.places or each.carried:
            features = _features(each, around, named, asks, rarity, mean)
            found.append(ScoredSentence(each, features, score(features, weights)))
        elif around:
            silent.setdefault(each.source, []).append(each)
    for source, several in silent.items():
        features = _features(several[0], inside[source], named, asks, rarity, mean)
        points = score(features, weights)
        found.extend(ScoredSentence(each, features, points) for each in several[:_LOOKED_AT])
    found.sort(key=_likeliest)
    del found[_LOOKED_AT:]
    for one in found:
        text = texts[one.sentence.source][one.sentence.start : one.sentence.end]
        new = [(place, word) for place, word in enumerate(raw_words(text)) if stem(folded(word)) not in question.words]
        is_new = any(without_accents(word) not in STOP for _, word in new)
        has = question.kind is None or has_kind(question.kind, text, new)
        kind = (0.0, 0.0) if question.kind is None else (1.0, 0.0) if has else (0.0, 1.0)
        other = _conflicts(one.sentence, question, texts[one.sentence.source])
        one.features = (*one.features[:4], *kind, one.features[6], 0.0 if is_new else 1.0, 1.0 if other else 0.0)
        one.score = score(one.features, weights)
    found.sort(key=_likeliest)
    return found


def _likeliest(one: ScoredSentence) -> tuple[float, int, int]:
    return -one.score, one.sentence.source, one.sentence.start


def _features(
    sentence: _Sentence,
    around: set[str],
    named: Sequence[QuestionTerm],
    asks: Sequence[QuestionTerm],
    rarity: dict[str, float],
    mean: float,
) -> tuple[float, ...]:
    """In the order of Weights, the bias apart."""
    said = near = whole = 0.0
    for term in asks:
        weight = rarity[term.stem] * term.weight
        whole += weight
        count = len(sentence.places.get(term.stem, ()))
        if count:
            norm = _K1 * (1.0 - _B + _B * sentence.length / mean)
            said += weight * min(count * (_K1 + 1.0) / (count + norm), 1.25)
        elif term.stem in sentence.carried:
            said += _CARRIED * weight
        elif term.stem in around:
            near += weight
    names = away = missing = 0.0
    for term in named:
        weight = rarity[term.stem] * term.weight
        names += weight
        if term.stem not in sentence.places and term.stem not in sentence.carried:
            if term.stem in around:
                away += weight
            else:
                missing += weight
    return (
        said / whole if whole else 0.0,
        near / whole if whole else 0.0,
        away / names if names else 0.0,
        missing / names if names else 0.0,
        0.0,
        0.0,
        0.0 if asks else 1.0,
        0.0,
        0.0,
    )


def score(features: Sequence[float], weights: SentenceWeights) -> float:
    said, around, named_around, named_missing, kind, no_kind, nothing_asked, nothing_new, other_thing = features
    return (
        weights.bias
        + weights.said * said
        + weights.around * around
        + weights.named_around * named_around
        + weights.named_missing * named_missing
        + weights.kind * kind
        + weights.no_kind * no_kind
        + weights.nothing_asked * nothing_asked
        + weights.nothing_new * nothing_new
        + weights.other_thing * other_thing
    )


def _chosen(
    candidates: Sequence[ScoredSentence], sources: Sequence[SourceText], options: ExtractOptions
) -> list[ScoredSentence]:
    """The best, and such as are nearly as good and say something else; in the order of the sources."""
    if not candidates or candidates[0].confidence < options.least:
        return []
    taken = [candidates[0]]
    said = [_said(candidates[0], sources)]
    least = candidates[0].score - options.margin
    for each in candidates[1:]:
        if len(taken) == options.quotes or each.score < least or each.confidence < options.least:
            break
        if each.features[0] < options.says:
            continue
        mine = _said(each, sources)
        if all(len(mine & other) <= options.other * min(len(mine), len(other)) for other in said):
            taken.append(each)
            said.append(mine)
    return sorted(taken, key=lambda one: (one.sentence.source, one.sentence.start))


def _said(each: ScoredSentence, sources: Sequence[SourceText]) -> set[str]:
    sentence = each.sentence
    return set(words(sources[sentence.source].text[sentence.start : sentence.end]))


def _quote(each: ScoredSentence, sources: Sequence[SourceText]) -> Quote:
    sentence = each.sentence
    source = sources[sentence.source]
    text = source.text[sentence.start : sentence.end]
    return Quote(text, sentence.source + 1, source.id, sentence.start, sentence.end, each.confidence)


# Handing over


def answer_piece(found: ExtractedAnswer) -> ChoiceDelta:
    """The whole answer at once; nothing of it was generated, so it took no tokens."""
    return ChoiceDelta(0, content=found.text, finish="stop", usage=TokenUsage())


def extraction_report(found: ExtractedAnswer) -> dict[str, Any]:
    """For the part of an answer's body that says how it was made."""
    return {
        "extracted": True,
        "confidence": round(found.confidence, 3),
        "citations": [
            {"number": each.number, "id": each.id, "source_start": each.start, "source_end": each.end}
            for each in found.quotes
        ],
    }
