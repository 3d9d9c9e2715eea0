"""Delivers an answer's text with the events beside it: citations checked while streaming, and sentences to speak."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.gateway.requests.text_request import ChoiceDelta, NoteDelta, RestartDelta
from headrace.pipelines.citation_check import CheckedCitation, CitationCheck
from headrace.pipelines.run_state import RunState
from headrace.pipelines.sentence_stream import SentenceStream


class AnswerDelivery:
    """Turns the deltas of the model that answers into those that the client gets."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._sentences: SentenceStream | None = None
        self._begin()

    def _begin(self) -> None:
        state = self._state
        config = state.config
        state.text, state.sentences = "", []
        checks = "check" in config.stages and bool(state.sources)
        state.citations = CitationCheck(state.sources, unknown=config.check.unknown) if checks else None
        self._sentences = None
        if config.sentences or state.surface == "voice":
            self._sentences = SentenceStream(first_chars=config.first_sentence_chars, most_chars=config.sentence_chars)

    def take(self, delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
        if isinstance(delta, RestartDelta):
            self._begin()
            yield delta
            return
        if self._state.citations is None or not delta.content:
            yield from self._deliver(delta.content, delta, [])
            return
        text, citations = self._state.citations.feed(delta.content)
        yield from self._deliver(text, delta, citations)

    def finish(self) -> Iterator[ChoiceDelta]:
        """Yield what was held back."""
        if self._state.citations is not None:
            text, citations = self._state.citations.finish()
            if text:
                yield from self._deliver(text, ChoiceDelta(0), citations)
        if self._sentences is not None:
            yield from self._speak(self._sentences.finish())

    def _deliver(self, text: str, delta: ChoiceDelta, citations: list[CheckedCitation]) -> Iterator[ChoiceDelta]:
        state = self._state
        state.text += text
        if text or delta.reasoning or delta.calls:
            yield ChoiceDelta(
                0,
                content=text,
                reasoning=delta.reasoning,
                calls=delta.calls,
                logprobs=delta.logprobs,
                tokens=delta.tokens,
            )
        least = state.config.check.least_support
        for each in citations:
            yield NoteDelta(0, event="citation", data=each.described(least))
        if self._sentences is not None and text:
            yield from self._speak(self._sentences.feed(text))

    def _speak(self, pieces: list[str]) -> Iterator[ChoiceDelta]:
        sentences = self._state.sentences
        for piece in pieces:
            sentences.append(piece)
            yield NoteDelta(0, event="sentence", data={"index": len(sentences) - 1, "text": piece})
