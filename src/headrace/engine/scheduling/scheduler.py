"""The scheduler: takes every request from admission to its end, step by step.

Owns deadlines, endings and what a step's outcome means for each sequence; the planner decides what a step holds. There
is no prefill or decode phase: a sequence has computed tokens and wanted tokens, and a step gives each sequence a share
of one time budget. Pure host logic: the clock is passed in, the hardware is a StepTimeModel and memory is a
BlockManager, so a simulator can drive it.

    admit ──▶ FairQueue ──start──▶ RunningSet ──settle──▶ finished
                 │  ▲                 │
                 ▼  └────preempted────┘
            ColdPrefixes: waits for another that computes the same prefix
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import msgspec

from headrace.engine.interface.request import FinishReason, GenerationRequest, SequenceState, open_sequence
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.admission import impossible, no_room, tokens_in_all, too_late
from headrace.engine.scheduling.forecast import Forecast
from headrace.engine.scheduling.gather_window import GatherStats, GatherWindow
from headrace.engine.scheduling.planner import Planner
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.running_set import RunningSet
from headrace.engine.scheduling.step_builder import StepBuilder
from headrace.engine.scheduling.step_plan import (
    AdmissionDecision,
    SchedulerLimits,
    SequenceEvent,
    ShareOutcome,
    StepPlan,
)
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.scheduling.waiting_queue import FairQueue, JobState, SequenceJob, TenantAccount

TYPICAL_PROMPT = 256  # tokens
_FORCED = 16  # tokens appended at once that still count as decoding


class SchedulerStats(msgspec.Struct):
    """Counts since the start, except `waiting` to `tenants`, which are current."""

    waiting: int = 0  # including `following`
    following: int = 0  # waiting for another to compute a shared prefix
    running: int = 0
    decoding: int = 0
    tenants: int = 0
    admitted: int = 0  # requests; the fields below count sequences
    refused: int = 0  # requests
    finished: int = 0
    cut: int = 0  # at their deadline
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0
    rescues: int = 0  # of those, for another's first token
    followed: int = 0
    steps: int = 0
    rows: int = 0
    gather: GatherStats = msgspec.field(default_factory=GatherStats)
    step_error: float = 0.0  # recent mean of |log(measured / predicted)| of step times


class SpareCapacity(msgspec.Struct, frozen=True):
    """What the scheduler could take on now, as predicted."""

    ttft: dict[str, float]  # seconds to the first token of a new prompt of TYPICAL_PROMPT tokens, by surface
    prompt_tokens_per_s: float  # of prompts, beside the running streams
    free_output_tokens_per_s: float  # that more streams could have, within the chat surface's gaps between tokens


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        policy: Policy,
        model: StepTimeModel,
        *,
        queue: FairQueue | None = None,
        rope_variant: Callable[[int], int] = lambda _total_tokens: 0,
    ) -> None:
        """`rope_variant` returns the rope variant of a sequence that may reach so many tokens
        (ModelSpec.rope_variant)."""
        self.limits = limits
        self.policy = policy
        self.model = model
        self.blocks = blocks
        self.queue = FairQueue(policy, idle_tenants=limits.idle_tenants) if queue is None else queue
        self._forecast = Forecast(model, max_rows=limits.max_rows, longest_step=limits.longest_step)
        self._planner = Planner(blocks, limits, policy, model, self.queue, self._forecast)
        self._rope_variant = rope_variant
        self._jobs: dict[str, list[SequenceJob]] = {}  # of each unfinished request
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int, SequenceJob]] = []  # heap
        self._with_deadline = 0  # unfinished ones in the heap
        self._step: StepBuilder | None = None  # under way
        self._step_ends = 0.0  # as predicted
        self._events: list[SequenceEvent] = []  # not returned yet
        self._draining = False
        self.window = GatherWindow()
        self._fresh: list[SequenceJob] = []  # arrived since the last step, on surfaces that gather
        self._counts = SchedulerStats()

    @property
    def running(self) -> RunningSet:
        return self._planner.running

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._events

    @property
    def contiguous_tokens(self) -> int:
        """Tokens that the running sequences would reserve if each had one contiguous range for all it may become."""
        return sum(min(tokens_in_all(job.request), self.limits.context) for job in self.running.all())

    def admit(self, request: GenerationRequest, now: float, *, output: tuple[int, ...] = ()) -> AdmissionDecision:
        """Queue a request, or return why it is rejected and when to retry. `output` holds tokens generated
        elsewhere."""
        admission = self._admit(request, now, output)
        if admission.accepted:
            self._counts.admitted += 1
        else:
            self._counts.refused += 1
        return admission

    def cancel(self, request_id: str, now: float) -> list[SequenceEvent]:
        """End a request. Its sequences in the step under way end when that is settled, the others at once."""
        events: list[SequenceEvent] = []
        for job in list(self._jobs.get(request_id, ())):
            if job.in_step:
                job.ends = (FinishReason.CANCELLED, "")
            else:
                events.append(self._finish(job, FinishReason.CANCELLED, "", now))
        return events

    def expire(self, now: float) -> list[SequenceEvent]:
        """End what is past its deadline, with its output so far. Call it before `plan`, also when there is nothing to
        run."""
        self._cut(now)
        events, self._events = self._events, []
        return events

    def drain(self) -> None:
        """Admit no more requests."""
        self._draining = True

    def stats(self) -> SchedulerStats:
        counts, planner = self._counts, self._planner
        running = planner.running
        counts.waiting = self.queue.queued
        counts.following = self.queue.queued - len(self.queue)
        counts.running = len(running)
        counts.decoding = len(running.decoding) + len(running.background)
        counts.tenants = len(self.queue.accounts)
        counts.preempted, counts.rescues, counts.followed = planner.preempted, planner.rescues, planner.followed
        counts.step_error = self.model.error
        counts.gather = self.window.stats
        return counts

    def capacity(self, now: float) -> SpareCapacity:
        """Predict what a new request would meet, of a tenant without others."""
        forecast, account = self._forecast, TenantAccount("")
        ttft: dict[str, float] = {}
        for name, surface in self.policy.surfaces.items():
            if not surface.background:
                request = GenerationRequest(id="", prompt=(0,) * TYPICAL_PROMPT, surface=name, arrival=now)
                job = SequenceJob(-1, self._open(request, 0, ()), surface, account)
                self._planner.look(job)
                ttft[name] = self._planner.wait_seconds(job, now)[0] + job.service
        streams = len(self.running.decoding)
        context = forecast.base_pairs // forecast.base_rows if forecast.base_rows else TYPICAL_PROMPT
        most = self.limits.max_sequences
        gap = self.policy.surfaces["chat"].itl
        while most > 1 and self.model.predict(most, most * context) > gap:
            most //= 2
        full = most / self.model.predict(most, most * context)
        used = streams / self.model.predict(streams, streams * context) if streams else 0.0
        return SpareCapacity(ttft, 1.0 / forecast.row_seconds(), max(0.0, full - used))

    def gather(self, now: float) -> float:
        """Return the seconds that the next step should wait for more requests to share it; 0: plan it now.

        Only an idle engine waits, because a busy one gathers what arrives during its steps. It waits no longer than
        the `gather` of each waiting request's surface, and never past the start that its objective needs.
        """
        if not self._fresh:
            return 0.0
        fresh = self._fresh = [job for job in self._fresh if job.state is JobState.WAITING]
        if not fresh:
            self.window.abandon()
        if not fresh or len(self.running) or len(fresh) < len(self.queue) or len(fresh) >= self.limits.max_sequences:
            return 0.0
        rows = sum(job.rows for job in fresh)
        if rows > self.limits.short_rows:
            return 0.0
        latest = min(min(job.admitted + job.surface.gather, job.late, job.deadline - job.service) for job in fresh)
        return self.window.wait(now, latest, waiting=len(fresh), step=self.model.predict(rows, 0))

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step; None if there is nothing to compute."""
        self._cut(now)
        if not self._jobs:
            return None
        self._planner.prepare(now)
        self._fail(now)
        step = self._planner.fill(now)
        self._fail(now)
        if not step.shares:
            return None
        self._step = step
        self._fresh.clear()
        self.window.begin(now, step.rows, len(step.shares))
        seconds = step.seconds
        self._step_ends = now + seconds
        states = self.blocks.states
        return StepPlan(
            step.shares,
            self.blocks.take_copies(),
            seconds,
            step.hidden,
            step.rows,
            step.pairs,
            [] if states is None else states.take_copies(),
        )

    def settle(self, plan: StepPlan, outcomes: list[ShareOutcome], now: float, seconds: float) -> list[SequenceEvent]:
        """Apply a step's outcomes. `seconds` is how long the step took; a value that is not positive is ignored."""
        step = self._step
        if step is None or step.shares is not plan.shares or len(outcomes) != len(plan.shares):
            raise ValueError("These are not the outcomes of the step under way.")
        self._step = None
        self.model.observe(plan.rows, plan.pairs, seconds)
        self._counts.steps += 1
        self._counts.rows += plan.rows
        events: list[SequenceEvent] = []
        self.queue.tick(now)
        for job in step.jobs:
            job.in_step = False
        for job, share, outcome in zip(step.jobs, plan.shares, outcomes, strict=True):
            event = self._settle(job, share.count, outcome, now)
            if event is not None:
                events.append(event)
        self._cut(now)
        if self._events:
            events += self._events
            self._events = []
        return events

    # Admission

    def _admit(self, request: GenerationRequest, now: float, output: tuple[int, ...]) -> AdmissionDecision:
        if request.id in self._jobs:
            return AdmissionDecision(False, 0.0, why=f"A request '{request.id}' is already running.", parameter="id")
        wrong = impossible(request, len(output), self.limits, self.policy, self.blocks.largest_sequence)
        if wrong is not None:
            return AdmissionDecision(False, 0.0, why=wrong[1], parameter=wrong[0])
        if self._draining:
            return AdmissionDecision(False, 0.0, retry_after=1.0, why="The engine is draining.")
        queue, planner = self.queue, self._planner
        account = queue.account(request.tenant)
        if not any(account.waiting):
            account.weight = request.weight
        surface = self.policy.surfaces[request.surface]
        sequences = tuple(self._open(request, index, output) for index in range(request.n))
        jobs = [SequenceJob(next(self._numbers), sequence, surface, account) for sequence in sequences]
        first = jobs[0]
        planner.look(first)
        wait, most = planner.wait_seconds(first, now)
        if self._step is not None:
            wait += max(self._step_ends - now, 0.0)
        refused = self._refusal(first, now, wait, most)
        if refused is not None:
            queue.forget_idle(account)
            return refused
        self._jobs[request.id] = jobs
        if surface.gather:
            self.window.arrive(now)
            self._fresh += jobs
        for job in jobs:
            if job is not first:
                planner.look(job)
            job.admitted = now
            job.foreseen = wait
            queue.enter(job)
            queue.push(job, now)
            if job.deadline < math.inf:
                self._with_deadline += 1
                heapq.heappush(self._deadlines, (job.deadline, job.number, job))
        return AdmissionDecision(True, wait + first.service, sequences)

    def _refusal(self, job: SequenceJob, now: float, wait: float, most: float) -> AdmissionDecision | None:
        forecast = self._forecast
        retry = forecast.place_seconds(job.request.n)
        refused = no_room(job, self.queue, self.limits, predicted=wait + job.service, retry=retry)
        if refused is None and self.policy.refuse_unmet:
            least = forecast.least_service(job.rows)
            refused = too_late(job, now, wait=wait, most=most, least=least, margin=self.limits.longest_step)
        return refused

    def _open(self, request: GenerationRequest, index: int, output: tuple[int, ...]) -> SequenceState:
        sequence = open_sequence(request, index, self._rope_variant(tokens_in_all(request)))
        if output:
            sequence.append(output)
        return sequence

    # Settling

    def _settle(self, job: SequenceJob, count: int, outcome: ShareOutcome, now: float) -> SequenceEvent | None:
        sequence = job.sequence
        tokens, drafted = sequence.tokens, sequence.drafted
        before = sequence.computed
        pending = len(tokens) - before
        computed = before + count
        accepted = outcome.accepted
        if job.ends is not None and job.ends[0] is FinishReason.CANCELLED:
            sequence.computed = min(computed, len(tokens))
            return self._finish(job, *job.ends, now)
        if count > pending:
            # Only rows of accepted drafts were computed after the right tokens.
            computed -= count - pending
            for draft, token in zip(drafted[: count - pending], accepted, strict=False):
                if draft != token:
                    break
                computed += 1
        if drafted:
            drafted.clear()
        finish, why = outcome.finish, outcome.why
        if accepted:
            accepted, ended = _bounded(job, accepted)
            finish = finish or ended
            sequence.append(accepted)
            weighted = self.policy.decode_weight * len(accepted)
            self.queue.charge(job, weighted)
            self.queue.computed(job, weighted)
        # The newest token is not computed yet, even if it equals a draft.
        sequence.computed = min(computed, len(tokens) - bool(accepted))
        if self.blocks.states is not None:
            held = max(0, sequence.computed - before - pending)
            if held < count - pending:
                self.running.rewind(job, held)
            self._planner.keep_state(job, count, held)
        if job.state is JobState.DECODING:
            if len(tokens) - sequence.computed > _FORCED:
                self.running.prefill(job)
        elif self._prefilled(job, count, now):
            finish = finish or FinishReason.STOP
        if finish is None:
            if job.ends is not None:
                finish, why = job.ends
            elif sequence.computed == len(tokens):
                finish, why = FinishReason.FAILED, "the engine chose no token"
            else:
                return SequenceEvent(sequence, accepted) if accepted else None
        event = self._finish(job, finish, why, now)
        event.tokens = accepted
        return event

    def _prefilled(self, job: SequenceJob, count: int, now: float) -> bool:
        """Account for computed prompt tokens. Return True if the request needs nothing more."""
        sequence, request = job.sequence, job.request
        prompt = len(request.prompt)
        if job.first < prompt:
            sequence.reported = max(sequence.reported, min(sequence.computed, prompt))
        self.queue.computed(job, count)
        self._planner.computed(job, count, now)
        if sequence.computed < prompt or sequence.pending > _FORCED:
            return False
        if request.kind != "generate":
            return True
        self._planner.decode(job, self._jobs[request.id] if request.n > 1 else [], now)
        return False

    # Endings

    def _cut(self, now: float) -> None:
        heap = self._deadlines
        while heap and heap[0][0] <= now:
            job = heapq.heappop(heap)[2]
            if job.state is JobState.DONE:
                continue
            if job.in_step:
                job.ends = job.ends or (FinishReason.DEADLINE, "")
            else:
                self._events.append(self._finish(job, FinishReason.DEADLINE, "", now))
        if len(heap) > 64 + 2 * self._with_deadline:
            self._deadlines = [entry for entry in heap if entry[2].state is not JobState.DONE]
            heapq.heapify(self._deadlines)

    def _fail(self, now: float) -> None:
        """End the jobs for which there is no memory."""
        failed = self._planner.failed
        while failed:
            self._events.append(self._finish(failed.pop(), FinishReason.FAILED, "no KV memory is left", now))

    def _finish(self, job: SequenceJob, finish: FinishReason, why: str, now: float) -> SequenceEvent:
        sequence, request = job.sequence, job.request
        running = len(self.running)
        self._planner.stop(job, now)
        job.state = JobState.DONE
        sequence.finish = finish
        if job.deadline < math.inf:
            self._with_deadline -= 1
        jobs = self._jobs[request.id]
        jobs.remove(job)
        if not jobs:
            del self._jobs[request.id]
        self.queue.forget_idle(job.account)
        counts = self._counts
        match finish:
            case FinishReason.CANCELLED:
                counts.cancelled += 1
            case FinishReason.DEADLINE:
                counts.cut += 1
            case FinishReason.FAILED:
                counts.failed += 1
            case FinishReason.STOP | FinishReason.LENGTH:
                counts.finished += 1
                self._forecast.finished(job, now, running)
        return SequenceEvent(sequence, [], finish, why)


def _bounded(job: SequenceJob, accepted: list[int]) -> tuple[list[int], FinishReason | None]:
    """Return the new tokens up to the one that ends the sequence, and how it ended."""
    request = job.request
    stop_ids = request.stop_ids
    left = request.max_tokens - job.sequence.output_count
    if len(accepted) > left:
        accepted = accepted[:left]
    if stop_ids:
        for place, token in enumerate(accepted):
            if token in stop_ids:
                return accepted[: place + 1], FinishReason.STOP
    return accepted, FinishReason.LENGTH if len(accepted) == left else None
