"""Decides what the next step holds: which sequences start, which are preempted, and how many rows each gets.

Does not handle admission, deadlines or endings: the scheduler does. A step is filled in this order:

1. a token (and drafts) for every foreground stream; 2. short prompts, which may use the whole inter-token objective,
and more once they are late, except for a share that is reserved for long ones; 3. long prompts, in chunks, which may
lengthen the step only a little if nothing else does; 4. streams and prompts of tenants far over their fair share, if
others have prompts to compute; 5. background prompts in what is left, and background streams while the step stays
short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_table import PrefixMatch
from headrace.engine.scheduling.admission import tokens_in_all
from headrace.engine.scheduling.cold_prefixes import ColdPrefixes
from headrace.engine.scheduling.forecast import Forecast
from headrace.engine.scheduling.policy import Policy, due_time, grouped_urgency, urgency
from headrace.engine.scheduling.running_set import RunningSet
from headrace.engine.scheduling.step_builder import StepBuilder
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.scheduling.waiting_queue import BACKGROUND, LONG, SHORT, FairQueue, JobState, SequenceJob

_STATE_INTERVAL = 512  # tokens of a prompt between two recurrent states that are kept
_BYPASS = 1.0  # seconds for which others may start before a job that finds no memory
_SKIPS = 32  # steps that a background stream may be left out of
_OVER_SKIPS = 4  # the same for a stream of a tenant over its share
_MOST_PREEMPTED = 4  # sequences preempted so that one can start
_MOST_POOLING = 32  # embeddings that hold memory while they wait for a step of their own
_MOST_LONG = 3  # long prompts computed side by side
_MOST_OWED = 64  # times `least_rows` that background work may be owed


class Planner:
    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        policy: Policy,
        model: StepTimeModel,
        queue: FairQueue,
        forecast: Forecast,
    ) -> None:
        self.blocks = blocks
        self.queue = queue
        self.running = RunningSet(blocks)
        self.failed: list[SequenceJob] = []  # jobs for which there is no memory, now or ever
        self.preempted = 0
        self.rescues = 0  # of the preempted, for another's first token
        self.followed = 0
        self._limits = limits
        self._policy = policy
        self._model = model
        self._forecast = forecast
        self._cold = ColdPrefixes(blocks.block_tokens)
        # queue heads that found no place, by class, and since when
        self._blocked: dict[int, tuple[SequenceJob, float]] = {}
        self._owed = 0.0  # rows that background work was promised and did not get
        self._last_hidden = False

    # Sequences that wait

    def look(self, job: SequenceJob) -> None:
        """Measure how much of a waiting job there is to compute, and set its class and urgency."""
        request, surface = job.request, job.surface
        match = job.match = self._find(job)
        cached = match.cached_tokens + match.stored
        job.rows = max(len(job.sequence.tokens) - cached, 1)
        if not surface.background:
            job.line = SHORT if job.rows <= self._limits.short_rows else LONG
        job.service = self._forecast.service(job.rows, cached)
        job.answer = self._forecast.answer(request.surface, request.max_tokens) if request.kind == "generate" else 0.0
        # If it has its first token, the next one is due soon.
        job.due = due_time(request, surface, job.service)
        job.late = math.inf if job.sequence.output_count else job.due - 2.0 * job.service
        warm = cached / len(request.prompt)
        job.urgency = urgency(request, surface, self._policy, service=job.service, answer=job.answer, warm=warm)
        if job.background and self._policy.batch_group:
            job.urgency = grouped_urgency(request, job.urgency, self._policy.batch_group)

    def wait_seconds(self, job: SequenceJob, now: float) -> tuple[float, float]:
        """Return the seconds until a new request would start: most likely, and at most, as predicted now."""
        if job.background:
            return 0.0, 0.0
        running = self.running
        free = self._limits.max_sequences - len(running) + len(running.background)
        if job.line in self._blocked:
            free = 0
        prompts = [other for other in running.prefilling if not other.background]
        short = sum(other.sequence.pending for other in prompts if other.line == SHORT)
        long = sum(other.sequence.pending for other in prompts if other.line == LONG)
        return self._forecast.waiting(self.queue, job, now, free=free, short=short, long=long)

    def _find(self, job: SequenceJob) -> PrefixMatch:
        """Match the job against the prefix cache. If prompt results are wanted, match only what precedes them."""
        sequence = job.sequence
        tokens = sequence.prefix_ids
        first = max(job.first, sequence.reported)
        if first < len(job.request.prompt):
            tokens = tokens[: first + 1]
        return self.blocks.match(tokens, job.request.salt, variant=sequence.kv_variant)

    def _match(self, job: SequenceJob) -> PrefixMatch:
        job.match = self._find(job) if job.match is None else self.blocks.refresh(job.match)
        return job.match

    def _wake(self, jobs: list[SequenceJob], now: float) -> None:
        for job in jobs:
            self.look(job)
            self.queue.push(job, now)

    # Sequences that run

    def stop(self, job: SequenceJob, now: float) -> None:
        """Remove a job from wherever it is."""
        if job.table is None:
            self.queue.drop(job)
            self.queue.leave(job)
            job.waits_for = None
        else:
            self.running.stop(job)
            self._wake(self._cold.end(job), now)
        job.match = None

    def computed(self, job: SequenceJob, count: int, now: float) -> None:
        """Publish newly computed prompt tokens, so that others can reuse them."""
        sequence = job.sequence
        assert job.table is not None
        self.blocks.publish(job.table, sequence.prefix_ids, sequence.computed)
        before = sequence.computed - count
        if job.top > before:
            self._wake(self._cold.advance(job, before), now)

    def keep_state(self, job: SequenceJob, count: int, held: int) -> None:
        """Keep the recurrent state after a job's newest `count` tokens, where it is likely to be of use: at the last
        whole block of a prompt, at intervals before, and at the newest block of an output, which may end within the
        `held` drafts that were accepted."""
        sequence = job.sequence
        assert job.table is not None
        decoding = job.state is JobState.DECODING
        computed = sequence.computed
        rest = len(sequence.tokens) - computed
        spaced = computed // _STATE_INTERVAL > (computed - count) // _STATE_INTERVAL
        slot = None
        beyond = computed % self.blocks.block_tokens
        if decoding and 0 < beyond <= held:
            computed -= beyond
            slot = sequence.state_trail[held - beyond]
        if decoding or spaced or rest <= self.blocks.block_tokens:
            self.blocks.keep_state(job.table, sequence.prefix_ids, computed, rolling=decoding, slot=slot)

    def decode(self, job: SequenceJob, siblings: list[SequenceJob], now: float) -> None:
        """Start decoding after the prompt. The request's other sequences continue from the same blocks."""
        request = job.request
        for sibling in siblings:
            waits = sibling.state in (JobState.WAITING, JobState.FOLLOWING) and not sibling.sequence.output_count
            if not waits or len(self.running) >= self._limits.max_sequences or not self.running.fork(sibling, job):
                continue
            self.queue.drop(sibling)
            sibling.waits_for = None
            sibling.charged = True
            self._started(sibling, now)
            sibling.sequence.cached = len(request.prompt) - 1
        self._wake(self._cold.end(job), now)
        self.running.decode(job)
        self.queue.prefilled(job)
        for other in self.queue.alike(job):
            # It may be a short prompt now.
            self.queue.drop(other)
            self._wake([other], now)

    def _preempt(self, job: SequenceJob, now: float) -> None:
        """Put a job back into the queue. It recomputes later what the cache no longer has."""
        self.preempted += 1
        self.running.stop(job)
        self._wake(self._cold.end(job), now)
        job.sequence.computed = 0
        self.look(job)
        self.queue.enter(job)
        self.queue.push(job, now)

    def _rescue(self, victim: SequenceJob, now: float) -> None:
        victim.rescued += 1
        self.rescues += 1
        self._preempt(victim, now)

    def _secure(self, now: float) -> None:
        """Reserve memory for every stream's next tokens."""
        running = self.running
        for job in running.decoding + running.background + running.prefilling:
            sequence = job.sequence
            drafted = sequence.drafted
            if drafted:
                # The last wanted token is never a draft: it comes from the row before.
                room = job.request.max_tokens - sequence.output_count - 1
                if len(drafted) > room:
                    del drafted[room:]
                if job.table is not None:
                    del drafted[self.blocks.extend_trail(job.table, len(drafted)) :]
            needed = len(sequence.tokens) + len(drafted)
            table = job.table
            if table is None:
                continue
            if needed <= job.room:
                if needed > table.tokens:
                    table.tokens = needed
                continue
            while not running.grow(job, needed):
                if drafted:
                    drafted.clear()
                    needed = len(sequence.tokens)
                    continue
                victim = running.victim_for_memory(now)
                if victim is None:
                    self.failed.append(job)
                    break
                self._preempt(victim, now)
                if victim is job:
                    break

    def _make_room(self, now: float) -> None:
        """Preempt streams of tenants above their share for a queue head that found no place and would be late."""
        policy = self._policy
        for line, (job, _) in list(self._blocked.items()):
            if job.state is not JobState.WAITING or job.line != line:
                del self._blocked[line]
                continue
            patience = 0.5 * min(job.surface.ttft, 60.0)
            urgent = policy.rescue and line != BACKGROUND and now > job.late - patience
            if not urgent or self.queue.head(line, now) is not job:
                continue
            for _ in range(_MOST_PREEMPTED):
                if self._fits(job, self._match(job)):
                    break
                victim = self.running.victim_for(job, now, policy.most_rescues)
                if victim is None:
                    break
                self._rescue(victim, now)

    # A step

    def prepare(self, now: float) -> None:
        """Reserve memory for the running sequences. Call it before `fill`."""
        if self._blocked:
            self._make_room(now)
        self._secure(now)

    def fill(self, now: float) -> StepBuilder:
        """Return the next step; empty if nothing can be computed."""
        # Embeddings and generation take turns, because a step yields either hidden states or logits.
        hidden = bool(self.running.pooling) and not self._last_hidden
        step = self._filled(hidden, now)
        if not step.shares and (hidden or self.running.pooling):
            step = self._filled(not hidden, now)
        self._last_hidden = step.hidden
        return step

    def _filled(self, hidden: bool, now: float) -> StepBuilder:
        running, limits, forecast = self.running, self._limits, self._forecast
        step = StepBuilder(limits, self._model, hidden=hidden)
        if self._policy.batch_step and self._only_background():
            self._fill_background(step, now)
            return step
        if hidden:
            # This step delays the streams by its whole length.
            base = forecast.base if running.decoding else 0.0
            late, short, long = (max(bound - base, 0.0) for bound in self._bounds(base, running.surfaces))
            streams: list[SequenceJob] = []
            aside: list[SequenceJob] = []
        else:
            streams, aside = self._streams(now)
            step.decode(streams)
            base = step.seconds
            surfaces = {job.request.surface for job in streams} if aside else running.surfaces
            late, short, long = self._bounds(base, surfaces)
            forecast.streams(base, step.rows, step.pairs, short)
        prompts = sorted(running.pooling if hidden else running.prefilling, key=_turn)
        rows = step.rows
        least = limits.least_rows
        if self._owed >= 4 * least and self.queue.live(BACKGROUND):
            self._start(step, BACKGROUND, long, now, least=least, most=1)
        bounds = (late, short, long)
        self._fill_prompts(step, prompts, bounds, now, over=False)
        if aside:
            running.decoding = streams + self._along(step, aside, short, _OVER_SKIPS)
        if self.queue.any_over:
            self._fill_prompts(step, prompts, bounds, now, over=True)
        # Background work gets at least the rows that it is owed, so that it makes progress.
        sure = self._owed >= least or self._is_idle(step)
        bound = long if running.decoding else math.inf
        if self._policy.batch_step and not running.decoding and any(not job.background for job in step.jobs):
            bound = long = 0.0  # somebody waits for the first token of this step: it is not made longer
        self._give(step, prompts, BACKGROUND, long, now, least=least if sure else 0)
        if not hidden and running.background:
            running.background = self._along(step, running.background, bound, _SKIPS)
        self._owe(step, rows)
        return step

    def _only_background(self) -> bool:
        """True if nothing but background work runs or waits."""
        running = self.running
        if running.decoding or self.queue.live(SHORT) or self.queue.live(LONG):
            return False
        return all(job.background for job in running.prefilling) and all(job.background for job in running.pooling)

    def _fill_background(self, step: StepBuilder, now: float) -> None:
        """Fill a step for the most tokens/s: every stream, then prompts up to the rows and seconds of a long step."""
        running = self.running
        self._forecast.streams(0.0, 0, 0, self._limits.longest_step)
        if not step.hidden:
            running.background = self._along(step, running.background, math.inf, _SKIPS)
        bound = max(self._policy.batch_step, 1.5 * step.seconds)
        prompts = sorted(running.pooling if step.hidden else running.prefilling, key=_turn)
        self._give(step, prompts, BACKGROUND, bound, now, least=self._limits.least_rows)
        self._owed = 0.0

    def _streams(self, now: float) -> tuple[list[SequenceJob], list[SequenceJob]]:
        """Return the foreground streams, and apart from them those of tenants over their share while another's prompt
        waits."""
        running = self.running
        if not self.queue.any_over or not self._others_wait(now):
            return running.decoding, []
        streams = [job for job in running.decoding if not job.account.over]
        return streams, [job for job in running.decoding if job.account.over]

    def _others_wait(self, now: float) -> bool:
        """True if a tenant that is not over its share has a prompt to compute."""
        if any(not job.account.over and not job.background for job in self.running.prefilling):
            return True
        heads = [self.queue.head(line, now) for line in (SHORT, LONG)]
        return any(head is not None and not head.account.over for head in heads)

    def _fill_prompts(
        self,
        step: StepBuilder,
        prompts: list[SequenceJob],
        bounds: tuple[float, float, float],
        now: float,
        *,
        over: bool,
    ) -> None:
        """Give rows to foreground prompts, either of tenants over their share or of all others."""
        late, short, long = bounds
        if over:
            late = short
        least = self._limits.least_rows if not over or self._is_idle(step) else 0
        head = self.queue.head(LONG, now)
        waits = head is not None and head.account.over == over
        kept = 0
        if waits or any(job.line == LONG and job.account.over == over for job in prompts):
            kept = max(self._share(step, short, self._policy.long_share), least)
        self._give(step, prompts, SHORT, short, now, kept=kept, least=least, late=late, over=over)
        if kept:
            # If short prompts did not lengthen the step, long ones may lengthen it only a little.
            least = kept if step.seconds > long else least
            if not over and self._overs_fill(prompts, now):
                long = short
            self._give(step, prompts, LONG, long, now, least=least, late=short, over=over)

    def _is_idle(self, step: StepBuilder) -> bool:
        """True if the machine would be idle. Then waiting work runs however long it is predicted to take; otherwise one
        slow step, such as the first one, would be believed for ever."""
        return not step.rows and not self.running.decoding

    def _overs_fill(self, prompts: list[SequenceJob], now: float) -> bool:
        """True if short prompts of tenants over their share would lengthen the step anyway. Then another's long prompt
        may too."""
        if not self.queue.any_over:
            return False
        head = self.queue.head(SHORT, now)
        return (head is not None and head.account.over) or any(job.account.over for job in prompts if job.line == SHORT)

    def _share(self, step: StepBuilder, seconds: float, share: float) -> int:
        """Return that share of the rows that a step still has within `seconds`."""
        room = self._limits.max_rows - step.rows
        return int(share * self._model.rows_within(seconds, most=room, rows=step.rows, pairs=step.pairs))

    def _give(
        self,
        step: StepBuilder,
        prompts: list[SequenceJob],
        line: int,
        seconds: float,
        now: float,
        *,
        kept: int = 0,
        least: int = 0,
        late: float | None = None,
        over: bool | None = None,
    ) -> None:
        """Give rows to one class, running jobs before waiting ones: as many as end within `seconds`, or within `late`
        for jobs that would otherwise be late, and at least `least`."""
        step.full = False
        given = step.rows
        if line == LONG:
            self._start_first(step, prompts, now)
        for job in prompts:
            mine = job.line == line and (over is None or job.account.over == over)
            if mine and job.table is not None:  # it may have been preempted meanwhile
                bound = late if late is not None and self._is_late(job, now) else seconds
                step.give(job, bound, kept=kept, least=max(least - (step.rows - given), 0))
        if late is not None:
            head = self.queue.head(line, now)
            seconds = late if head is not None and self._is_late(head, now) else seconds
        self._start(step, line, seconds, now, kept=kept, least=least - (step.rows - given), over=over)

    def _bounds(self, base: float, names: Iterable[str]) -> tuple[float, float, float]:
        """Return the seconds that a step may last with late short prompts, with short ones and with long ones. `base`
        is a step of the streams alone, `names` the surfaces of those streams."""
        surfaces = [self._policy.surfaces[name] for name in names]
        objective = self._policy.pace * min((surface.itl for surface in surfaces), default=math.inf)
        if objective == math.inf:
            bound = max(self._limits.longest_step, 1.5 * base)
            return bound, bound, bound
        stretch = min(surface.stretch for surface in surfaces)
        # Streams that miss their objective in any case are slowed a little further.
        slower = max(objective, (1.0 + 0.5 * (min(stretch, 2.0) - 1.0)) * base)
        short = max(objective, min(stretch, 2.0) * base)
        # Streams that use most of their objective alone would leave too little for a queue of prompts, which then
        # grows. If the queue is late already, both share what there is.
        late = min(self._policy.late_objective * objective, self._policy.late_stretch * base)
        return max(late, short), short, min(stretch * base, slower)

    def _is_late(self, job: SequenceJob, now: float) -> bool:
        """True if the first token will be late unless the job gets every available row."""
        left = job.sequence.pending if job.table is not None else job.rows
        return job.rows <= self._limits.wide_rows and now > job.due - 1.2 * job.service * left / job.rows

    def _along(self, step: StepBuilder, jobs: list[SequenceJob], seconds: float, skips: int) -> list[SequenceJob]:
        """Add streams while the step ends within `seconds`, and those left out `skips` times. Return all in their next
        order."""
        rows, pairs = step.rows, step.pairs
        for job in jobs:
            sequence = job.sequence
            more = sequence.pending + len(sequence.drafted)
            rows += more
            pairs += more * len(sequence.tokens)
        if self._model.predict(rows, pairs) <= seconds:  # the usual case: all of them
            for job in jobs:
                job.skipped = 0
            step.decode(jobs)
            return jobs
        along: list[SequenceJob] = []
        left: list[SequenceJob] = []
        rows, pairs = step.rows, step.pairs
        for job in jobs:
            sequence = job.sequence
            more = sequence.pending + len(sequence.drafted)
            reads = more * len(sequence.tokens)
            if job.skipped >= skips or self._model.predict(rows + more, pairs + reads) <= seconds:
                rows += more
                pairs += reads
                job.skipped = 0
                along.append(job)
            else:
                job.skipped += 1
                left.append(job)
        step.decode(along)
        return left + along

    def _owe(self, step: StepBuilder, streams: int) -> None:
        """Credit idle background work with a small share of the rows that others get."""
        running = self.running
        if not self.queue.live(BACKGROUND) and not any(job.background for job in running.prefilling + running.pooling):
            self._owed = 0.0
            return
        given = sum(share.count for job, share in zip(step.jobs, step.shares, strict=True) if job.background)
        others = step.rows - given
        most = _MOST_OWED * self._limits.least_rows
        self._owed = max(0.0, min(most, self._owed + self._policy.background_share * others - given))

    # Starting

    def _start(
        self,
        step: StepBuilder,
        line: int,
        seconds: float,
        now: float,
        *,
        kept: int = 0,
        least: int = 0,
        over: bool | None = None,
        most: int = 1 << 30,
    ) -> None:
        """Start waiting jobs of a class while the step has rows for them."""
        while most > 0 and not step.full:
            if not step.has_room(seconds, kept) and (least <= 0 or step.rows >= self._limits.max_rows):
                return
            job = self.queue.head(line, now)
            if job is None or (over is not None and job.account.over != over):
                return
            if not self._try(job, now):
                if job.turn is not None and job.line == line:
                    if line not in self._blocked or self._blocked[line][0] is not job:
                        self._blocked[line] = (job, now)
                    return
                continue
            self._blocked.pop(line, None)
            if (job.request.kind == "embed") == step.hidden:
                least -= step.give(job, seconds, kept=kept, least=max(least, 0))
            elif len(self.running.pooling) >= _MOST_POOLING or step.hidden:
                return
            most -= 1

    def _start_first(self, step: StepBuilder, prompts: list[SequenceJob], now: float) -> None:
        """Start a long prompt that comes before those being computed, beside them."""
        others = [job for job in prompts if job.line == LONG]
        if step.hidden or not 0 < len(others) < _MOST_LONG:
            return
        job = self.queue.head(LONG, now)
        if job is None or job.request.kind == "embed" or _turn(job) >= min(map(_turn, others)):
            return
        if self._try(job, now):
            prompts.insert(0, job)

    def _try(self, job: SequenceJob, now: float) -> bool:
        """Start a job. Return False if it keeps waiting: for a place, in another class, or for another's prefix."""
        match = self._match(job)
        cached = match.cached_tokens + match.stored
        if self._follow(job, cached):
            return False
        if job.line == SHORT and len(job.sequence.tokens) - cached > 2 * self._limits.short_rows:
            # Its prefix was evicted meanwhile.
            self.queue.drop(job)
            self._wake([job], now)
            return False
        if self._yields(job, now) or not self._makes_place(job, match, now):
            return False
        self.queue.take(job)
        if match.stored:
            self.blocks.recall(self._match(job), patient=not len(self.running))
        if not self.running.start(job, self._match(job), self._tokens(job)):
            self.queue.push(job, now)
            if not len(self.running):
                self.failed.append(job)
            return False
        self._started(job, now)
        return True

    def _started(self, job: SequenceJob, now: float) -> None:
        self.queue.leave(job)
        sequence = job.sequence
        if job.started is None:
            job.started = now
            sequence.cached = min(sequence.computed, len(job.request.prompt))
            if not job.background:
                self._forecast.started(job.foreseen, now - job.admitted)
        if not job.charged:
            job.charged = True
            self.queue.charge(job, sequence.pending)
        if self._limits.causal and job.request.kind == "generate" and self.blocks.states is None:
            self._cold.lead(job)

    def _tokens(self, job: SequenceJob) -> int:
        """Return the tokens that a job needs memory for at its start: what it has, and a little to grow."""
        return min(len(job.sequence.tokens) + self.running.growth, tokens_in_all(job.request))

    def _fits(self, job: SequenceJob, match: PrefixMatch) -> bool:
        running = self.running
        if not len(running):
            return True  # if it cannot start now, it never can
        return len(running) < self._limits.max_sequences and running.available(match, self._tokens(job))

    def _makes_place(self, job: SequenceJob, match: PrefixMatch, now: float) -> bool:
        """True if the job can run now. Background work is preempted for it."""
        for _ in range(_MOST_PREEMPTED):
            if self._fits(job, match):
                return True
            victim = None if job.background else self.running.background_victim(now, self._policy.most_rescues)
            if victim is None:
                return False
            self._rescue(victim, now)
            match = self._match(job)
        return self._fits(job, match)

    def _yields(self, job: SequenceJob, now: float) -> bool:
        """True if the last place belongs to another job: of a class that has none, or one that has long found no
        memory."""
        if job.background:
            return False
        _, mine = self._blocked.get(job.line, (None, now))
        for line, (other, since) in self._blocked.items():
            if line in (job.line, BACKGROUND) or since >= mine or now - since <= _BYPASS:
                continue
            if self.queue.head(line, now) is other and other.account.over <= job.account.over:
                return True
        running = self.running
        if len(running) + 1 < self._limits.max_sequences or job.line != SHORT:
            return False
        if any(other.line == LONG for other in running.prefilling):
            return False
        other = self.queue.head(LONG, now)
        return other is not None and self.queue.precedes(other, job)

    def _follow(self, job: SequenceJob, cached: int) -> bool:
        """True if the job waits for another to compute the prefix that they share."""
        if (
            not self._policy.share_cold
            or self.blocks.states is not None
            or job.first < len(job.request.prompt)
            or not self._limits.causal
        ):
            return False
        found = self._cold.leader(job, cached)
        if found is None:
            return False
        leader, tokens = found
        worth = tokens - cached >= self._policy.shared_tokens
        if not worth or (leader.background and not job.background):
            return False
        self.queue.drop(job)
        self._cold.follow(job, leader, tokens)
        leader.urgency = min(leader.urgency, job.urgency)
        self.followed += 1
        return True


def _turn(job: SequenceJob) -> tuple[bool, float]:
    """Sort key: the order in which prompts being computed get rows."""
    return job.account.over, job.urgency
