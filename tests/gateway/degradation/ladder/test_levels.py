"""How far down a ladder a surface goes: hysteresis, monotony, and whose pressure it is."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.gateway.degradation.ladder.ladder_options import (
    ORDER,
    LadderOptions,
    StepOptions,
    Threshold,
    by_patience,
    findings,
)
from headrace.gateway.degradation.ladder.levels import NONE, Ladder, LadderState, PressureSignals, next_state

DWELL = 2.0
OPTIONS = LadderOptions(
    steps=(
        StepOptions(step="trim", queue_s=Threshold(1.0, 0.5), memory_free=Threshold(0.2, 0.3)),
        StepOptions(step="max_tokens", queue_s=Threshold(2.0, 1.0), memory_free=Threshold(0.1, 0.2)),
        StepOptions(step="extract", queue_s=Threshold(4.0, 2.0), slack_s=Threshold(0.0, 1.0)),
        StepOptions(step="refuse", queue_s=Threshold(8.0, 4.0), budget_left=Threshold(0.01, 0.02)),
    ),
    dwell_s=DWELL,
    hold_s=10.0,
)
queues = st.none() | st.floats(0.0, 12.0)
shares = st.none() | st.floats(0.0, 1.0)
signals = st.builds(PressureSignals, queue_s=queues, memory_free=shares, budget_left=shares)
states = st.builds(LadderState, st.integers(0, 4), st.floats(0.0, 50.0), st.floats(0.0, 50.0))


def queue(seconds: float | None) -> PressureSignals:
    return PressureSignals(queue_s=seconds)


@settings(max_examples=150, deadline=None)
@given(states, signals, st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 60.0))
def test_more_pressure_never_gives_a_milder_level(
    state: LadderState, calm: PressureSignals, queue_more: float, memory_less: float, budget_less: float, now: float
) -> None:
    worse = PressureSignals(
        queue_s=None if calm.queue_s is None else calm.queue_s + queue_more,
        memory_free=None if calm.memory_free is None else calm.memory_free - memory_less,
        budget_left=None if calm.budget_left is None else calm.budget_left - budget_less,
    )
    assert next_state(OPTIONS, state, worse, now).number >= next_state(OPTIONS, state, calm, now).number


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_ladder_never_flaps_faster_than_the_dwell_time(seed: int) -> None:
    draw = Random(seed)
    state, now = LadderState(), 0.0
    changes: list[tuple[float, int]] = []
    for _ in range(80):
        now += draw.choice((0.01, 0.3, 1.0, 3.0))
        found = PressureSignals(
            queue_s=draw.choice((None, 12.0 * draw.random() ** 2)),
            memory_free=draw.choice((None, draw.random())),
            budget_left=draw.choice((None, None, draw.random())),
        )
        before, state = state, next_state(OPTIONS, state, found, now)
        if state.number != before.number:
            changes.append((now, state.number - before.number))
    for (at, _), (later, change) in pairwise(changes):
        if change < 0:
            assert later - at >= DWELL
            assert change == -1  # one step at a time
    falls = [at for at, change in changes if change < 0]
    assert all(later - at >= DWELL for at, later in pairwise(falls))


def test_steps_are_entered_at_once_and_left_slowly() -> None:
    ladder = Ladder({"chat": OPTIONS}, clock=lambda: 0.0)
    way = [(0.0, 0.2, 0), (0.1, 1.0, 1), (0.2, 4.5, 3), (1.0, 3.0, 3), (2.1, 1.9, 3), (2.3, 1.9, 2), (4.2, 0.1, 2)]
    way += [(4.4, 0.1, 1), (6.5, 0.6, 1), (6.6, 0.5, 0), (6.7, 9.0, 4)]
    for now, seconds, number in way:
        level = ladder.decide("chat", queue(seconds), now)
        assert (now, level.number) == (now, number)
        assert [step.step for step in level.steps] == [step.step for step in OPTIONS.steps[:number]]
    assert ladder.number("chat") == 4
    assert ladder.decide("chat", queue(9.0), 6.8).name == "refuse"


def test_the_signals_that_lead_to_a_step_are_named() -> None:
    ladder = Ladder({"chat": OPTIONS})
    assert ladder.decide("chat", PressureSignals(queue_s=2.5, memory_free=0.05), 0.0).why == ("queue_s", "memory_free")
    assert (
        ladder.decide("chat", PressureSignals(queue_s=0.0, memory_free=1.0), 0.1).why == ()
    )  # held by the dwell time alone


def test_what_is_not_known_holds_a_step_for_so_long_and_no_longer() -> None:
    ladder = Ladder({"chat": OPTIONS})
    assert ladder.decide("chat", queue(1.5), 0.0).number == 1
    assert ladder.decide("chat", queue(None), 9.9).number == 1
    assert ladder.decide("chat", queue(None), 10.1).number == 0


def test_a_clock_that_goes_back_changes_nothing() -> None:
    state = next_state(OPTIONS, LadderState(), queue(1.5), 100.0)
    assert next_state(OPTIONS, state, queue(0.0), 50.0) == replace(state, known=50.0)


def test_a_deadline_is_the_requests_own() -> None:
    ladder = Ladder({"chat": OPTIONS})
    late = ladder.decide("chat", PressureSignals(queue_s=0.0, slack_s=-0.1), 0.0)
    assert (late.name, late.why) == ("extract", ("slack_s",))
    assert ladder.decide("chat", PressureSignals(queue_s=0.0, slack_s=5.0), 0.1) == NONE
    assert ladder.number("chat") == 0


def test_surfaces_and_tenants_have_states_of_their_own() -> None:
    ladder = Ladder({"chat": OPTIONS, "voice": OPTIONS})
    assert ladder.decide("chat", queue(9.0), 0.0, of="a").number == 4
    assert ladder.decide("chat", queue(0.0), 0.1, of="b").number == 0
    assert ladder.decide("voice", queue(0.0), 0.1, of="a").number == 0
    assert ladder.decide("chat", queue(0.0), 0.1, of="a").number == 4
    assert ladder.decide("agent", queue(99.0), 0.1) == NONE  # nothing is declared for it


def test_states_are_bounded() -> None:
    ladder = Ladder({"chat": OPTIONS}, most=3)
    for name in "abcd":
        assert ladder.decide("chat", queue(9.0), 0.0, of=name).number == 4
    assert [ladder.number("chat", name) for name in "abcd"] == [0, 4, 4, 4]


def test_a_step_can_be_ordered() -> None:
    ladder = Ladder({"chat": OPTIONS})
    assert ladder.decide("chat", queue(0.0), 0.0, least="max_tokens").name == "max_tokens"
    assert ladder.decide("chat", queue(5.0), 0.1, least="max_tokens").name == "extract"
    assert ladder.decide("chat", queue(0.0), 0.2, least="variant").name == "extract"  # not declared, so not taken
    assert ladder.bottom("chat").name == "refuse"
    assert ladder.bottom("agent") == NONE


def test_the_ladder_by_patience_is_one_that_may_be_declared() -> None:
    made = by_patience(10.0, variants=("fast",))
    assert [step.step for step in made.steps] == list(ORDER)
    assert made.steps[0].queue_s == Threshold(1.0, 0.5)
    assert [step.step for step in by_patience(10.0).steps] == [name for name in ORDER if name != "variant"]
    assert list(findings(made)) == []
    assert by_patience(float("inf")).steps == ()


def test_wrong_ladders_are_found_out() -> None:
    wrong = LadderOptions(
        steps=(
            StepOptions(step="extract", queue_s=Threshold(2.0, 2.0)),
            StepOptions(step="trim", queue_s=Threshold(1.0, 0.5), memory_free=Threshold(0.2, 0.1)),
            StepOptions(step="variant", variants=(), max_tokens=0),
        ),
        dwell_s=0.0,
    )
    assert list(findings(wrong)) == [
        ("dwell_s", "expected seconds above 0, found 0"),
        ("steps[0].queue_s", "expected leave below enter, found enter 2, leave 2"),
        ("steps[1].step", f"expected the order {', '.join(ORDER)}, each once, found trim after extract"),
        ("steps[1].queue_s", "expected no milder thresholds than those of the step before"),
        ("steps[1].memory_free", "expected leave above enter, found enter 0.2, leave 0.1"),
        ("steps[2]", "expected a threshold of at least one of queue_s, memory_free, slack_s, budget_left"),
        ("steps[2].max_tokens", "expected at least 1, found 0"),
        ("steps[2].variants", "expected at least one"),
    ]
