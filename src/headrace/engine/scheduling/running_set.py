"""The running sequences: their memory, and the choice of a victim when another sequence needs memory or a place.

Does not know the queue or the step. Preemption always ends, and some sequence always finishes: the oldest running
sequence is never a victim for memory, and for another's first token a sequence is a victim at most
`Policy.most_rescues` times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_table import PrefixMatch
from headrace.engine.scheduling.waiting_queue import QUANTUM, JobState, SequenceJob, TenantAccount

GROWTH_TOKENS: Final = 16  # that a sequence gets memory for beside what it has; at most a block


class RunningSet:
    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.growth = min(GROWTH_TOKENS, blocks.block_tokens)
        self.decoding: list[SequenceJob] = []  # foreground, in the order in which they began to decode
        self.background: list[SequenceJob] = []  # background streams, those left out longest first
        self.prefilling: list[SequenceJob] = []
        self.pooling: list[SequenceJob] = []  # embeddings, in steps of their own
        self._streams: Counter[str] = Counter()  # foreground streams by surface

    def __len__(self) -> int:
        return len(self.decoding) + len(self.background) + len(self.prefilling) + len(self.pooling)

    def all(self) -> list[SequenceJob]:
        return self.decoding + self.background + self.prefilling + self.pooling

    @property
    def surfaces(self) -> Iterable[str]:
        """Surfaces of the foreground streams."""
        return self._streams.keys()

    def available(self, match: PrefixMatch, tokens: int) -> bool:
        """True if there are blocks for `tokens`, and for the next tokens of all decoding sequences. Of these, one in
        `block_tokens` needs a block with each token."""
        blocks = self.blocks
        streams = len(self.decoding) + len(self.background)
        needed = blocks.blocks_for(tokens) - len(match.path) + blocks.blocks_for(streams * self.growth)
        return needed <= blocks.available or not len(self)

    def start(self, job: SequenceJob, match: PrefixMatch, tokens: int) -> bool:
        """Acquire memory for `tokens`. Return False if there is none."""
        table = self.blocks.acquire(match, tokens)
        if table is None:
            return False
        job.table = table
        job.match = None
        sequence = job.sequence
        sequence.blocks = table.blocks
        sequence.state_slot, sequence.state_trail = table.state_slot, table.trail
        sequence.computed = table.cached_tokens
        job.room = len(table.blocks) * self.blocks.block_tokens
        self._run(job)
        return True

    def fork(self, job: SequenceJob, leader: SequenceJob) -> bool:
        """Start another of the request's sequences on the leader's prompt; only the last prompt token is recomputed,
        for its own result. Return False if there is no memory."""
        assert leader.table is not None
        if self.blocks.states is not None:
            return False  # the leader's state is already past the prompt
        tokens = len(job.request.prompt) - 1
        table = self.blocks.fork(leader.table, tokens)
        if table is None:
            return False
        if not self.blocks.grow(table, tokens + 1):
            self.blocks.release(table, job.sequence.prefix_ids, 0)
            return False
        job.table = table
        job.match = None
        sequence = job.sequence
        sequence.blocks = table.blocks
        sequence.computed = tokens
        job.room = len(table.blocks) * self.blocks.block_tokens
        self._run(job)
        return True

    def decode(self, job: SequenceJob) -> None:
        """Move a job whose prompt is computed to the streams."""
        job.state = JobState.DECODING
        self.prefilling.remove(job)
        if job.background:
            self.background.append(job)
        else:
            self.decoding.append(job)
            self._streams[job.request.surface] += 1

    def prefill(self, job: SequenceJob) -> None:
        """Move a stream back to the prompts, because many tokens were appended to it."""
        self._leave(job)
        job.state = JobState.PREFILLING
        self.prefilling.append(job)

    def grow(self, job: SequenceJob, tokens: int) -> bool:
        assert job.table is not None
        if not self.blocks.grow(job.table, tokens):
            return False
        job.room = len(job.table.blocks) * self.blocks.block_tokens
        return True

    def rewind(self, job: SequenceJob, held: int) -> None:
        """Take the job's recurrent state back to that after `held` of its drafts."""
        assert job.table is not None
        self.blocks.rewind_state(job.table, held)
        job.sequence.state_slot = job.table.state_slot

    def stop(self, job: SequenceJob) -> None:
        """Release the job's memory and place. Computed blocks stay reusable until the memory is needed."""
        assert job.table is not None
        self._leave(job)
        job.account.running -= 1
        sequence = job.sequence
        self.blocks.release(job.table, sequence.prefix_ids, sequence.computed)
        job.table = None
        job.room = 0
        sequence.blocks = []
        sequence.state_slot, sequence.state_trail = -1, []
        sequence.drafted.clear()

    def _run(self, job: SequenceJob) -> None:
        job.state = JobState.PREFILLING
        job.account.running += 1
        (self.pooling if job.request.kind == "embed" else self.prefilling).append(job)

    def _leave(self, job: SequenceJob) -> None:
        if job.state is JobState.DECODING and not job.background:
            self.decoding.remove(job)
            self._streams[job.request.surface] -= 1
            if not self._streams[job.request.surface]:
                del self._streams[job.request.surface]
        elif job.state is JobState.DECODING:
            self.background.remove(job)
        else:
            (self.pooling if job.request.kind == "embed" else self.prefilling).remove(job)

    # Victims

    def victim_for_memory(self, now: float) -> SequenceJob | None:
        """Return the job to preempt when a running sequence cannot grow; None if only one runs."""
        jobs = self.all()
        if len(jobs) < 2:
            return None
        eldest = min(jobs, key=lambda job: (job.background, job.number))
        crowded = self._crowded(jobs)
        return _most_expendable((job for job in jobs if job is not eldest), crowded, now)

    def background_victim(self, now: float, most_rescues: int) -> SequenceJob | None:
        """Return a background job to preempt for a foreground job."""
        jobs = [job for job in self.all() if job.background and not job.in_step and job.rescued < most_rescues]
        return _most_expendable(jobs, set(), now)

    def victim_for(self, waiting: SequenceJob, now: float, most_rescues: int) -> SequenceJob | None:
        """Return a job to preempt so that an urgent foreground job can start: one of a tenant with more than its share
        that was served more, or one of the same tenant with more time than a job with a deadline."""
        jobs = self.all()
        crowded = self._crowded(jobs)
        jobs = [job for job in jobs if job.rescued < most_rescues]
        level = waiting.account.charged[0] + QUANTUM
        richer = (
            job
            for job in jobs
            if (job.account in crowded and job.account.charged[0] > level) or job.account.over > waiting.account.over
        )
        found = _most_expendable(richer, crowded, now)
        if found is None and waiting.deadline < math.inf:
            least = _slack(waiting, now) + waiting.service
            patient = (job for job in jobs if job.account is waiting.account and _slack(job, now) > least)
            found = _most_expendable(patient, crowded, now)
        return found

    def _crowded(self, jobs: list[SequenceJob]) -> set[TenantAccount]:
        """Return the tenants that run more than an equal share by weight."""
        accounts = {job.account for job in jobs}
        fair = len(jobs) / sum(account.weight for account in accounts)
        return {account for account in accounts if account.running > fair * account.weight}


def _slack(job: SequenceJob, now: float) -> float:
    """Return the seconds by which a job can be delayed and still meet its deadline."""
    return job.deadline - now - job.answer


def _most_expendable(jobs: Iterable[SequenceJob], crowded: set[TenantAccount], now: float) -> SequenceJob | None:
    """Sort key: background first, then tenants with much running, then before the first token, then most slack, then
    latest."""
    return max(
        jobs,
        key=lambda job: (
            job.background,
            job.account in crowded,
            job.sequence.output_count == 0,
            _slack(job, now),
            job.number,
        ),
        default=None,
    )
