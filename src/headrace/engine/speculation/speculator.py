"""Chooses how many tokens to draft for each sequence, from past acceptance and the cost of a step.

Also combines a drafter and its draft lengths for the engine. Does not know hardware: the cost of a step is passed in as
a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.engine.interface.request import SequenceState
from headrace.engine.speculation.drafters import Drafter, DraftRequests, PerSequence

_ANSWER: Final = 128.0  # tokens of an answer before any has ended
_REMEMBERED: Final = 16  # answers that a mean covers
_SURFACES: Final = 64  # of which a mean is kept


class _Record(msgspec.Struct):
    """Recently verified and accepted drafts."""

    tried: float = 0.0
    held: float = 0.0


class DraftLength(msgspec.Struct):
    """Chooses draft lengths that maximise tokens per second, possibly zero.

    A draft is verified only if all before it were accepted, so the n-th is worth acceptance to the power of n tokens.
    Rows are added in the order of their worth while the longer step yields more tokens per second.
    """

    most: int = 8  # for one sequence
    prior: float = 0.6  # acceptance rate before anything is known
    memory: float = 0.9  # decay of a sequence's record per step
    _all: _Record = msgspec.field(default_factory=_Record)
    _records: PerSequence[_Record] = msgspec.field(default_factory=lambda: PerSequence[_Record](4096))

    def acceptance(self, sequence: SequenceState) -> float:
        """Return the probability that a draft is accepted if those before it were."""
        common = (self._all.held + 4.0 * self.prior) / (self._all.tried + 4.0)
        record = self._records.find(sequence, _Record)
        return min(0.98, (record.held + 2.0 * common) / (record.tried + 2.0))

    def observe(self, sequence: SequenceState, drafted: int, held: int) -> None:
        """Record that the first `held` of the drafted tokens were accepted."""
        tested = held + (held < drafted)
        for record, memory in ((self._records.find(sequence, _Record), self.memory), (self._all, 0.995)):
            record.tried = memory * record.tried + tested
            record.held = memory * record.held + held

    def forget(self, sequence: SequenceState) -> None:
        self._records.forget(sequence)

    def choose(
        self,
        available: DraftRequests,
        *,
        rows: int,
        room: int,
        step_seconds: Callable[[int], float],
        draft_seconds: Callable[[int], float] | None = None,
    ) -> list[int]:
        """Return, for each sequence, how many of the possible drafts are worth verifying.

        `rows` are the step's rows without drafts, `room` how many may be added. `step_seconds` returns the seconds of a
        step with so many rows, `draft_seconds` those of drafting one token for so many sequences.
        """
        worth: list[tuple[float, int, int]] = []
        for place, (sequence, most) in enumerate(available):
            acceptance = self.acceptance(sequence)
            value = acceptance
            for nth in range(min(most, self.most)):
                if value < 0.02:  # fraction of a token
                    break
                worth.append((-value, nth, place))
                value *= acceptance
        worth.sort()
        tokens = float(len(available))
        best_rate = tokens / step_seconds(rows) if worth else 0.0
        best = 0
        drafting = 0.0
        drafted = [0] * (self.most + 1)  # sequences with an n-th draft
        for count, (value, nth, _) in enumerate(worth[: max(0, room)], start=1):
            tokens -= value
            if draft_seconds is not None:
                drafted[nth] += 1
                drafting += draft_seconds(drafted[nth])
                drafting -= draft_seconds(drafted[nth] - 1) if drafted[nth] > 1 else 0.0
            rate = tokens / (step_seconds(rows + count) + drafting)
            if rate > best_rate:
                best_rate, best = rate, count
        lengths = [0] * len(available)
        for _, _, place in worth[:best]:
            lengths[place] += 1
        for length, (sequence, most) in zip(lengths, available, strict=True):
            if most and not length:
                self._fade(sequence)
        return lengths

    def _fade(self, sequence: SequenceState) -> None:
        """Slowly forget a record that is not updated, so that drafting is tried again."""
        for record, memory in ((self._records.find(sequence, _Record), 0.98), (self._all, 0.9995)):
            record.tried *= memory
            record.held *= memory


class Speculator:
    """A drafter, its draft lengths and its results."""

    def __init__(self, drafter: Drafter, lengths: DraftLength | None = None) -> None:
        self.drafter = drafter
        self.lengths = DraftLength() if lengths is None else lengths
        self.drafted = 0
        self.held = 0
        self._answers: dict[str, float] = {}  # mean tokens of an answer, by surface

    def draft(
        self,
        sequences: Sequence[SequenceState],
        *,
        rows: int,
        room: int,
        step_seconds: Callable[[int], float],
        fits: Callable[[SequenceState, list[int]], int] | None = None,
    ) -> None:
        """Set `drafted` of each sequence that the next step will sample; see DraftLength.choose. `fits` returns how
        many of the drafts a grammar accepts."""
        most = self.lengths.most
        token_seconds = 0.0 if self.drafter.free else step_seconds(rows) / rows
        wanted = [
            (
                sequence,
                # Leave room for the token after the last draft.
                min(most, sequence.request.max_tokens - sequence.output_count - 1)
                if sequence.request.speculate and self._pays_to_start(sequence, token_seconds)
                else 0,
            )
            for sequence in sequences
        ]
        drafts: list[list[int]] | None = None
        if self.drafter.free:
            drafts = self._fitting(wanted, self.drafter.propose_all(wanted), fits)
            wanted = [(sequence, len(found)) for (sequence, _), found in zip(wanted, drafts, strict=True)]
        lengths = self.lengths.choose(
            wanted,
            rows=rows,
            room=room,
            step_seconds=step_seconds,
            draft_seconds=None if self.drafter.free else self.drafter.pass_seconds,
        )
        if drafts is None:
            wanted = [(sequence, length) for (sequence, _), length in zip(wanted, lengths, strict=True)]
            drafts = self._fitting(wanted, self.drafter.propose_all(wanted), fits)
        for sequence, found, length in zip(sequences, drafts, lengths, strict=True):
            sequence.drafted = found[:length]

    def observe(self, sequence: SequenceState, drafted: int, held: int) -> None:
        """Record that the first `held` of the verified drafts were accepted."""
        if drafted:
            self.drafted += drafted
            self.held += held
            self.lengths.observe(sequence, drafted, held)

    def expected_tokens(self, sequence: SequenceState) -> float:
        """Return how many more tokens a sequence is expected to have: answers of its surface are about as long."""
        request, count = sequence.request, sequence.output_count
        mean = self._answers.get(request.surface, _ANSWER)
        # An answer that is longer than the mean is expected to go on for a while.
        return float(min(max(mean - count, mean / 4.0), request.max_tokens - count))

    def _pays_to_start(self, sequence: SequenceState, token_seconds: float) -> bool:
        """Return whether what drafts save in the rest of the answer exceeds the drafter's work on the prompt.

        Each draft saves its acceptance of a token's time; one draft at a time is assumed, because more change little.
        """
        start = self.drafter.start_seconds(sequence)
        if not start:
            return True
        acceptance = self.lengths.acceptance(sequence)
        return self.expected_tokens(sequence) * token_seconds * acceptance / (1.0 + acceptance) > start

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that has ended. Its length is what the next of its surface are expected to have."""
        tokens, surface = float(max(sequence.output_count, 1)), sequence.request.surface
        if surface in self._answers or len(self._answers) < _SURFACES:
            before = self._answers.get(surface, tokens)
            self._answers[surface] = before + (tokens - before) / _REMEMBERED
        self.drafter.forget(sequence)
        self.lengths.forget(sequence)

    def _fitting(
        self, wanted: DraftRequests, drafts: list[list[int]], fits: Callable[[SequenceState, list[int]], int] | None
    ) -> list[list[int]]:
        if fits is None:
            return drafts
        return [
            found[: fits(sequence, found)] if found and sequence.request.grammar is not None else found
            for (sequence, _), found in zip(wanted, drafts, strict=True)
        ]
