"""The scheduler against an exact machine: deadlines, refusals, cancelling, too little memory; everything ends once."""

from __future__ import annotations

import pytest

from headrace.engine.interface.request import FinishReason
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits, Share, ShareOutcome
from headrace.surfaces import SURFACES
from tests.support.scheduler_machine import Machine, prompt


@pytest.fixture
def machine() -> Machine:
    return Machine(BlockManager(1024))


# Deadlines, refusals, bounds


def test_past_its_deadline_a_request_ends_with_what_it_has(machine: Machine) -> None:
    sequence = machine.must("a", 100, max_tokens=1000, deadline=1.0)
    machine.run()
    assert machine.finish(sequence) is FinishReason.DEADLINE
    assert 20 < len(sequence.output) < 1000
    assert machine.times[sequence][-1] <= machine.endings[sequence][0][2] < 1.0 + 0.05


def test_past_its_deadline_a_waiting_request_ends_with_nothing() -> None:
    policy = Policy(refuse_unmet=False, rescue=False)
    machine = Machine(BlockManager(1024), policy=policy, limits=SchedulerLimits(max_sequences=1))
    machine.must("running", 200, max_tokens=200)
    machine.step()
    waiting = machine.must("waiting", 200, deadline=0.5)
    machine.run()
    assert machine.finish(waiting) is FinishReason.DEADLINE
    assert waiting.output == []


def test_a_deadline_is_seen_when_nothing_is_planned(machine: Machine) -> None:
    sequence = machine.must("a", 100, deadline=5.0)
    machine.now = 6.0
    (event,) = machine.scheduler.expire(machine.now)
    assert (event.sequence, event.finish) == (sequence, FinishReason.DEADLINE)
    assert machine.scheduler.plan(machine.now) is None
    assert machine.scheduler.idle


def test_what_cannot_meet_its_deadline_is_refused_at_once(machine: Machine) -> None:
    refused = machine.send("a", 3000, deadline=0.5)
    assert not refused.accepted
    assert refused.predicted > 3.0
    assert refused.parameter == "deadline"  # no other time would be better
    assert "deadline" in refused.why


def test_at_the_time_to_try_again_it_is_admitted(machine: Machine) -> None:
    for number in range(20):
        machine.must(f"{number}", 1000, max_tokens=1, surface="agent")
    refused = machine.send("hurried", 200, deadline=3.0)
    assert not refused.accepted
    assert refused.predicted > 3.0
    assert refused.retry_after > 0.0
    again = refused.retry_after
    while machine.now < again:
        machine.step()
    assert machine.send("hurried", 200, deadline=machine.now + 3.0).accepted


def test_the_foreseen_first_token_is_about_right(machine: Machine) -> None:
    foreseen = {}
    for number in range(30):
        admission = machine.send(f"{number}", 400, max_tokens=20)
        foreseen[admission.sequences[0]] = admission.predicted
    machine.run()
    late = [sequence for sequence in foreseen if machine.ttft(sequence) > 2.0]
    assert len(late) > 10
    for sequence in late:
        assert 1 / 3 < foreseen[sequence] / machine.ttft(sequence) < 3


def test_a_surfaces_patience_is_kept(machine: Machine) -> None:
    admissions = [machine.send(f"{number}", 1000, surface="voice", max_tokens=20) for number in range(40)]
    refused = [admission for admission in admissions if not admission.accepted]
    assert 5 < len(refused) < 36
    assert all(admission.retry_after > 0.0 and admission.parameter is None for admission in refused)
    assert all(admission.predicted > SURFACES["voice"].patience for admission in refused)


def test_the_queue_is_bounded_and_has_room_for_every_tenant() -> None:
    machine = Machine(
        BlockManager(1024), limits=SchedulerLimits(queued_sequences=100), policy=Policy(refuse_unmet=False)
    )
    flood = [machine.send(f"flood {number}", 20, tenant="flood") for number in range(500)]
    assert sum(admission.accepted for admission in flood) == 50
    assert not flood[-1].accepted
    assert flood[-1].retry_after > 0.0
    others = [machine.send(f"other {number}", 20, tenant=f"t{number}") for number in range(80)]
    assert sum(admission.accepted for admission in others) == 50
    assert machine.scheduler.stats().waiting == 100
    machine.run()


def test_the_queue_is_bounded_in_tokens() -> None:
    machine = Machine(
        BlockManager(1024), limits=SchedulerLimits(queued_tokens=10_000), policy=Policy(refuse_unmet=False)
    )
    accepted = [machine.send(f"{number}", 900).accepted for number in range(30)]
    assert 1 <= sum(accepted) <= 11
    machine.run()


