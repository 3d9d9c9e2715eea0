"""Speculation: proposing tokens that a sequence may say next, and keeping those that it does say.

Owns what every drafter is (Drafter), two that need no model (NgramDrafter, ReplayDrafter), and the verification
(sample_rows, verify). Lossless by equality: the row after each draft is sampled as if the drafts before it were output,
with the same random numbers, penalties, grammar and bounds, so what is kept is what would have been sampled without
drafts, whatever they were. Knows no hardware and no scheduler; engine.draft_model drafts with a model of its own,
and engine.speculator says how many tokens to propose.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.engine.interface.request import SequenceState
from headrace.engine.interface.sampling import SampleRow, sequence_seed
from headrace.engine.speculation.suffix_index import SuffixIndex

Mask = NDArray[np.uint32]
DraftRequests = Sequence[tuple[SequenceState, int]]  # sequences, and how many tokens to propose for each at most
Kept = TypeVar("Kept")


class Drafter(Protocol):
    @property
    def free(self) -> bool:
        """Proposals cost next to nothing: they may be asked for before it is known how many are worth verifying."""
        ...

    def pass_seconds(self, sequences: int) -> float:
        """What it takes to propose one token for each of so many sequences."""
        ...

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        """For each sequence, what may follow its tokens: as many tokens as are wanted, or fewer."""
        ...

    def propose(self, sequence: SequenceState, most: int) -> list[int]: ...

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended."""
        ...


# Verification.


def sample_rows(
    sequence: SequenceState, drafts: Sequence[int], masks: Sequence[Mask] | None = None, *, seed: int | None = None
) -> list[SampleRow]:
    """How to sample after the sequence's last token and after each draft, as if the drafts before were output.

    `masks` are its grammar's, and where they are fewer than the rows they say how many rows there are.
    """
    request = sequence.request
    sampling = request.sampling
    if seed is None:
        seed = sequence_seed(sampling.seed, sequence.index)
    position = len(sequence.tokens)
    exempt = request.min_tokens - sequence.output_count if request.stop_ids else 0
    seen: Mapping[int, int] = sequence.seen
    rows: list[SampleRow] = []
    for place in range(1 + len(drafts) if masks is None else len(masks)):
        mask = None if masks is None else masks[place]
        forbidden = request.stop_ids if place < exempt else frozenset[int]()
        if mask is not None and forbidden:
            # A grammar that allows only the end has nothing more to say, whatever min_tokens asks for.
            without = _without(mask, forbidden)
            mask = without if without.any() else mask
            forbidden = frozenset[int]()
        rows.append(SampleRow(sampling, position + place, seen, mask, forbidden, seed=seed))
        if seen and place < len(drafts):
            seen = _counted(seen, drafts[place])
    return rows


def _counted(seen: Mapping[int, int], token: int) -> Mapping[int, int]:
    counts = dict(seen)
    counts[token] = counts.get(token, 0) + 1
    return counts


def _without(mask: Mask, tokens: frozenset[int]) -> Mask:
    changed = mask.copy()
    for token in tokens:
        if token >> 5 < len(changed):
            changed[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return changed


def verify(drafts: Sequence[int], sampled: Sequence[int], *, stop_ids: frozenset[int] = frozenset(), most: int) -> int:
    """How many of the sampled tokens are the sequence's next ones: drafts that held, and the token after them.

    `sampled` are the tokens of `sample_rows`' rows, in order; -1 is no token. `most` are still wanted of the sequence.
    """
    count = 0
    for place, token in enumerate(sampled):
        if token < 0 or count >= most:
            break
        count += 1
        if token in stop_ids or place >= len(drafts) or token != drafts[place]:
            break
    return count


# Drafters.


class PerSequence(OrderedDict[int, tuple[SequenceState, Kept]]):
    """What is kept for each of at most `most` sequences; those that were asked for last stay."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find(self, sequence: SequenceState, make: Callable[[], Kept]) -> Kept:
        # The sequence is kept too, so that its id is nobody else's.
        found = self.get(id(sequence))
        if found is None:
            found = self[id(sequence)] = (sequence, make())
            if len(self) > self._most:
                self.popitem(last=False)
        else:
            self.move_to_end(id(sequence))
        return found[1]

    def forget(self, sequence: SequenceState) -> None:
        self.pop(id(sequence), None)


class NgramDrafter:
    """What followed the last tokens when they came before, in the same prompt and output.

    Of the places where the last two tokens came before, the `candidates` latest are compared with what is before them,
    and the one with the longest common past is followed. The further back the past agrees, the more is proposed.
    """

    free = True

    def __init__(
        self,
        *,
        least: int = 2,  # tokens that must agree
        window: int = 32768,  # tokens of a sequence that are looked at, the latest
        candidates: int = 8,
        at_once: int = 4096,  # tokens taken into the index at a time: a long prompt holds nothing up
        sequences: int = 1024,
    ) -> None:
        self._least = max(2, least)
        self._window = window
        self._candidates = candidates
        self._at_once = at_once
        self._indices: PerSequence[SuffixIndex] = PerSequence(sequences)

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [self.propose(sequence, most) for sequence, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        tokens = sequence.tokens
        index = self._indices.find(sequence, lambda: SuffixIndex(self._window, len(tokens)))
        index.add(tokens, self._at_once)
        if most <= 0:
            return []
        place, length = index.find(tokens, self._candidates)
        if length < self._least:
            return []
        most = min(most, 2 * length)
        found = tokens[place : place + most]
        while len(found) < most:  # what is followed reaches the end: it goes on with itself
            found += found[: most - len(found)]
        return found

    def forget(self, sequence: SequenceState) -> None:
        self._indices.forget(sequence)


class ReplayDrafter:
    """Proposes outputs that are known already, each token right with a given probability: for measuring alone."""

    free = True

    def __init__(self, outputs: Mapping[str, Sequence[Sequence[int]]], acceptance: float, *, seed: int = 0) -> None:
        """`outputs`: of each request by its id, those of its n. The same seed spoils the same tokens."""
        self._outputs = outputs
        self._acceptance = acceptance
        self._seed = seed

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [self.propose(sequence, most) for sequence, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        outputs = self._outputs.get(sequence.request.id, ())
        if sequence.index >= len(outputs):
            return []
        start = sequence.output_count
        return [
            token if self._right(sequence, start + place) else token - 1 if token else 1
            for place, token in enumerate(outputs[sequence.index][start : start + most])
        ]

    def forget(self, sequence: SequenceState) -> None:
        pass

    def _right(self, sequence: SequenceState, place: int) -> bool:
        name = zlib.crc32(sequence.request.id.encode(), self._seed) + (sequence.index << 32)
        return sequence_seed(name, 1 + place) < self._acceptance * 2.0**64
