"""The waiting queue: fair among tenants, by urgency within a tenant. O(log n) per operation; knows no memory and no
step.

Each computed token is charged to its tenant, divided by the tenant's weight, and the waiting tenant with the lowest
charge goes first (virtual token counters, as in "Fairness in Serving Large Language Models"). A tenant that returns
after a pause starts at the level of the others: it can neither save up turns nor owe any. A tenant that recently took
several times its fair share (`tenant_service.py`) goes after all others. Requests of one tenant, and of tenants whose
charges agree within a quantum, go by urgency. Requests that must miss their first-token objective let the others go
first, except for one turn in `Policy.late_turns`.

Three classes wait apart, because a step has a budget for each: short prompts, long prompts and background work.
Background work has its own charges, so a tenant's batch work on an idle machine does not count against its chats.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from enum import Enum
from typing import Final

from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState
from headrace.engine.memory.block_table import BlockTable, PrefixMatch
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.tenant_service import RecentService, TenantAccount
from headrace.surfaces import Surface

SHORT: Final = 0
LONG: Final = 1
BACKGROUND: Final = 2
CLASSES: Final = (SHORT, LONG, BACKGROUND)
QUANTUM: Final = 2048.0  # tokens; charges that differ by less count as equal
_BEGINNING: Final = 64  # leading tokens compared to find requests that may share a prefix
_MOST_ALIKE: Final = 8  # of those, at a time
_FORGIVEN: Final = 1  # quanta by which a tenant with a late request must be behind to go before one that can be in time


class JobState(Enum):
    WAITING = 0  # in the queue
    FOLLOWING = 1  # waiting until another has computed the shared prefix
    PREFILLING = 2
    DECODING = 3
    DONE = 4


class SequenceJob:
    """A sequence and the scheduler's state of it."""

    __slots__ = (
        "account",
        "admitted",
        "answer",
        "begins",
        "chain",
        "charged",
        "deadline",
        "due",
        "ends",
        "entry",
        "first",
        "followers",
        "foreseen",
        "in_step",
        "late",
        "line",
        "match",
        "number",
        "preempted",
        "request",
        "rescued",
        "room",
        "rows",
        "sequence",
        "service",
        "skipped",
        "started",
        "state",
        "surface",
        "table",
        "top",
        "turn",
        "urgency",
        "waits_for",
    )

    def __init__(self, number: int, sequence: SequenceState, surface: Surface, account: TenantAccount) -> None:
        self.number = number  # in order of admission
        self.sequence = sequence
        self.request: GenerationRequest = sequence.request
        self.surface = surface
        self.account = account
        self.state = JobState.WAITING
        self.line = BACKGROUND if surface.background else SHORT
        self.deadline = math.inf if sequence.request.deadline is None else sequence.request.deadline
        self.first = sequence.request.first_result if sequence.index == 0 else len(sequence.request.prompt)
        self.match: PrefixMatch | None = None
        self.table: BlockTable | None = None
        self.room = 0  # token capacity of the table's blocks
        self.rows = 0  # rows to compute before its next token, as of queuing
        self.service = 0.0  # seconds that those rows take
        self.answer = 0.0  # expected seconds of the rest of its answer
        self.due = math.inf  # when the first token is due
        self.late = math.inf  # latest start to meet that
        self.urgency = 0.0
        self.admitted = 0.0
        self.foreseen = 0.0  # predicted seconds of waiting
        self.charged = False  # its prompt was charged; only once, however often it is preempted
        self.started: float | None = None  # when it first ran
        self.preempted = 0
        self.rescued = 0  # times it was preempted for another's first token
        self.skipped = 0  # steps that it was left out of
        self.in_step = False
        self.ends: tuple[FinishReason, str] | None = None  # how it ends when the step under way is settled
        self.begins = 0  # hash of its first tokens and its salt, while it waits as a long prompt
        self.chain: list[int] | None = None  # fingerprints of its prefixes, block by block
        self.followers: list[tuple[int, int, SequenceJob]] = []  # heap: tokens after which each is woken
        self.top = 0  # tokens of the prefix that it computes and others may wait for
        self.waits_for: SequenceJob | None = None
        self.turn: _Turn | None = None  # where it is queued
        self.entry: QueueEntry | None = None  # its entry there

    @property
    def background(self) -> bool:
        return self.line == BACKGROUND


QueueEntry = tuple[float, int, SequenceJob]  # key, tie-breaker, job


class _Turn:
    """One tenant's jobs in one line; never empty."""

    __slots__ = ("account", "gone", "jobs", "line", "listed", "rows")

    def __init__(self, account: TenantAccount, line: _Line) -> None:
        self.account = account
        self.line = line
        self.jobs: list[QueueEntry] = []  # heap
        self.gone = 0  # dropped jobs that are still in the heap
        self.rows = 0  # rows of the other jobs
        self.listed = -1  # the valid one of the line's entries

    def head(self) -> SequenceJob:
        jobs = self.jobs
        while jobs[0][2].entry is not jobs[0]:
            heapq.heappop(jobs)
            self.gone -= 1
        return jobs[0][2]


