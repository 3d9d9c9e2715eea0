"""Predicts when a request would get its first token.

Owns the estimates for that: prompt rows per second beside the running streams, how long a sequence holds its place,
answer lengths, and how wrong recent predictions were. The queue is treated as a fluid that is shared fairly: a tenant
with little queued waits for its own work and as much of each other tenant's. Decides nothing.
"""

from __future__ import annotations

import math
from typing import Final

from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.scheduling.waiting_queue import LONG, SHORT, FairQueue, SequenceJob

_REMEMBERED: Final = 64  # sequences that a mean covers
_MOST_WRONG: Final = 4.0  # bound of the correction


class Forecast:
    def __init__(self, model: StepTimeModel, *, max_rows: int, longest_step: float) -> None:
        self._model = model
        self._max_rows = max_rows
        self._longest_step = longest_step
        self._answers: dict[str, float] = {}  # tokens, by surface
        self._held: float | None = None  # seconds from a sequence's start to its end
        self._wrong = 0.0  # logarithm of measured / predicted wait
        self.base = 0.0  # seconds of a step of the running streams alone, with base_rows and base_pairs
        self.base_rows = 0
        self.base_pairs = 0
        self.target = longest_step  # seconds that a step may last at present

    def streams(self, seconds: float, rows: int, pairs: int, target: float) -> None:
        """Record how long a step of the running streams takes alone, and how long a step may last at present."""
        self.base, self.base_rows, self.base_pairs, self.target = seconds, rows, pairs, target

    def row_seconds(self) -> float:
        """Return the seconds of one prompt row beside the running streams."""
        rows = self._model.rows_within(
            self.target, most=max(self._max_rows - self.base_rows, 1), rows=self.base_rows, pairs=self.base_pairs
        )
        rows = max(rows, 1)
        return self._model.predict(self.base_rows + rows, self.base_pairs + pairs_of(0, rows)) / rows

    def service(self, rows: int, context: int) -> float:
        """Return the seconds to compute a prompt's `rows` after `context` tokens."""
        per_pair = self._model.coefficients[2]
        return rows * self.row_seconds() + per_pair * rows * context

    def least_service(self, rows: int) -> float:
        """Return the same with nothing else running."""
        return rows * self._model.predict(self._max_rows, 0) / self._max_rows

    def answer(self, surface: str, max_tokens: int) -> float:
        """Return the seconds that an answer is expected to take."""
        tokens = min(self._answers.get(surface, 128.0), max_tokens)
        return tokens * max(self.base, self._model.predict(self.base_rows + 1, self.base_pairs))

    def waiting(
        self, queue: FairQueue, job: SequenceJob, now: float, *, free: int, short: int, long: int
    ) -> tuple[float, float]:
        """Return the seconds until a new foreground request would start: most likely, and if its whole class went
        first.

        `free` more sequences could run now. `short` and `long` rows are left of the prompts that are being computed.
        """
        policy = queue.policy
        row = self.row_seconds()
        in_time, late = queue.before(job.line, job.account)
        if job.line == SHORT:
            share = 1.0 - policy.long_share if long or queue.live(LONG) else 1.0
            running, others = short, 0.0
        else:
            # Short prompts go first, except for a share.
            share, running = 1.0, long
            others = float(sum(queue.rows(SHORT)) + short)

        def seconds(rows: float, jobs: float) -> float:
            rows += running
            found = min(rows + others, rows / policy.long_share) if others else rows
            found *= row / share
            if jobs + 1 > free and self._held is not None:
                found = max(found, (jobs + 1 - free) * self._held)
            return found * math.exp(self._wrong)

        whole = seconds(in_time[0] + late[0], in_time[1] + late[1])
        turns = 1.0 - 1.0 / policy.late_turns
        likely = min(seconds(in_time[0] / turns, in_time[1] / turns), whole)
        return (likely if now + likely <= job.late else whole), whole

    def place_seconds(self, places: int) -> float:
        """Return the seconds until `count` sequences will have ended."""
        return places * (self._held if self._held is not None else self._longest_step)

    def started(self, foreseen: float, measured: float) -> None:
        """Compare a request's wait with its prediction, if the wait was long enough to be significant."""
        if foreseen > 0.05 or measured > 0.25:
            error = math.log(max(measured, 0.02) / max(foreseen, 0.02))
            self._wrong += max(-1.0, min(1.0, error)) / _REMEMBERED
            self._wrong = max(-math.log(_MOST_WRONG), min(math.log(_MOST_WRONG), self._wrong))

    def finished(self, job: SequenceJob, now: float, running: int) -> None:
        """Record a sequence that ended while `running` sequences ran, itself included."""
        surface = job.request.surface
        tokens = float(max(job.sequence.output_count, 1))
        before = self._answers.get(surface, tokens)
        self._answers[surface] = before + (tokens - before) / _REMEMBERED * 4
        if job.started is not None:
            # One place becomes free in this time, counting all places.
            each = max(now - job.started, 0.0) / max(running, 1)
            self._held = each if self._held is None else self._held + (each - self._held) / _REMEMBERED * 4
