"""Breakers, by a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.config.breaker_section import BreakerConfig, UpstreamBreakerConfig
from headrace.gateway.circuit_breaker import BreakerState, CallPermit, CircuitBreaker, StoreBreaker
from tests.support.clock import Clock

CONFIG = BreakerConfig(window_s=10.0, least_calls=4, failures=0.5, open_s=5.0, open_most_s=20.0, probes=2)


def breaker_of(clock: Clock, config: BreakerConfig = CONFIG) -> tuple[CircuitBreaker, list[BreakerState]]:
    heard: list[BreakerState] = []
    return CircuitBreaker(config, clock=clock, changed=heard.append), heard


def entered(breaker: CircuitBreaker) -> CallPermit:
    permit = breaker.enter()
    assert permit is not None
    return permit


def opened(clock: Clock, config: BreakerConfig = CONFIG) -> CircuitBreaker:
    breaker, _ = breaker_of(clock, config)
    for _ in range(config.least_calls):
        entered(breaker).failed()
    assert breaker.state == "open"
    return breaker


def test_few_failures_among_many_calls_open_nothing() -> None:
    breaker, heard = breaker_of(Clock())
    for number in range(100):
        permit = entered(breaker)
        if number % 3 == 2:
            permit.failed()
        else:
            permit.succeeded(0.1)
    assert breaker.state == "closed"
    assert heard == []


def test_nothing_follows_from_too_few_calls() -> None:
    breaker, _ = breaker_of(Clock())
    for _ in range(3):
        entered(breaker).failed()
    assert breaker.state == "closed"
    entered(breaker).failed()
    assert breaker.state == "open"


def test_what_is_older_than_the_window_counts_no_more() -> None:
    clock = Clock()
    breaker, _ = breaker_of(clock)
    for _ in range(3):
        entered(breaker).failed()
    clock.now += 11.0
    for _ in range(3):
        entered(breaker).failed()
    assert breaker.state == "closed"


def test_slow_calls_open_it_too() -> None:
    clock = Clock()
    breaker, _ = breaker_of(clock, BreakerConfig(window_s=10.0, least_calls=5, slow_s=1.0, slow=0.8))
    for seconds in (0.5, 2.0, 2.0, 2.0):
        entered(breaker).succeeded(seconds)
    assert breaker.state == "closed"
    entered(breaker).succeeded(1.5)
    assert breaker.state == "open"


def test_without_a_bound_no_call_is_slow() -> None:
    breaker, _ = breaker_of(Clock())
    for _ in range(50):
        entered(breaker).succeeded(1e6)
    assert breaker.state == "closed"


def test_an_open_one_lets_nothing_through_until_its_time_is_over() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.enter() is None
    assert breaker.why_not() == "its circuit breaker is open for 5.0 s more"
    assert breaker.retry_after() == 5.0
    clock.now += 4.9
    assert breaker.enter() is None
    clock.now += 0.2
    assert breaker.state == "half-open"
    assert breaker.why_not() is None
    assert breaker.enter() is not None


def test_as_many_probes_as_are_needed_and_no_more_are_under_way() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 6.0
    first, second = entered(breaker), entered(breaker)
    assert breaker.enter() is None
    assert "half open" in (breaker.why_not() or "")
    first.succeeded()
    assert breaker.enter() is None  # one more is needed, and it is under way
    second.succeeded()
    assert breaker.state == "closed"


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    clock = Clock()
    breaker = opened(clock)
    for wait in (5.0, 10.0, 20.0, 20.0):
        clock.now += wait - 0.01
        assert breaker.enter() is None
        clock.now += 0.02
        entered(breaker).failed()
        assert breaker.state == "open"
    clock.now += 20.1
    entered(breaker).succeeded()
    entered(breaker).succeeded()
    assert breaker.state == "closed"
    for _ in range(4):
        entered(breaker).failed()
    assert breaker.retry_after() == pytest.approx(5.0)  # it begins anew


def test_a_slow_probe_is_a_failed_one() -> None:
    clock = Clock()
    config = BreakerConfig(least_calls=4, slow_s=1.0, open_s=5.0, probes=1)
    breaker = opened(clock, config)
    clock.now += 6.0
    entered(breaker).succeeded(2.0)
    assert breaker.state == "open"


def test_a_probe_whose_client_left_says_nothing_and_gives_its_place_back() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 6.0
    first, second = entered(breaker), entered(breaker)
    first.dropped()
    second.dropped()
    assert breaker.state == "half-open"
    entered(breaker).succeeded()
    entered(breaker).succeeded()
    assert breaker.state == "closed"


def test_a_probe_that_is_lost_blocks_nothing_for_ever() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 6.0
    lost = [entered(breaker), entered(breaker)]
    assert breaker.enter() is None
    clock.now += 121.0
    entered(breaker).succeeded()
    entered(breaker).succeeded()
    assert breaker.state == "closed"
    for permit in lost:
        permit.failed()
    assert breaker.state == "closed"


def test_what_was_let_through_before_it_opened_does_not_close_or_open_it_later() -> None:
    clock = Clock()
    breaker, _ = breaker_of(clock)
    old = [entered(breaker) for _ in range(20)]
    for permit in old[:4]:
        permit.failed()
    clock.now += 4.0
    for permit in old[4:8]:
        permit.failed()
    assert breaker.retry_after() == 1.0
    clock.now += 2.0
    probe = entered(breaker)
    for permit in old[8:12]:
        permit.succeeded()
    assert breaker.state == "half-open"
    for permit in old[12:16]:
        permit.failed()
    assert breaker.state == "half-open"
    probe.succeeded()
    entered(breaker).succeeded()
    assert breaker.state == "closed"
    for permit in old[16:]:
        permit.failed()
    assert breaker.state == "closed"


def test_the_first_report_of_a_call_counts_alone_but_for_a_failure_after_it() -> None:
    breaker, _ = breaker_of(Clock())
    for _ in range(10):
        permit = entered(breaker)
        permit.succeeded()
        permit.succeeded()
        permit.dropped()
    assert breaker.counts() == (0, 10)
    permit = entered(breaker)
    permit.dropped()
    permit.failed()
    assert breaker.counts() == (0, 10)


def test_a_clock_that_goes_backwards_stands() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now -= 500.0
    assert breaker.retry_after() == 5.0
    assert breaker.enter() is None
    clock.now += 506.0
    assert breaker.state == "half-open"


class BreakerMachine(RuleBasedStateMachine):
    """Any order of calls, ends and time, beside a breaker that is written as simply as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.clock.now = 0.0
        self.breaker, self.heard = breaker_of(self.clock)
        self.running: list[tuple[CallPermit, int]] = []  # with the state's number in which it was let through
        self.state: BreakerState = "closed"
        self.number = 0
        self.calls: list[tuple[int, bool]] = []  # which tenth of a window, and whether it failed
        self.until = 0.0
        self.wait = CONFIG.open_s
        self.well = 0

    def turn(self, state: BreakerState) -> None:
        self.state, self.number, self.calls, self.well = state, self.number + 1, [], 0

    @rule(seconds=st.floats(0.0, 4.0))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def a_call(self) -> None:
        permit = self.breaker.enter()
        probes = sum(number == self.number for _, number in self.running)
        if self.state == "open" and self.clock.now >= self.until:
            self.turn("half-open")
            probes = 0
        allowed = self.state == "closed" or (self.state == "half-open" and probes < CONFIG.probes - self.well)
        assert (permit is not None) == allowed
        if permit is not None:
            self.running.append((permit, self.number))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(("well", "failed", "dropped")))
    def an_end(self, data: st.DataObject, how: str) -> None:
        permit, number = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        report: dict[str, Callable[[], None]] = {
            "well": permit.succeeded,
            "failed": permit.failed,
            "dropped": permit.dropped,
        }
        report[how]()
        if number != self.number or how == "dropped":
            return
        if self.state == "half-open":
            if how == "failed":
                self.wait = min(2 * self.wait, CONFIG.open_most_s)
                self.until = self.clock.now + self.wait
                self.turn("open")
            else:
                self.well += 1
                if self.well == CONFIG.probes:
                    self.wait = CONFIG.open_s
                    self.turn("closed")
            return
        tenth = int(self.clock.now)  # of the window of ten seconds
        self.calls.append((tenth, how == "failed"))
        recent = [failed for when, failed in self.calls if when > tenth - 10]
        if len(recent) >= CONFIG.least_calls and sum(recent) >= CONFIG.failures * len(recent):
            self.until = self.clock.now + self.wait
            self.turn("open")

    @invariant()
    def they_agree(self) -> None:
        shown = "half-open" if self.state == "open" and self.clock.now >= self.until else self.state
        assert self.breaker.state == shown
        assert (self.breaker.why_not() is None) == (
            shown == "closed"
            or (
                shown == "half-open"
                and (
                    self.state == "open"
                    or sum(number == self.number for _, number in self.running) < CONFIG.probes - self.well
                )
            )
        )

    @invariant()
    def states_follow_one_another_as_drawn(self) -> None:
        follow = {"closed": {"open"}, "open": {"half-open"}, "half-open": {"closed", "open"}}
        for before, after in zip(["closed", *self.heard], self.heard, strict=False):
            assert after in follow[before]


