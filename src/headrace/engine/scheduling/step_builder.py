"""A step being filled: its shares, its predicted time, and how many more rows fit. Does not decide whose turn it is."""

from __future__ import annotations

from headrace.engine.interface.image_rows import whole_image_cut
from headrace.engine.interface.request import SequenceState
from headrace.engine.scheduling.step_plan import SchedulerLimits, Share
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of
from headrace.engine.scheduling.waiting_queue import SequenceJob


class StepBuilder:
    def __init__(self, limits: SchedulerLimits, model: StepTimeModel, *, hidden: bool = False) -> None:
        self.hidden = hidden
        self.jobs: list[SequenceJob] = []
        self.shares: list[Share] = []
        self.rows = 0
        self.pairs = 0
        self.full = False  # a prompt did not fit completely
        self._results = 0  # wanted prompt rows
        self._limits = limits
        self._model = model

    @property
    def seconds(self) -> float:
        return self._model.predict(self.rows, self.pairs)

    def decode(self, jobs: list[SequenceJob]) -> None:
        """Add the pending tokens and the drafts of each stream."""
        shares, rows, pairs = self.shares, self.rows, self.pairs
        for job in jobs:
            sequence = job.sequence
            drafts = len(sequence.drafted)
            computed = sequence.computed
            count = len(sequence.tokens) - computed + drafts
            shares.append(Share(sequence, count, 1 + drafts))
            rows += count
            pairs += count * computed + (count * (count + 1) >> 1)
            job.in_step = True
        self.jobs += jobs
        self.rows, self.pairs = rows, pairs
        if rows > self._limits.max_rows:
            self._shorten()

    def has_room(self, seconds: float, kept: int = 0) -> bool:
        """True if another row ends within `seconds`, with `kept` rows left free."""
        rows = self.rows + kept
        return rows < self._limits.max_rows and self._model.predict(rows + 1, self.pairs) <= seconds

    def give(self, job: SequenceJob, seconds: float, *, kept: int = 0, least: int = 0) -> int:
        """Add rows of a prompt: as many as end within `seconds`, at least `least`, leaving `kept` rows free."""
        limits = self._limits
        sequence = job.sequence
        computed = sequence.computed
        pending = len(sequence.tokens) - computed
        most = min(pending, limits.max_rows - self.rows - kept)
        if limits.whole_images:
            most = self._room_for_image(job, most)
        if most <= 0:
            self.full = True
            return 0
        rows = self.rows + kept
        count = self._model.rows_within(seconds, most=most, rows=rows, pairs=self.pairs, context=computed)
        count = max(count, min(least, most))
        if not limits.causal:
            # An encoder's sequence is computed in one piece, however long that takes; a second one only if there is
            # time.
            count = pending if most == pending and (count == pending or not self.rows) else 0
        else:
            count = self._cut(job, count, pending)
            if limits.whole_images and 0 < count < pending:
                count = self._without_part(job, count, most)
        if count > 0:
            self._add(job, count)
        self.full = self.full or count < pending
        return count

    def _cut(self, job: SequenceJob, count: int, pending: int) -> int:
        """Return where a chunk of a prompt ends."""
        limits = self._limits
        sequence = job.sequence
        computed = sequence.computed
        if count < pending and count >= 2 * limits.block_tokens:
            count -= (computed + count) % limits.block_tokens  # end at a block boundary: whole blocks can be reused
        if limits.keeps_states:
            # The last whole block that others can reuse ends a chunk, because a state is kept only between steps.
            last = (len(sequence.tokens) - 1) // limits.block_tokens * limits.block_tokens
            if computed < last < computed + count:
                count = last - computed
        prompt = len(job.request.prompt)
        first = max(job.first, sequence.reported, computed)
        if first < prompt:
            if computed + count > prompt:
                count = prompt - computed  # prompt results come in a step of their own
            count = min(count, max(first - computed, 0) + limits.max_results - self._results)
        return count

    def _room_for_image(self, job: SequenceJob, most: int) -> int:
        """Return how many rows a prompt may have that begins with an image: what is kept for others does not count, and
        drafts make way, because the image is computed in one piece."""
        limits, sequence = self._limits, job.sequence
        computed = sequence.computed
        _, end = whole_image_cut(job.request.images, computed, computed + 1)
        needed = end - computed
        if needed > most and needed > 1:
            self._drop_drafts(self.rows + needed - limits.max_rows)
            most = max(most, min(needed, limits.max_rows - self.rows))
        return most

    def _without_part(self, job: SequenceJob, count: int, most: int) -> int:
        """Return a chunk of about `count` rows that ends before an image or after it."""
        computed = job.sequence.computed
        before, after = whole_image_cut(job.request.images, computed, computed + count)
        if before > computed:
            return before - computed
        return after - computed if after - computed <= most else 0

    def _add(self, job: SequenceJob, count: int) -> None:
        sequence = job.sequence
        computed = sequence.computed
        end = computed + count
        prompt = len(job.request.prompt)
        wanted = max(0, min(end, prompt) - max(job.first, sequence.reported, computed))
        self._results += wanted
        if end == len(sequence.tokens) and job.request.kind == "generate":
            wanted = max(wanted, 1)
        self.shares.append(Share(sequence, count, wanted))
        self.jobs.append(job)
        job.in_step = True
        self.rows += count
        self.pairs += pairs_of(computed, count)

    def _shorten(self) -> None:
        """Drop drafts, then sequences, that exceed the step's rows. The last ones go without."""
        self._drop_drafts(self.rows - self._limits.max_rows)
        while self.rows > self._limits.max_rows:
            self._set(len(self.shares) - 1, 0)
            self.shares.pop()
            self.jobs.pop().in_step = False

    def _drop_drafts(self, rows: int) -> None:
        """Drop drafts until so many rows are gone, or no draft is left. The last ones go first."""
        for place in reversed(range(len(self.shares))):
            if rows <= 0:
                return
            sequence = self.shares[place].sequence
            drafts = sequence.drafted
            # A prompt has no rows of drafts, even if the engine drafted for it as a stream.
            fewer = min(rows, self.shares[place].count - (len(sequence.tokens) - sequence.computed))
            if fewer > 0:
                del drafts[len(drafts) - fewer :]
                self._set(place, self.shares[place].count - fewer)
                rows -= fewer

    def _set(self, place: int, count: int) -> None:
        share = self.shares[place]
        sequence: SequenceState = share.sequence
        self.rows += count - share.count
        self.pairs += pairs_of(sequence.computed, count) - pairs_of(sequence.computed, share.count)
        share.count = count
        share.wanted = 1 + len(sequence.drafted)
