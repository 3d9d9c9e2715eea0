"""Windows, steady time, estimates and headers, each for itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.limits.limit_scopes import SECOND, WindowLimit, WindowStatus
from headrace.gateway.limits.output_estimates import OutputEstimates
from headrace.gateway.limits.rate_windows import SlidingWindow, SteadyClock
from headrace.gateway.limits.ratelimit_headers import format_duration, rate_headers

STEPS = st.lists(st.tuples(st.integers(0, 400_000), st.integers(1, 30)), min_size=1, max_size=80)


@given(steps=STEPS, limit=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_a_window_lets_in_what_fits_and_nothing_else(steps: list[tuple[int, int]], limit: int) -> None:
    window = SlidingWindow(limit, SECOND)
    used: list[tuple[int, int]] = []
    now = 0
    for pause, amount in steps:
        now += pause
        window.forget(now)
        within = sum(count for time, count in used if time > now - SECOND)
        assert window.used == within
        assert (amount <= window.room()) == (within + amount <= limit)
        if amount <= window.room():
            window.use(now, amount)
            used.append((now, amount))
        elif amount <= limit:
            wait, exact = window.wait(now, amount - window.room(), 0)
            assert exact
            for time, fits in ((now + wait - 1, False), (now + wait, True)):
                assert (sum(count for when, count in used if when > time - SECOND) + amount <= limit) == fits


@given(steps=STEPS, entries=st.integers(4, 12))
@settings(max_examples=100, deadline=None)
def test_few_entries_count_longer_and_never_shorter(steps: list[tuple[int, int]], entries: int) -> None:
    window = SlidingWindow(1000, SECOND, entries=entries)
    used: list[tuple[int, int]] = []
    now = 0
    late = SECOND // (entries // 2)
    for pause, amount in steps:
        now += pause
        window.forget(now)
        window.use(now, amount)
        used.append((now, amount))
        assert len(window) <= entries
        assert window.used >= sum(count for time, count in used if time > now - SECOND)
        assert window.used <= sum(count for time, count in used if time > now - SECOND - late)


@given(steps=STEPS, place=st.integers(0, 79), back=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_what_is_given_back_is_free_at_once_and_nothing_else_earlier(
    steps: list[tuple[int, int]], place: int, back: int
) -> None:
    window = SlidingWindow(10_000, SECOND)
    used: list[list[int]] = []
    now = 0
    for pause, amount in steps:
        now += pause
        window.forget(now)
        window.use(now, amount)
        used.append([now, amount])
    since, amount = used[place % len(used)]
    back = min(back, amount)
    window.give_back(now, since, back)
    used[place % len(used)][1] -= back if since > now - SECOND else 0
    for time in (now, *(when + SECOND for when, _ in used)):
        if time >= now:
            window.forget(time)
            assert window.used == sum(count for when, count in used if when > time - SECOND)


def test_time_never_goes_back_and_goes_on_after_a_jump() -> None:
    told = [10.0]
    now = SteadyClock(lambda: told[0])
    assert now() == 10_000_000
    told[0] = 12.5
    assert now() == 12_500_000
    told[0] = 3.0
    assert now() == 12_500_000
    told[0] = 4.0
    assert now() == 13_500_000


def test_estimates_are_cautious_until_they_know_and_follow_what_comes() -> None:
    estimates = OutputEstimates(first_tokens=100, few=5, recent=20)
    assert estimates.tokens("a", "chat", 1000) == 100
    assert estimates.tokens("a", "chat", 30) == 30
    estimates.learn("a", "chat", 300, 2_000_000)
    assert estimates.tokens("a", "chat", 1000) == 600  # twice the longest of a few
    for _ in range(19):
        estimates.learn("a", "chat", 10, 1_000_000)
    assert estimates.tokens("a", "chat", 1000) == 10  # 19 of 20
    estimates.learn("a", "chat", 50, 1_000_000)
    estimates.learn("a", "chat", 50, 1_000_000)
    assert estimates.tokens("a", "chat", 1000) == 50
    assert estimates.micros("a", "chat") == 1_000_000
    assert estimates.tokens("a", "voice", 1000) == estimates.tokens("b", "chat", 1000) == 100


def test_few_short_answers_lower_the_first_estimate() -> None:
    estimates = OutputEstimates()
    assert [estimates.tokens("a", surface, 4096) for surface in ("chat", "batch", "voice")] == [512, 512, 128]
    found: list[int] = []
    for _ in range(4):
        estimates.learn("a", "chat", 32, 1_000_000)
        found.append(estimates.tokens("a", "chat", 4096))
    assert found == [256, 170, 128, 102]
    for _ in range(8):
        estimates.learn("a", "chat", 32, 1_000_000)
    assert estimates.tokens("a", "chat", 4096) == 64  # never below twice the longest
    assert estimates.tokens("a", "chat", 20) == 20


def test_estimates_keep_the_pairs_used_last() -> None:
    estimates = OutputEstimates(first_tokens=100, few=1, pairs=50)
    for tenant in range(5000):
        estimates.learn(f"tenant {tenant}", "chat", 7, 1)
        estimates.learn("busy", "chat", 8, 1)
    assert len(estimates) == 50
    assert estimates.tokens("busy", "chat", 1000) == 8
    assert estimates.tokens("tenant 4999", "chat", 1000) == 7
    assert estimates.tokens("tenant 0", "chat", 1000) == 100


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (12_000, "12ms"),
        (999_001, "1s"),
        (1_000_000, "1s"),
        (1_200_000, "1.2s"),
        (8_640_000, "8.64s"),
        (59_999_999, "1m0s"),
        (360_000_000, "6m0s"),
        (61_500_000, "1m1.5s"),
        (3_600_000_000, "1h0m0s"),
    ],
)
def test_durations_are_written_as_clients_expect(micros: int, text: str) -> None:
    assert format_duration(micros) == text


def test_headers_speak_of_the_limit_with_the_smallest_share_left() -> None:
    standings = (
        WindowStatus(WindowLimit("requests_per_s", "requests", 0, 10), 9, 100_000),
        WindowStatus(WindowLimit("requests_per_min", "requests", 1, 100), 20, 42_000_000),
        WindowStatus(WindowLimit("input_tokens_per_min", "input_tokens", 1, 1000), 500, 1_000_000),
        WindowStatus(WindowLimit("output_tokens_per_min", "output_tokens", 1, 400), -3, 60_000_000),
    )
    assert rate_headers(standings) == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "20",
        "x-ratelimit-reset-requests": "42s",
        "x-ratelimit-limit-tokens": "400",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    assert rate_headers(()) == {}
