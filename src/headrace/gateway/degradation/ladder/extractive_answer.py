"""Answers a question from the request's own sources without a model, by quoting sentences with their source numbers.

A sentence's score depends on BM25 over the question's words, on whether the names and numbers of the question are in
the sentence, before it or in its source, and on whether it contains the kind of thing that the question asks for. A
logistic function turns the score into a confidence; its weights and the least confidence were fitted on the training
half of the reading task (`benchmarks/ladder.py fit`). Deterministic. Knows no languages beyond its word lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from headrace.gateway.degradation.ladder.question_terms import (
    STOP,
    QuestionTerm,
    QuestionTerms,
    parse_questions,
    plain_form,
    stem,
)
from headrace.gateway.degradation.ladder.sentence_entities import has_kind
from headrace.gateway.degradation.shaping.conversation import ChatMessage
from headrace.gateway.degradation.shaping.sources import extract_numbered_passages, extract_tagged_sources
from headrace.gateway.folded_words import any_word, folded, raw_words, words
from headrace.gateway.requests.text_request import SourceText
from headrace.gateway.sentences import TextSpan, split_sentences

NOT_THERE: Final = "That is not in the sources."
_K1: Final = 1.2
_B: Final = 0.4  # lower than for documents, because sentences differ in length for good reasons
_CARRIED: Final = 0.9  # weight of a word in the sentence that a pronoun refers to
_MAX_SCORED: Final = 24  # sentences scored in full for each question
_PRONOUNS: Final = frozenset(
    """
    it its he she they his her their this these er sie es dies diese il elle ils elles ce el ella ellos hij zij het
    """.split()
)
_FIRST_WORD: Final = re.compile(r"\w+")


class SentenceWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a sentence's features; a logistic function turns their sum into a confidence."""

    bias: float = -0.04
    said: float = 4.49  # share of the question's terms that the sentence has
    around: float = 0.5  # share that only its source has
    named_around: float = -1.5  # share of the names that only its source has
    named_missing: float = -9.8  # share of the names that its source does not have either
    kind: float = 1.37  # it has the kind of thing that the question asks for
    no_kind: float = -3.38  # it does not
    nothing_asked: float = 2.35  # the question has only names
    nothing_new: float = -3.0  # it only repeats the question
    other_thing: float = -2.56  # it is about another thing of the same sort


class ExtractOptions(msgspec.Struct, frozen=True, kw_only=True):
    least: float = 0.5  # confidence below which the answer is not in the sources
    quotes: int = 2  # for each question
    margin: float = 0.2  # by which a further sentence may score lower than the best one
    says: float = 0.5  # share of the question's terms that a further sentence must have
    other: float = 0.5  # largest share of its words that it may have in common with a selected one
    not_there: str = NOT_THERE
    most_sources: int = 64
    most_characters: int = 200_000  # of all sources
    weights: SentenceWeights = msgspec.field(default_factory=SentenceWeights)


class Quote(msgspec.Struct, frozen=True):
    text: str  # verbatim
    number: int  # of the source, from 1
    id: str
    start: int  # characters into the source
    end: int
    confidence: float


class ExtractedAnswer(msgspec.Struct, frozen=True):
    text: str
    quotes: tuple[Quote, ...]  # empty: the answer is not in the sources
    confidence: float  # of the best sentence, selected or not


class _Sentence(msgspec.Struct):
    source: int
    start: int
    end: int
    stems: dict[str, list[TextSpan]]  # spans of the stems that any of the questions has
    length: int  # words, about
    referent: _Sentence | None  # the sentence that its pronoun refers to
    carried: frozenset[str]  # the stems of the referent


class ScoredSentence(msgspec.Struct):
    """A sentence scored for a question."""

    sentence: _Sentence
    features: tuple[float, ...]
    score: float  # before the logistic function

    @property
    def confidence(self) -> float:
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, self.score))))


def question_and_sources(
    messages: Sequence[ChatMessage], given: Sequence[SourceText] = ()
) -> tuple[str, list[str], tuple[SourceText, ...]]:
    """Return the question, the user's earlier turns, and the sources.

    Sources given as a field win over tagged ones in messages, and those over passages that an application numbered.
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
    """Answer a question. `before`: the user's earlier turns, oldest first."""
    options = options or ExtractOptions()
    scored = score_sentences(question, sources, before=before, options=options)
    quotes: list[Quote] = []
    best = 0.0
    for candidates in scored:
        best = max(best, candidates[0].confidence if candidates else 0.0)
        for each in _select(candidates, sources, options):
            quote = _quote(each, sources)
            if all((quote.number, quote.start) != (other.number, other.start) for other in quotes):
                quotes.append(quote)
    if not quotes:
        return ExtractedAnswer(options.not_there, (), best)
    return ExtractedAnswer(" ".join(f"{quote.text} [{quote.number}]" for quote in quotes), tuple(quotes), best)


def score_sentences(
    question: str, sources: Sequence[SourceText], *, before: Sequence[str] = (), options: ExtractOptions
) -> list[list[ScoredSentence]]:
    """Return for each question of the turn its sentences, likeliest first."""
    sources = _bounded(sources, options)
    texts = [source.text for source in sources]

    @lru_cache(maxsize=256)
    def is_name(word: str) -> bool:
        return _is_name(word, texts)

    questions = parse_questions(question, before, is_name=is_name)
    if not questions or not sources:
        return []
    split = _split(texts, {term.stem for each in questions for term in each.terms})
    return [_score_for(each, split, texts, options.weights) for each in questions]


