"""How far down a ladder a surface goes: hysteresis, monotony, and whose pressure it is."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config.shaping_section import LadderConfig, LadderStepConfig
from headrace.gateway.degradation.ladder.levels import NO_LEVEL, Ladder, LadderState, PressureSignals, next_state

DWELL = 2.0
LADDER = LadderConfig(
    steps=(
        LadderStepConfig(step="trim", queue_ms=(1000.0, 500.0), memory_free=(0.2, 0.3)),
        LadderStepConfig(step="max_tokens", queue_ms=(2000.0, 1000.0), memory_free=(0.1, 0.2)),
        LadderStepConfig(step="extract", queue_ms=(4000.0, 2000.0), slack_ms=(0.0, 1000.0)),
        LadderStepConfig(step="refuse", queue_ms=(8000.0, 4000.0), budget_left=(0.01, 0.02)),
    ),
    dwell_s=DWELL,
    hold_s=10.0,
)
queues = st.none() | st.floats(0.0, 12_000.0)
shares = st.none() | st.floats(0.0, 1.0)
signals = st.builds(PressureSignals, queue_ms=queues, memory_free=shares, budget_left=shares)
states = st.builds(LadderState, st.integers(0, 4), st.floats(0.0, 50.0), st.floats(0.0, 50.0))


def queue(seconds: float | None) -> PressureSignals:
    return PressureSignals(queue_ms=None if seconds is None else 1e3 * seconds)


@settings(max_examples=150, deadline=None)
@given(states, signals, st.floats(0.0, 5_000.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 60.0))
def test_more_pressure_never_gives_a_milder_level(
    state: LadderState, calm: PressureSignals, queue_more: float, memory_less: float, budget_less: float, now: float
) -> None:
    worse = PressureSignals(
        queue_ms=None if calm.queue_ms is None else calm.queue_ms + queue_more,
        memory_free=None if calm.memory_free is None else calm.memory_free - memory_less,
        budget_left=None if calm.budget_left is None else calm.budget_left - budget_less,
    )
    assert next_state(LADDER, state, worse, now).number >= next_state(LADDER, state, calm, now).number


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_ladder_never_flaps_faster_than_the_dwell_time(seed: int) -> None:
    draw = Random(seed)
    state, now = LadderState(), 0.0
    changes: list[tuple[float, int]] = []
    for _ in range(80):
        now += draw.choice((0.01, 0.3, 1.0, 3.0))
        found = PressureSignals(
            queue_ms=draw.choice((None, 12e3 * draw.random() ** 2)),
            memory_free=draw.choice((None, draw.random())),
            budget_left=draw.choice((None, None, draw.random())),
        )
        before, state = state, next_state(LADDER, state, found, now)
        if state.number != before.number:
            changes.append((now, state.number - before.number))
    for (at, _), (later, change) in pairwise(changes):
        if change < 0:
            assert later - at >= DWELL
            assert change == -1  # one step at a time
    falls = [at for at, change in changes if change < 0]
    assert all(later - at >= DWELL for at, later in pairwise(falls))


def test_steps_are_entered_at_once_and_left_slowly() -> None:
    ladder = Ladder({"chat": LADDER}, clock=lambda: 0.0)
    way = [(0.0, 0.2, 0), (0.1, 1.0, 1), (0.2, 4.5, 3), (1.0, 3.0, 3), (2.1, 1.9, 3), (2.3, 1.9, 2), (4.2, 0.1, 2)]
    way += [(4.4, 0.1, 1), (6.5, 0.6, 1), (6.6, 0.5, 0), (6.7, 9.0, 4)]
    for now, seconds, number in way:
        level = ladder.decide("chat", queue(seconds), now)
        assert (now, level.number) == (now, number)
        assert [step.step for step in level.steps] == [step.step for step in LADDER.steps[:number]]
    assert ladder.number("chat") == 4
    assert ladder.decide("chat", queue(9.0), 6.8).name == "refuse"


def test_the_signals_that_lead_to_a_step_are_named() -> None:
    ladder = Ladder({"chat": LADDER})
    assert ladder.decide("chat", PressureSignals(queue_ms=2500.0, memory_free=0.05), 0.0).reasons == (
        "queue_ms",
        "memory_free",
    )
    assert (
        ladder.decide("chat", PressureSignals(queue_ms=0.0, memory_free=1.0), 0.1).reasons == ()
    )  # held by the dwell time alone


def test_what_is_not_known_holds_a_step_for_so_long_and_no_longer() -> None:
    ladder = Ladder({"chat": LADDER})
    assert ladder.decide("chat", queue(1.5), 0.0).number == 1
    assert ladder.decide("chat", queue(None), 9.9).number == 1
    assert ladder.decide("chat", queue(None), 10.1).number == 0


def test_a_clock_that_goes_back_changes_nothing() -> None:
    state = next_state(LADDER, LadderState(), queue(1.5), 100.0)
    assert next_state(LADDER, state, queue(0.0), 50.0) == replace(state, known_at=50.0)


def test_a_deadline_is_the_requests_own() -> None:
    ladder = Ladder({"chat": LADDER})
    late = ladder.decide("chat", PressureSignals(queue_ms=0.0, slack_ms=-100.0), 0.0)
    assert (late.name, late.reasons) == ("extract", ("slack_ms",))
    assert ladder.decide("chat", PressureSignals(queue_ms=0.0, slack_ms=5000.0), 0.1) == NO_LEVEL
    assert ladder.number("chat") == 0


def test_surfaces_and_tenants_have_states_of_their_own() -> None:
    ladder = Ladder({"chat": LADDER, "voice": LADDER})
    assert ladder.decide("chat", queue(9.0), 0.0, scope="a").number == 4
    assert ladder.decide("chat", queue(0.0), 0.1, scope="b").number == 0
    assert ladder.decide("voice", queue(0.0), 0.1, scope="a").number == 0
    assert ladder.decide("chat", queue(0.0), 0.1, scope="a").number == 4
    assert ladder.decide("agent", queue(99.0), 0.1) == NO_LEVEL  # nothing is declared for it


def test_states_are_bounded() -> None:
    ladder = Ladder({"chat": LADDER}, max_states=3)
    for name in "abcd":
        assert ladder.decide("chat", queue(9.0), 0.0, scope=name).number == 4
    assert [ladder.number("chat", name) for name in "abcd"] == [0, 4, 4, 4]


def test_a_step_can_be_ordered() -> None:
    ladder = Ladder({"chat": LADDER})
    assert ladder.decide("chat", queue(0.0), 0.0, least="max_tokens").name == "max_tokens"
    assert ladder.decide("chat", queue(5.0), 0.1, least="max_tokens").name == "extract"
    assert ladder.decide("chat", queue(0.0), 0.2, least="variant").name == "extract"  # not declared, so not taken
    assert ladder.bottom("chat").name == "refuse"
    assert ladder.bottom("agent") == NO_LEVEL