class _Line:
    """Waiting tenants, the least charged first; equal ones by the urgency of their first job."""

    def __init__(self, lane: int, ties: itertools.count[int]) -> None:
        self.lane = lane
        self.live = 0
        self.rows = 0
        self._ties = ties
        self._turns: dict[TenantAccount, _Turn] = {}
        self._heap: list[tuple[bool, float, float, int, _Turn]] = []

    def push(self, job: SequenceJob, key: float) -> None:
        account = job.account
        turn = self._turns.get(account)
        if turn is None:
            turn = self._turns[account] = _Turn(account, self)
        job.turn = turn
        # A job that was dropped and returns may still have its old entry in the heap.
        entry = job.entry = (key, next(self._ties), job)
        heapq.heappush(turn.jobs, entry)
        self.live += 1
        self.rows += job.rows
        turn.rows += job.rows
        if turn.jobs[0] is entry:
            self._list(turn)

    def head(self) -> SequenceJob | None:
        heap = self._heap
        while heap:
            over, charged, key, tie, turn = heap[0]
            if tie != turn.listed:
                heapq.heappop(heap)
                continue
            job = turn.head()
            truly = self._rank(turn)
            if truly == (over, charged, key):
                return job
            turn.listed = next(self._ties)
            heapq.heapreplace(heap, (*truly, turn.listed, turn))
        return None

    def drop(self, job: SequenceJob) -> None:
        turn = job.turn
        assert turn is not None
        job.turn = job.entry = None
        self.live -= 1
        self.rows -= job.rows
        turn.rows -= job.rows
        turn.gone += 1
        if turn.gone == len(turn.jobs):
            turn.listed = -1
            del self._turns[turn.account]
        elif turn.gone > 32 and 2 * turn.gone > len(turn.jobs):
            turn.jobs = [entry for entry in turn.jobs if entry[2].entry is entry]
            heapq.heapify(turn.jobs)
            turn.gone = 0

    def before(self, account: TenantAccount) -> tuple[float, float]:
        """Return the rows and jobs ahead of another job of this tenant: all of its own, and as much of each other
        tenant's."""
        if not self.live:
            return 0.0, 0.0
        turn = self._turns.get(account)
        rows, jobs = (turn.rows, len(turn.jobs) - turn.gone) if turn is not None else (0, 0)
        others = (len(self._turns) - (turn is not None)) / account.weight
        each = self.rows / self.live
        return min(self.rows, rows + (rows + each) * others), min(self.live, jobs + (jobs + 1.0) * others)

    def list_again(self, account: TenantAccount) -> None:
        """Re-list a tenant that is no longer over its share, because it may go sooner."""
        turn = self._turns.get(account)
        if turn is not None:
            turn.head()
            self._list(turn)

    def _rank(self, turn: _Turn) -> tuple[bool, float, float]:
        over = turn.account.over and not self.lane
        return over, turn.account.charged[self.lane] // QUANTUM, turn.jobs[0][0]

    def _list(self, turn: _Turn) -> None:
        turn.listed = next(self._ties)
        heapq.heappush(self._heap, (*self._rank(turn), turn.listed, turn))
        if len(self._heap) > 64 + 2 * len(self._turns):
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].listed]
            heapq.heapify(self._heap)