def _bounded(sources: Sequence[SourceText], options: ExtractOptions) -> list[SourceText]:
    """Return as many sources as the bounds allow, the last one cut."""
    bounded: list[SourceText] = []
    left = options.most_characters
    for source in sources[: options.most_sources]:
        bounded.append(SourceText(source.id, source.text[:left]))
        left -= len(source.text)
        if left <= 0:
            break
    return bounded


def _is_name(word: str, texts: Sequence[str]) -> bool:
    """True if a source writes the word with a capital within a sentence."""
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
            stems: dict[str, list[TextSpan]] = {}
            while hit is not None and hit[1][0] < end:
                stems.setdefault(hit[0], []).append(hit[1])
                hit = next(hits, None)
            first = _FIRST_WORD.match(text, start)
            referent = before if first is not None and first[0].lower() in _PRONOUNS else None
            carried = referent.carried | referent.stems.keys() if referent is not None else frozenset[str]()
            before = _Sentence(place, start, end, stems, text.count(" ", start, end) + 1, referent, carried)
            found.append(before)
    return found


def _hits(text: str, wanted: set[str], likely: re.Pattern[str]) -> Iterator[tuple[str, TextSpan]]:
    """Yield the words with a wanted stem, in order. In ASCII texts, only words that begin like one are stemmed."""
    plain = text.isascii()
    for mark in likely.finditer(text.lower()) if plain else any_word().finditer(text):
        key = stem(mark[0] if plain else folded(mark[0]))
        if key in wanted:
            yield key, mark.span()


def _conflicts(sentence: _Sentence | None, question: QuestionTerms, text: str) -> bool:
    """True if the sentence is about another thing of the same sort: `refund policy` for `security policy`.

    `text`: the text of its source.
    """
    if sentence is None:
        return False
    start, end = sentence.start, sentence.end
    for one, other in question.pairs:
        here, there = sentence.stems.get(one), sentence.stems.get(other)
        if there and not here and all(_is_content(words(text[max(start, at - 32) : at])[-1:]) for at, _ in there):
            return True
        if here and not there and all(_is_content(words(text[at : min(end, at + 32)])[:1]) for _, at in here):
            return True
    return _conflicts(sentence.referent, question, text)


def _is_content(words: Sequence[str]) -> bool:
    return bool(words) and plain_form(words[0]) not in STOP


def _score_for(
    question: QuestionTerms, split: Sequence[_Sentence], texts: Sequence[str], weights: SentenceWeights
) -> list[ScoredSentence]:
    terms = question.terms
    mean = sum(each.length for each in split) / max(len(split), 1)
    rarity: dict[str, float] = {}
    inside: list[set[str]] = [set() for _ in texts]
    for term in terms:
        having = [each for each in split if term.stem in each.stems]
        rarity[term.stem] = math.log(1.0 + (len(split) - len(having) + 0.5) / (len(having) + 0.5))
        for each in having:
            inside[each.source].add(term.stem)
    named = [term for term in terms if term.named]
    asks = [term for term in terms if not term.named]
    found: list[ScoredSentence] = []
    silent: dict[int, list[_Sentence]] = {}  # by source, sentences without any term: all of them score the same
    for each in split:
        around = inside[each.source]
        if each.stems or each.carried:
            features = _features(each, around, named, asks, rarity, mean)
            found.append(ScoredSentence(each, features, score(features, weights)))
        elif around:
            silent.setdefault(each.source, []).append(each)
    for source, several in silent.items():
        features = _features(several[0], inside[source], named, asks, rarity, mean)
        points = score(features, weights)
        found.extend(ScoredSentence(each, features, points) for each in several[:_MAX_SCORED])
    found.sort(key=_likeliest)
    del found[_MAX_SCORED:]
    for one in found:
        text = texts[one.sentence.source][one.sentence.start : one.sentence.end]
        new = [(place, word) for place, word in enumerate(raw_words(text)) if stem(folded(word)) not in question.words]
        is_new = any(plain_form(word) not in STOP for _, word in new)
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
    """Return the features in the order of SentenceWeights, without the bias."""
    said = near = whole = 0.0
    for term in asks:
        weight = rarity[term.stem] * term.weight
        whole += weight
        count = len(sentence.stems.get(term.stem, ()))
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
        if term.stem not in sentence.stems and term.stem not in sentence.carried:
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


def _select(
    candidates: Sequence[ScoredSentence], sources: Sequence[SourceText], options: ExtractOptions
) -> list[ScoredSentence]:
    """Return the best sentence and others nearly as good that say something else, in the order of the sources."""
    if not candidates or candidates[0].confidence < options.least:
        return []
    selected = [candidates[0]]
    said = [_words_of(candidates[0], sources)]
    least = candidates[0].score - options.margin
    for each in candidates[1:]:
        if len(selected) == options.quotes or each.score < least or each.confidence < options.least:
            break
        if each.features[0] < options.says:
            continue
        mine = _words_of(each, sources)
        if all(len(mine & other) <= options.other * min(len(mine), len(other)) for other in said):
            selected.append(each)
            said.append(mine)
    return sorted(selected, key=lambda one: (one.sentence.source, one.sentence.start))


def _words_of(each: ScoredSentence, sources: Sequence[SourceText]) -> set[str]:
    sentence = each.sentence
    return set(words(sources[sentence.source].text[sentence.start : sentence.end]))


def _quote(each: ScoredSentence, sources: Sequence[SourceText]) -> Quote:
    sentence = each.sentence
    source = sources[sentence.source]
    text = source.text[sentence.start : sentence.end]
    return Quote(text, sentence.source + 1, source.id, sentence.start, sentence.end, each.confidence)