# A probe is given up after two minutes, which the plain breaker beside it does not know: too few steps for that.
BreakerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=29, deadline=None)
test_a_breaker_is_what_it_says_in_any_order = BreakerMachine.TestCase


def test_of_an_upstream_failed_and_slow_calls_open_it_together_and_one_probe_closes_it() -> None:
    clock = Clock()
    breaker, _ = breaker_of(clock, UpstreamBreakerConfig(least_calls=4, slow_s=5.0, open_s=2.0))
    for seconds in (1.0, 6.0, 1.0):
        entered(breaker).succeeded(seconds)
    assert breaker.state == "closed"
    entered(breaker).failed()
    assert breaker.state == "open"
    clock.now += 2.0
    assert breaker.ready
    probe = entered(breaker)
    assert not breaker.ready
    probe.succeeded(1.0)
    assert breaker.state == "closed"


def test_an_answer_that_breaks_off_fails_though_it_began_well() -> None:
    breaker, _ = breaker_of(Clock())
    for _ in range(3):
        permit = entered(breaker)
        permit.succeeded(0.1)
        permit.failed()
        permit.failed()
        permit.succeeded(0.1)  # of what comes after a failure nothing counts
    assert breaker.counts() == (3, 3)
    assert breaker.state == "closed"
    entered(breaker).failed()
    assert breaker.state == "open"


