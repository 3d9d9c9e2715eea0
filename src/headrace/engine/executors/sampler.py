"""The core's sampler: lays out all rows of a step in arrays and chooses all tokens in one call.

Laying out needs no logits, so it happens while the step that computes them runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.interface.sampling import NoTokenError, SampledToken, SampleRow

_NEVER: Final = float("-inf")
_CERTAIN: Final = 1e30  # a finite bias that makes a token the most likely, whatever the logits


class CoreSampleBatch:
    """The sampling parameters of each row of a step in the core's arrays and, after `choose`, the chosen tokens."""

    __slots__ = ("_arrays", "_logprobs", "_reported", "_tokens", "_top", "_top_logprobs", "count")

    def __init__(self, rows: Sequence[SampleRow], words: int) -> None:
        """`words` is the number of 32-bit words in a mask."""
        self.count = count = len(rows)
        numbers: list[tuple[float, float, float, float, float, float]] = []
        wanted: list[tuple[int, int]] = []
        keys: list[tuple[int, int]] = []
        seen: list[int] = []
        seen_counts: list[int] = []
        seen_offsets = [0]
        biased: list[int] = []
        biases: list[float] = []
        bias_offsets = [0]
        masks: list[NDArray[np.uint32]] = []
        mask_rows: list[int] = []
        self._reported = reported = list[int]()
        for row in rows:
            wish = row.sampling
            logprobs = -1 if wish.logprobs is None else wish.logprobs
            reported.append(logprobs)
            if row.given is None:
                numbers.append(
                    (
                        wish.temperature,
                        wish.top_p,
                        wish.min_p,
                        wish.repetition_penalty,
                        wish.frequency_penalty,
                        wish.presence_penalty,
                    )
                )
                wanted.append((wish.top_k, logprobs))
                # Only penalties need the tokens seen so far.
                if row.seen and wish.penalises:
                    seen += row.seen.keys()
                    seen_counts += row.seen.values()
                if wish.logit_bias:
                    biased += wish.logit_bias.keys()
                    biases += wish.logit_bias.values()
                if row.forbidden:
                    biased += row.forbidden
                    biases += [_NEVER] * len(row.forbidden)
            else:
                numbers.append((0.0, 1.0, 0.0, 1.0, 0.0, 0.0))
                wanted.append((0, logprobs))
                biased.append(row.given)
                biases.append(_CERTAIN)
            keys.append((wish.seed if row.seed is None else row.seed, row.position))
            seen_offsets.append(len(seen))
            bias_offsets.append(len(biased))
            if row.mask is None or row.given is not None:
                mask_rows.append(-1)
            else:
                mask_rows.append(len(masks))
                masks.append(row.mask)
        self._tokens = np.empty(count, dtype=np.int32)
        self._logprobs = np.empty(count, dtype=np.float32)
        most = max(0, max(reported, default=0))
        self._top = np.empty((count, most), dtype=np.int32)
        self._top_logprobs = np.empty((count, most), dtype=np.float32)
        self._arrays = (
            np.array(numbers, dtype=np.float32).reshape(count, 6),
            np.array(wanted, dtype=np.int32).reshape(count, 2),
            np.array(keys, dtype=np.uint64).reshape(count, 2),
            np.array(seen, dtype=np.int32),
            np.array(seen_counts, dtype=np.int32),
            np.array(seen_offsets, dtype=np.int32),
            np.array(biased, dtype=np.int32),
            np.array(biases, dtype=np.float32),
            np.array(bias_offsets, dtype=np.int32),
            np.stack(masks) if masks else np.zeros((0, words), dtype=np.uint32),
            np.array(mask_rows, dtype=np.int32),
        )

    def choose(
        self, core: _core.Sampler, logits: NDArray[np.float32], peaks: NDArray[np.float32] | None = None
    ) -> list[int]:
        """Return a token for every row, -1 if there is none. Changes the logits as the sampling parameters require."""
        core.choose(logits, *self._arrays, self._tokens, self._logprobs, self._top, self._top_logprobs, peaks)
        return self._tokens.tolist()

    def chosen(self, row: int) -> SampledToken:
        """Return a row's token, with log-probabilities if requested. Raise NoTokenError if it has none."""
        token = int(self._tokens[row])
        if token < 0:
            raise NoTokenError("no token can be chosen: all are masked, or the logits are NaN or infinite")
        count = self._reported[row]
        if count < 0:
            return SampledToken(token)
        likeliest = zip(self._top[row, :count].tolist(), self._top_logprobs[row, :count].tolist(), strict=True)
        return SampledToken(token, float(self._logprobs[row]), tuple(likeliest))


class Sampler:
    """The core's sampler for one vocabulary."""

    def __init__(self, vocab_size: int, pool: _core.Pool, isa: str) -> None:
        self._core = _core.Sampler(vocab_size, pool, isa)
        self._words = -(-vocab_size // 32)

    def lay_out(self, rows: Sequence[SampleRow]) -> CoreSampleBatch:
        return CoreSampleBatch(rows, self._words)

    def choose_laid_out(
        self, logits: NDArray[np.float32], rows: CoreSampleBatch, peaks: NDArray[np.float32] | None = None
    ) -> list[int]:
        """Return a token for every row, -1 if none can be chosen. Changes the logits as the sampling parameters
        require."""
        return rows.choose(self._core, logits, peaks)

    def choose(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Return a token for every row. Changes the logits as the sampling parameters require."""
        laid_out = self.lay_out(rows)
        laid_out.choose(self._core, logits)
        return [laid_out.chosen(row) for row in range(laid_out.count)]
