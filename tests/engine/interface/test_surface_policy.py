"""Who goes next: fair among tenants, urgent first within them, and nobody for ever last."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from headrace.engine.interface.request import GenerationRequest, open_sequence
from headrace.engine.scheduling.policy import Policy, due_time, urgency
from headrace.engine.scheduling.waiting_queue import BACKGROUND, LONG, QUANTUM, SHORT, FairQueue, SequenceJob
from headrace.surfaces import SURFACES

POLICY = Policy()


class Queue(FairQueue):
    """A fair queue with jobs made on the spot."""

    def __init__(self, policy: Policy = POLICY, *, idle_tenants: int = 100) -> None:
        super().__init__(policy, idle_tenants=idle_tenants)
        self.made = 0

    def add(
        self,
        tenant: str,
        *,
        now: float = 0.0,
        line: int = SHORT,
        rows: int = 1000,
        weight: float = 1.0,
        priority: int = 0,
        deadline: float | None = None,
        late: float = math.inf,
    ) -> SequenceJob:
        self.made += 1
        request = GenerationRequest(
            id=str(self.made),
            prompt=(1, 2, 3),
            tenant=tenant,
            weight=weight,
            priority=priority,
            deadline=deadline,
            arrival=now,
            surface="batch" if line == BACKGROUND else "chat",
        )
        surface = SURFACES[request.surface]
        job = SequenceJob(self.made, open_sequence(request), surface, self.account(tenant))
        job.line = line
        job.rows = rows
        job.late = late
        job.urgency = urgency(request, surface, POLICY, service=0.1, answer=1.0, warm=0.0)
        self.enter(job)
        self.push(job, now)
        return job

    def serve(self, line: int = SHORT, *, now: float = 0.0, tokens: float | None = None) -> SequenceJob:
        job = self.head(line, now)
        assert job is not None
        self.take(job)
        self.leave(job)
        self.charge(job, job.rows if tokens is None else tokens)
        self.forget_idle(job.account)
        return job


def tenants(jobs: list[SequenceJob]) -> Counter[str]:
    return Counter(job.request.tenant for job in jobs)


def test_a_tenant_with_a_thousand_requests_gets_no_more_turns_than_others() -> None:
    queue = Queue()
    for _ in range(1000):
        queue.add("flood")
    for name in ("a", "b", "c"):
        for _ in range(25):
            queue.add(name)
    served = tenants([queue.serve() for _ in range(100)])
    assert all(abs(count - 25) <= 3 for count in served.values())


def test_shares_follow_the_weights() -> None:
    queue = Queue()
    for _ in range(300):
        queue.add("heavy", weight=3.0)
        queue.add("light")
    served = tenants([queue.serve() for _ in range(200)])
    assert served["heavy"] == pytest.approx(150, abs=5)


def test_tokens_count_not_requests() -> None:
    queue = Queue()
    for _ in range(300):
        queue.add("long", rows=10_000)
        queue.add("short", rows=1000)
    served = tenants([queue.serve() for _ in range(220)])
    assert served["short"] == pytest.approx(200, abs=12)


def test_what_is_generated_is_charged_as_well() -> None:
    queue = Queue()
    talker = queue.add("talks")
    queue.serve()
    queue.charge(talker, 50_000.0)
    for _ in range(100):
        queue.add("talks")
        queue.add("listens")
    assert tenants([queue.serve() for _ in range(50)])["talks"] <= 1


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    queue = Queue()
    queue.add("absent", rows=1)
    queue.serve()
    for _ in range(300):
        queue.add("busy")
    for _ in range(100):
        queue.serve()
    for _ in range(100):
        queue.add("absent")
    assert tenants([queue.serve() for _ in range(40)])["absent"] == pytest.approx(20, abs=3)


def test_a_tenant_that_was_alone_owes_nothing_for_it() -> None:
    queue = Queue()
    for _ in range(300):
        queue.add("alone")
    for _ in range(200):
        queue.serve()
    for _ in range(100):
        queue.add("new")
    assert tenants([queue.serve() for _ in range(40)])["alone"] == pytest.approx(20, abs=3)


def test_equal_tenants_go_by_urgency() -> None:
    queue = Queue()
    jobs = [queue.add(name, now=place * 0.1) for place, name in enumerate("abcdef")]
    hurried = queue.add("z", now=0.6, deadline=0.8)
    assert [queue.serve() for _ in range(3)] == [hurried, jobs[0], jobs[1]]


def test_a_deadline_and_a_priority_go_first_within_a_tenant() -> None:
    queue = Queue()
    plain = queue.add("a")
    preferred = queue.add("a", now=1.0, priority=1)
    hurried = queue.add("a", now=1.0, deadline=1.2, priority=1)
    assert [queue.serve() for _ in range(3)] == [hurried, preferred, plain]


def test_a_priority_is_worth_seconds_and_not_for_ever() -> None:
    queue = Queue()
    first = queue.add("a")
    for second in range(40):
        queue.add("a", now=float(second), priority=1)
    served = [queue.serve() for _ in range(41)]
    assert served.index(first) == POLICY.priority_lead


def test_no_request_is_overtaken_by_one_that_came_much_later() -> None:
    rng = random.Random(3)
    leads = POLICY.priority_lead * 20 + POLICY.warm_lead + 2 * SURFACES["chat"].ttft
    for _ in range(2000):
        early = GenerationRequest(id="", prompt=(1,), arrival=rng.uniform(0, 10), priority=rng.randint(-10, 10))
        late = GenerationRequest(id="", prompt=(1,), arrival=early.arrival + leads, priority=rng.randint(-10, 10))
        service = rng.uniform(0, 100)
        keys = [
            urgency(each, SURFACES["chat"], POLICY, service=service, answer=9.0, warm=warm)
            for each, warm in ((early, 0.0), (late, 1.0))
        ]
        assert keys[0] <= keys[1]


def test_those_that_must_be_late_get_one_turn_in_four() -> None:
    queue = Queue()
    for place in range(50):
        queue.add("a", now=place * 1e-3, late=1.0)
    for place in range(100):
        queue.add("a", now=2.0 + place * 1e-3, late=50.0)
    served = [queue.serve(now=3.0, tokens=1.0) for _ in range(40)]
    assert POLICY.late_turns == 4
    assert sum(job.late == 1.0 for job in served) == 10
    assert [job.number for job in served if job.late == 1.0] == list(range(1, 11))


def test_lateness_changes_the_share_of_tenants_by_a_few_requests_only() -> None:
    queue = Queue()
    for _ in range(200):
        queue.add("late", late=-1.0)
        queue.add("in time")
    served = tenants([queue.serve() for _ in range(100)])
    assert served["late"] == pytest.approx(50, abs=5)


def test_when_all_are_late_they_go_as_they_came() -> None:
    queue = Queue()
    jobs = [queue.add("a", now=float(place), late=float(place) + 0.5) for place in range(20)]
    assert [queue.serve(now=100.0) for _ in range(20)] == jobs


def test_background_work_has_an_account_of_its_own() -> None:
    queue = Queue()
    for _ in range(50):
        queue.add("both", line=BACKGROUND)
    for _ in range(50):
        queue.serve(BACKGROUND, tokens=100_000.0)
    for _ in range(50):
        queue.add("both")
        queue.add("chats")
    assert tenants([queue.serve() for _ in range(40)])["both"] == pytest.approx(20, abs=3)


def test_short_and_long_prompts_share_an_account() -> None:
    queue = Queue()
    for _ in range(20):
        queue.add("both", line=LONG)
        queue.add("both")
        queue.add("chats")
    for _ in range(10):
        queue.serve(LONG, tokens=10_000.0)
    assert tenants([queue.serve() for _ in range(20)])["chats"] == 20


def test_who_is_dropped_does_not_go() -> None:
    queue = Queue()
    jobs = [queue.add("a", now=place * 1.0) for place in range(10)]
    for job in jobs[::2]:
        queue.drop(job)
        queue.drop(job)  # twice is once
    assert len(queue) == 5
    assert [queue.serve() for _ in range(5)] == jobs[1::2]
    assert queue.head(SHORT, 0.0) is None
    assert queue.rows(SHORT) == (0, 0)


def test_each_class_waits_apart() -> None:
    queue = Queue()
    jobs = {line: queue.add("a", line=line) for line in (SHORT, LONG, BACKGROUND)}
    assert {line: queue.head(line, 0.0) for line in jobs} == jobs
    assert [queue.live(line) for line in jobs] == [1, 1, 1]


def test_random_traffic_keeps_the_books() -> None:
    rng = random.Random(11)
    queue = Queue(idle_tenants=5)
    waiting: list[SequenceJob] = []
    for round_ in range(20_000):
        now = round_ * 0.01
        if rng.random() < 0.5:
            tenant = f"t{rng.randrange(30)}"
            line = rng.choice((SHORT, LONG, BACKGROUND))
            waiting.append(queue.add(tenant, now=now, line=line, rows=rng.randint(1, 900), late=now + rng.random()))
        elif waiting and rng.random() < 0.3:
            job = waiting.pop(rng.randrange(len(waiting)))
            queue.drop(job)
            queue.leave(job)
            queue.forget_idle(job.account)
        elif waiting:
            line = rng.choice(waiting).line
            waiting.remove(queue.serve(line, now=now))
        assert len(queue) == len(waiting)
    for line in (SHORT, LONG, BACKGROUND):
        assert sum(queue.rows(line)) == sum(job.rows for job in waiting if job.line == line)
    assert len(queue.accounts) <= 30 + 5


def test_accounts_of_tenants_without_work_are_bounded() -> None:
    queue = Queue(idle_tenants=50)
    for number in range(1000):
        queue.add(f"t{number}")
        queue.serve()
    assert len(queue.accounts) == 50


def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    queue = Queue(idle_tenants=5)
    turn = queue.add("first", now=-1000.0).turn
    assert turn is not None
    for number in range(5000):
        jobs = [queue.add(name, now=-number * 1e-3) for name in ("first", f"t{number % 700}")]
        for job in jobs:
            queue.drop(job)
            queue.leave(job)
            queue.forget_idle(job.account)
    assert len(turn.jobs) < 100
    assert len(turn.line._heap) < 100  # pyright: ignore[reportPrivateUsage]
    assert len(turn.line._turns) == 1  # pyright: ignore[reportPrivateUsage]
    assert len(queue.accounts) == 6


def test_accounts_within_a_quantum_are_equal() -> None:
    queue = Queue()
    first = queue.add("a")
    queue.add("b", now=5.0)
    queue.charge(first, QUANTUM - 1)
    assert queue.head(SHORT, 5.0) is first
    queue.charge(first, 1.0)
    head = queue.head(SHORT, 5.0)
    assert head is not None
    assert head.request.tenant == "b"


def test_a_first_token_is_due_after_the_objective_unless_the_prompt_takes_longer() -> None:
    chat = SURFACES["chat"]
    request = GenerationRequest(id="", prompt=(1,), arrival=10.0)
    assert due_time(request, chat, 0.3) == 10.0 + chat.ttft
    assert due_time(request, chat, 4.0) == 10.0 + 10.0  # alone it takes four seconds, in traffic more
    assert due_time(GenerationRequest(id="", prompt=(1,), arrival=10.0, deadline=10.5), chat, 4.0) == 10.5
    assert due_time(GenerationRequest(id="", prompt=(1,), surface="batch"), SURFACES["batch"], 1.0) == math.inf


def test_the_less_slack_the_more_urgent() -> None:
    def key(deadline: float | None, *, service: float, answer: float) -> float:
        request = GenerationRequest(id="", prompt=(1,), arrival=0.0, deadline=deadline)
        return urgency(request, SURFACES["agent"], POLICY, service=service, answer=answer, warm=0.0)

    assert key(8.0, service=1.0, answer=6.5) < key(8.0, service=1.0, answer=6.0) < key(None, service=1.0, answer=6.0)
    assert key(8.0, service=2.0, answer=5.5) < key(8.0, service=1.0, answer=6.0)