def test_a_slow_answer_that_breaks_off_counts_once() -> None:
    breaker, _ = breaker_of(Clock(), UpstreamBreakerConfig(least_calls=9, slow_s=1.0))
    permit = entered(breaker)
    permit.succeeded(2.0)
    permit.failed()
    assert breaker.counts() == (1, 1)


def test_a_probe_that_breaks_off_later_counts() -> None:
    clock = Clock()
    breaker = opened(clock, UpstreamBreakerConfig(least_calls=4, open_s=2.0))
    clock.now += 2.0
    probe = entered(breaker)
    probe.succeeded(0.1)
    assert breaker.state == "closed"
    probe.failed()
    assert breaker.counts() == (1, 1)
    # Where more probes are needed, it opens again at once.
    breaker = opened(clock)
    clock.now += 6.0
    probe = entered(breaker)
    probe.succeeded(0.1)
    probe.failed()
    assert breaker.state == "open"


def test_what_nobody_waited_for_counts_for_nothing() -> None:
    breaker, _ = breaker_of(Clock())
    for _ in range(20):
        entered(breaker).dropped()
    assert breaker.counts() == (0, 0)


def test_a_streak_of_failures_rests_and_lets_one_call_try() -> None:
    clock = Clock()
    streak = StoreBreaker(failures=2, rest_s=5.0, clock=clock)
    assert [streak.failed(), streak.failed(), streak.failed()] == [False, True, False]
    assert not streak.passes()
    assert streak.left() == 5.0
    clock.now -= 100.0  # a clock that goes backwards stands
    assert streak.left() == 5.0
    clock.now += 105.0
    assert streak.passes()
    assert not streak.passes()  # one is under way
    streak.dropped()
    assert streak.passes()
    streak.succeeded()
    assert not streak.open
    assert streak.passes()
