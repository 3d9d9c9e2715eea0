"""Speculative decoding: the Drafter interface, two drafters without a model, and verification.

Lossless by construction: the row after each draft is sampled as if the drafts before it were output, with the same
random numbers, penalties, grammar and bounds. So the accepted tokens are exactly those that sampling without drafts
would give. Does not know hardware or the scheduler; `draft_model.py` drafts with a model and `speculator.py` chooses
how many tokens to draft.
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
DraftRequests = Sequence[tuple[SequenceState, int]]  # sequences, and the most tokens to propose for each
Kept = TypeVar("Kept")


class Drafter(Protocol):
    @property
    def free(self) -> bool:
        """True if proposals cost almost nothing, so that they can be made before knowing how many are worth
        verifying."""
        ...

    def pass_seconds(self, sequences: int) -> float:
        """Return the seconds to propose one token for each of so many sequences."""
        ...

    def start_seconds(self, sequence: SequenceState) -> float:
        """Return the seconds to compute what the drafter does not have of a sequence, mostly its prompt."""
        ...

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        """Return, for each sequence, up to the requested number of tokens that may follow."""
        ...

    def propose(self, sequence: SequenceState, most: int) -> list[int]: ...

    def forget(self, sequence: SequenceState) -> None:
        """Called when a sequence has ended."""
        ...


# Verification.


def sample_rows(
    sequence: SequenceState,
    drafts: Sequence[int],
    masks: Sequence[Mask | None] | None = None,
    *,
    seed: int | None = None,
) -> list[SampleRow]:
    """Return how to sample after the last token and after each draft, as if the drafts before were output.

    `masks` are the grammar's, None where it allows everything. If there are fewer masks than rows, they determine the
    number of rows.
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
            # If the grammar allows only the end, min_tokens cannot be met.
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
    """Return how many of the sampled tokens to accept: the drafts that match, and the token after them.

    `sampled` are the tokens of the rows from `sample_rows`, in order; -1 is no token. `most` tokens are still wanted.
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
    """A value for each of at most `most` sequences, evicting the least recently used."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find(self, sequence: SequenceState, make: Callable[[], Kept]) -> Kept:
        # Keep the sequence alive, so that its id stays unique.
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


class _IndexedText:
    """The tokens in which a sequence's next tokens are looked for, and their index."""

    def __init__(self, sequence: SequenceState, window: int) -> None:
        prediction = sequence.request.prediction
        self.index = SuffixIndex(window, len(prediction) + len(sequence.tokens))
        self._taken = 0
        self._tokens = list(prediction)  # and what of the sequence's tokens is taken; empty without a prediction

    def tokens(self, sequence: SequenceState) -> list[int]:
        if not sequence.request.prediction:
            return sequence.tokens
        self._tokens += sequence.tokens[self._taken :]
        self._taken = len(sequence.tokens)
        return self._tokens


def _predicted_beginning(sequence: SequenceState, least: int) -> list[int]:
    """Return the rest of the prediction, while the output is shorter than `least` and begins it."""
    count, prediction = sequence.output_count, sequence.request.prediction
    if not prediction or count >= least or list(prediction[:count]) != sequence.output:
        return []
    return list(prediction[count:])


class NgramDrafter:
    """Proposes what followed an earlier occurrence of the last tokens, in the same prediction, prompt and output.

    Of the places where the last two tokens occurred before, the `candidates` latest are compared backwards, and the
    longest match is followed. The longer the match, the more tokens are proposed.
    """

    free = True

    def __init__(
        self,
        *,
        least: int = 2,  # tokens that must agree
        window: int = 32768,  # latest tokens of a sequence that are searched
        candidates: int = 8,
        at_once: int = 4096,  # tokens indexed per call, so that a long prompt delays nothing
        sequences: int = 1024,
    ) -> None:
        self._least = max(2, least)
        self._window = window
        self._candidates = candidates
        self._at_once = at_once
        self._indices: PerSequence[_IndexedText] = PerSequence(sequences)

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def start_seconds(self, sequence: SequenceState) -> float:
        return 0.0

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        return [self.propose(sequence, most) for sequence, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        text = self._indices.find(sequence, lambda: _IndexedText(sequence, self._window))
        tokens = text.tokens(sequence)
        text.index.add(tokens, self._at_once)
        if most <= 0:
            return []
        place, length = text.index.find(tokens, self._candidates)
        if length < self._least:
            return _predicted_beginning(sequence, self._least)[:most]
        most = min(most, 2 * length)
        found = tokens[place : place + most]
        while len(found) < most:  # the match reaches the end, so repeat it
            found += found[: most - len(found)]
        return found

    def forget(self, sequence: SequenceState) -> None:
        self._indices.forget(sequence)


class ReplayDrafter:
    """Proposes known outputs, each token right with a given probability; for measurements only."""

    free = True

    def __init__(self, outputs: Mapping[str, Sequence[Sequence[int]]], acceptance: float, *, seed: int = 0) -> None:
        """`outputs` holds the outputs of each request's n sequences by request id. The same seed spoils the same
        tokens."""
        self._outputs = outputs
        self._acceptance = acceptance
        self._seed = seed

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def start_seconds(self, sequence: SequenceState) -> float:
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