class FairQueue:
    def __init__(self, policy: Policy, *, idle_tenants: int) -> None:
        self.policy = policy
        self.queued = 0  # waiting sequences, those following another's prefix included
        self.queued_tokens = 0  # prompt tokens of those
        self._idle_tenants = idle_tenants
        self._accounts: dict[str, TenantAccount] = {}
        self._idle: OrderedDict[str, TenantAccount] = OrderedDict()  # without work, longest idle first
        self._floor = [0.0, 0.0]  # charge at which a returning tenant starts
        self._turns = [0, 0, 0]
        self._usage = RecentService()
        self._alike: dict[int, dict[SequenceJob, None]] = {}  # long prompts that begin alike, oldest first
        ties = itertools.count()
        self._on_time = [_Line(int(line == BACKGROUND), ties) for line in CLASSES]
        self._late = [_Line(int(line == BACKGROUND), ties) for line in CLASSES]

    def __len__(self) -> int:
        """Jobs in the queue itself."""
        return sum(line.live for line in (*self._on_time, *self._late))

    def account(self, tenant: str) -> TenantAccount:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount(tenant)
        self._idle.pop(tenant, None)
        return account

    def forget_idle(self, account: TenantAccount) -> None:
        """Bound the accounts of tenants without work. Call it when a tenant's work may have ended."""
        if account.queued or account.running:
            return
        self._idle[account.name] = account
        self._idle.move_to_end(account.name)
        if len(self._idle) > self._idle_tenants:
            name, oldest = self._idle.popitem(last=False)
            self._usage.forget(oldest)
            del self._accounts[name]

    def enter(self, job: SequenceJob) -> None:
        """Count a job that begins to wait."""
        tokens = len(job.request.prompt)
        self.queued += 1
        self.queued_tokens += tokens
        job.account.queued += 1
        job.account.queued_tokens += tokens

    def leave(self, job: SequenceJob) -> None:
        """Stop counting a job that no longer waits, neither here nor for another's prefix."""
        tokens = len(job.request.prompt)
        self.queued -= 1
        self.queued_tokens -= tokens
        job.account.queued -= 1
        job.account.queued_tokens -= tokens

    @property
    def accounts(self) -> list[TenantAccount]:
        return list(self._accounts.values())

    def live(self, line: int) -> int:
        return self._on_time[line].live + self._late[line].live

    def rows(self, line: int) -> tuple[int, int]:
        """Return the waiting rows: of jobs that can be in time, and of late ones."""
        return self._on_time[line].rows, self._late[line].rows

    def before(self, line: int, account: TenantAccount) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the rows and jobs ahead of another job of a tenant: of those that can be in time, and of late ones."""
        return self._on_time[line].before(account), self._late[line].before(account)

    def push(self, job: SequenceJob, now: float) -> None:
        job.state = JobState.WAITING
        account = job.account
        lane = int(job.line == BACKGROUND)
        if not account.waiting[lane]:
            account.charged[lane] = max(account.charged[lane], self._floor[lane])
        account.waiting[lane] += 1
        if job.line == LONG:
            request = job.request
            job.begins = hash((request.salt, job.sequence.kv_variant, job.sequence.prompt_ids[:_BEGINNING]))
            self._alike.setdefault(job.begins, {})[job] = None
        if now <= job.late:
            self._on_time[job.line].push(job, job.urgency)
        else:
            self._late[job.line].push(job, job.urgency)

    def head(self, line: int, now: float) -> SequenceJob | None:
        """Return the next job of a class."""
        on_time, late = self._on_time[line], self._late[line]
        first = on_time.head()
        while first is not None and now > first.late:
            on_time.drop(first)
            late.push(first, first.urgency)
            first = on_time.head()
        second = late.head()
        if second is None or first is None:
            return first or second
        lane = on_time.lane
        if first.account.over != second.account.over and not lane:
            return second if first.account.over else first
        behind = first.account.charged[lane] // QUANTUM - second.account.charged[lane] // QUANTUM
        if abs(behind) <= _FORGIVEN:
            turns = self.policy.late_turns
            return second if self._turns[line] % turns == turns - 1 else first
        return second if behind > 0 else first

    def take(self, job: SequenceJob) -> None:
        """Remove the head of its class because it starts."""
        if self._late[job.line].live:
            self._turns[job.line] += 1
        lane = int(job.line == BACKGROUND)
        self._floor[lane] = max(self._floor[lane], job.account.charged[lane])
        self.drop(job)

    def drop(self, job: SequenceJob) -> None:
        """Remove a job from the queue."""
        turn = job.turn
        if turn is None:
            return
        turn.line.drop(job)
        lane = int(job.line == BACKGROUND)
        account = job.account
        account.waiting[lane] -= 1
        if job.line == LONG:
            alike = self._alike[job.begins]
            del alike[job]
            if not alike:
                del self._alike[job.begins]

    def alike(self, job: SequenceJob) -> list[SequenceJob]:
        """Return some of the waiting long prompts that begin like this one."""
        if not self._alike:
            return []
        request = job.request
        begins = hash((request.salt, job.sequence.kv_variant, job.sequence.prompt_ids[:_BEGINNING]))
        return list(itertools.islice(self._alike.get(begins, ()), _MOST_ALIKE))

    def charge(self, job: SequenceJob, tokens: float) -> None:
        """Charge tokens to the job's tenant: a prompt's when it starts, an answer's as they come."""
        job.account.charged[job.line == BACKGROUND] += tokens / (job.request.weight * job.surface.weight)

    def computed(self, job: SequenceJob, tokens: float) -> None:
        """Count tokens computed for the job's tenant."""
        if job.line != BACKGROUND:
            self._usage.add(job.account, tokens / (job.request.weight * job.surface.weight))

    @property
    def any_over(self) -> bool:
        """True if any tenant is far over its fair share."""
        return self._usage.any_over

    def tick(self, now: float) -> None:
        """Re-evaluate the fair shares. Call it after every step."""
        for account in self._usage.tick(now):
            for line in (*self._on_time, *self._late):
                line.list_again(account)

    def precedes(self, job: SequenceJob, other: SequenceJob) -> bool:
        """True if a foreground job goes before one of another class."""
        if job.account.over != other.account.over:
            return other.account.over
        mine, others = job.account.charged[0] // QUANTUM, other.account.charged[0] // QUANTUM
        return mine < others or (mine == others and job.urgency < other.urgency)

    def prefilled(self, job: SequenceJob) -> None:
        """Called when a prompt can be reused by others. The fair order does not need it."""