@pytest.mark.parametrize(
    ("parameter", "tokens", "wishes"),
    [
        ("prompt", 0, {}),
        ("prompt", 9000, {}),
        ("max_tokens", 100, {"max_tokens": 8190}),
        ("max_tokens", 100, {"max_tokens": 0}),
        ("surface", 100, {"surface": "telepathy"}),
        ("n", 100, {"n": 0}),
        ("n", 100, {"n": 17}),
        ("n", 100, {"n": 2, "kind": "score"}),
        ("weight", 100, {"weight": 0.0}),
        ("weight", 100, {"weight": float("nan")}),
        ("priority", 100, {"priority": 11}),
        ("deadline", 100, {"deadline": float("inf")}),
        ("score_from", 100, {"kind": "score", "score_from": 101}),
        ("id", 100, {"id": "there"}),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_parameter(
    machine: Machine, parameter: str, tokens: int, wishes: dict[str, object]
) -> None:
    machine.must("there", 10)
    admission = machine.send(str(wishes.pop("id", "a")), tokens, **wishes)
    assert (admission.accepted, admission.parameter) == (False, parameter)
    assert admission.why
    machine.run()


def test_what_does_not_fit_the_memory_is_refused() -> None:
    machine = Machine(BlockManager(10))
    assert machine.send("a", 150, max_tokens=20).parameter == "max_tokens"
    machine.must("b", 150, max_tokens=10)
    machine.run()


def test_draining_finishes_and_admits_nothing_more(machine: Machine) -> None:
    sequence = machine.must("a", 100)
    machine.scheduler.drain()
    refused = machine.send("b", 100)
    assert not refused.accepted
    assert "drain" in refused.why
    machine.run()
    assert machine.finish(sequence) is FinishReason.LENGTH


# Cancelling


def test_a_cancelled_request_is_gone_by_the_next_step(machine: Machine) -> None:
    running, waiting = machine.must("running", 100, max_tokens=100), machine.must("waiting", 100)
    plan = machine.plan()
    assert plan is not None
    assert machine.scheduler.cancel("running", machine.now) == []  # its step is under way
    machine.settle(plan)
    assert machine.finish(running) is FinishReason.CANCELLED
    machine.take(machine.scheduler.cancel("waiting", machine.now))
    assert machine.finish(waiting) is FinishReason.CANCELLED
    assert machine.step() is None
    assert machine.scheduler.idle
    assert machine.blocks.available == machine.blocks.count


def test_cancelling_what_is_not_there_does_nothing(machine: Machine) -> None:
    assert machine.scheduler.cancel("nobody", 0.0) == []
    machine.must("a", 10)
    machine.run()
    assert machine.scheduler.cancel("a", machine.now) == []


def test_all_sequences_of_a_request_are_cancelled(machine: Machine) -> None:
    admission = machine.send("a", 100, n=3, max_tokens=100)
    machine.run(steps=5)
    machine.take(machine.scheduler.cancel("a", machine.now))
    assert [machine.finish(sequence) for sequence in admission.sequences] == [FinishReason.CANCELLED] * 3


# Memory


def test_with_too_little_memory_for_all_everything_still_finishes() -> None:
    machine = Machine(BlockManager(60), policy=Policy(refuse_unmet=False))
    sequences = [machine.must(f"{number}", 150, max_tokens=200) for number in range(12)]
    machine.run()
    assert {machine.finish(sequence) for sequence in sequences} == {FinishReason.LENGTH}
    assert {len(sequence.output) for sequence in sequences} == {200}
    stats = machine.scheduler.stats()
    assert 0 < stats.preempted < 100
    machine.blocks.check()


def test_the_one_with_most_slack_is_preempted_first() -> None:
    machine = Machine(BlockManager(46), policy=Policy(refuse_unmet=False))
    eldest = machine.must("eldest", 100, max_tokens=250, deadline=100.0)
    patient = machine.must("patient", 100, max_tokens=250, deadline=1000.0)
    hurried = machine.must("hurried", 100, max_tokens=250, deadline=50.0)
    machine.run()
    assert machine.rows[patient] > 100 + 249 == machine.rows[eldest] == machine.rows[hurried]


def test_a_preempted_stream_goes_on_where_it_was() -> None:
    machine = Machine(BlockManager(30), policy=Policy(refuse_unmet=False))

    def counting(share: Share) -> ShareOutcome:
        return ShareOutcome([share.sequence.output_count] if share.wanted else [])

    machine.answers = counting
    sequences = [machine.must(f"{number}", 60, max_tokens=150) for number in range(4)]
    machine.run()
    assert machine.scheduler.stats().preempted > 0
    assert all(sequence.output == list(range(150)) for sequence in sequences)


def test_when_pins_leave_no_memory_the_request_fails_and_says_so() -> None:
    machine = Machine(BlockManager(20))
    pinned = prompt(160)
    machine.must("pinned", (*pinned, 1), max_tokens=1)
    sequence = machine.must("a", 200, max_tokens=60)
    machine.run(steps=4)
    machine.blocks.pin(pinned, "")
    for _ in range(400):
        if machine.step() is None:
            break
    assert machine.finish(sequence) is FinishReason.FAILED
    assert "memory" in machine.endings[sequence][0][1]
    assert machine.scheduler.idle
