"""The sequences that run: what memory each holds, and which of them goes when another needs its place.

Owns the lists of running jobs, their tables, and the choice of a victim. Gives and takes blocks through `blocks.py`;
does not know who waits or what a step holds.

That preemption always comes to an end, and lets something finish, rests on two things: the oldest running sequence is
never a victim for memory, and for another's first token a sequence is a victim `Policy.most_rescues` times at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from headrace.engine.memory.block_manager import BlockManager, PrefixMatch
from headrace.engine.scheduling.waiting_queue import QUANTUM, JobState, SequenceJob, TenantAccount


class RunningSet:
    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.decoding: list[SequenceJob] = []  # of the foreground, in the order in which they began to decode
        self.background: list[SequenceJob] = []  # decoding, those that were left out longest first
        self.prefilling: list[SequenceJob] = []
        self.pooling: list[SequenceJob] = []  # embeddings: in steps of their own
        self._streams: Counter[str] = Counter()  # decoding ones of the foreground, by surface

    def __len__(self) -> int:
        return len(self.decoding) + len(self.background) + len(self.prefilling) + len(self.pooling)

    def all(self) -> list[SequenceJob]:
        return self.decoding + self.background + self.prefilling + self.pooling

    @property
    def surfaces(self) -> Iterable[str]:
        """Of the streams of the foreground."""
        return self._streams.keys()

    def available(self, match: PrefixMatch, tokens: int) -> bool:
        """Whether there are blocks for `tokens` and, for each sequence that decodes, one to grow by."""
        blocks = self.blocks
        needed = blocks.blocks_for(tokens) - len(match.path) + len(self.decoding) + len(self.background)
        return needed <= blocks.available or not len(self)

    def start(self, job: SequenceJob, match: PrefixMatch, tokens: int) -> bool:
        """Holds memory for `tokens`; False where there is none."""
        table = self.blocks.acquire(match, tokens)
        if table is None:
            return False
        job.table = table
        job.match = None
        sequence = job.sequence
        sequence.blocks = table.blocks
        sequence.computed = table.cached_tokens
        job.room = len(table.blocks) * self.blocks.block_tokens
        self._run(job)
        return True

    def fork(self, job: SequenceJob, leader: SequenceJob) -> bool:
        """Another of the same request's sequences goes on from the leader's prompt; only its last token is computed
        again, for a result of its own. False where there is no memory."""
        assert leader.table is not None
        tokens = len(job.request.prompt) - 1
        table = self.blocks.fork(leader.table, tokens)
        if table is None:
            return False
        if not self.blocks.grow(table, tokens + 1):
            self.blocks.release(table, job.sequence.tokens, 0)
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
        """Its prompt is computed."""
        job.state = JobState.DECODING
        self.prefilling.remove(job)
        if job.background:
            self.background.append(job)
        else:
            self.decoding.append(job)
            self._streams[job.request.surface] += 1

    def prefill(self, job: SequenceJob) -> None:
        """So much was appended to it that it is a prompt once more."""
        self._leave(job)
        job.state = JobState.PREFILLING
        self.prefilling.append(job)

    def grow(self, job: SequenceJob, tokens: int) -> bool:
        assert job.table is not None
        if not self.blocks.grow(job.table, tokens):
            return False
        job.room = len(job.table.blocks) * self.blocks.block_tokens
        return True

    def stop(self, job: SequenceJob) -> None:
        """Lets its memory and its place go; what is computed can be found again until the memory is needed."""
        assert job.table is not None
        self._leave(job)
        job.account.running -= 1
        sequence = job.sequence
        self.blocks.release(job.table, sequence.tokens, sequence.computed)
        job.table = None
        job.room = 0
        sequence.blocks = []
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
        """Who goes when a running sequence cannot grow; None where one runs alone."""
        jobs = self.all()
        if len(jobs) < 2:
            return None
        eldest = min(jobs, key=lambda job: (job.background, job.number))
        crowded = self._crowded(jobs)
        return _most_expendable((job for job in jobs if job is not eldest), crowded, now)

    def background_victim(self, now: float, most_rescues: int) -> SequenceJob | None:
        """Background work that makes way for a foreground job."""
        jobs = [job for job in self.all() if job.background and not job.in_step and job.rescued < most_rescues]
        return _most_expendable(jobs, set(), now)

    def victim_for(self, waiting: SequenceJob, now: float, most_rescues: int) -> SequenceJob | None:
        """Who goes so that an urgent foreground job can start: one of a tenant that has more than its share and was
        served more, or one of its own tenant's that has more time than a job with a deadline."""
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
        """Tenants with more than an equal share, by weight, of what runs."""
        accounts = {job.account for job in jobs}
        fair = len(jobs) / sum(account.weight for account in accounts)
        return {account for account in accounts if account.running > fair * account.weight}


def _slack(job: SequenceJob, now: float) -> float:
    """Seconds by which it may be put off and still meet its deadline."""
    return job.deadline - now - job.answer


def _most_expendable(jobs: Iterable[SequenceJob], crowded: set[TenantAccount], now: float) -> SequenceJob | None:
    """Background before foreground, then of a tenant that has much running, then before its first token, then the one
    with most time, then the latest."""
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
