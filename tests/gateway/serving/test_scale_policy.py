"""How many replicas a burst gets: fast enough, without swinging, and never beyond what may be paid."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest

from headrace.bench.simulation.synthetic_traffic import TrafficMix, generate
from headrace.gateway.serving.scale_policy import ScaleLoad, ScalePolicy, ScaleRules

RULES = ScaleRules(least=1, most=6, wait_s=1.0, calm=0.4, up_s=2.0, down_s=60.0)
TOKENS_PER_S = 400.0  # of one replica
START_S = 3.0  # until a replica takes requests


def burst() -> list[tuple[float, float]]:
    """Times and tokens of ten minutes of traffic: calm, a burst of ten times as many requests, calm again."""
    calm = TrafficMix(tenants=20, seconds=600.0, rate=0.2, seed=3)
    more = TrafficMix(tenants=20, seconds=120.0, rate=2.0, seed=4)
    found = [(each.at, float(len(each.prompt) + each.answer)) for each in generate(calm)]
    return sorted(found + [(120.0 + each.at, float(len(each.prompt) + each.answer)) for each in generate(more)])


@dataclass
class Run:
    waits: list[float]
    counts: list[int]  # of replicas, at each second

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in zip(self.counts, self.counts[1:], strict=False))

    def late(self, seconds: float) -> float:
        return sum(wait > seconds for wait in self.waits) / len(self.waits)


def simulate(rules: ScaleRules, traffic: list[tuple[float, float]], seconds: int = 900) -> Run:
    """Replicas as one queue that is served at their joint speed, looked at once a second."""
    policy, arrivals = ScalePolicy(rules), deque(traffic)
    run = Run([], [])
    backlog, requests = 0.0, 0
    starting: list[float] = []  # when each is ready
    ready = rules.least
    for now in range(seconds):
        ready += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        requests = 0
        while arrivals and arrivals[0][0] <= now:
            _, tokens = arrivals.popleft()
            run.waits.append(backlog / (max(ready, 0.01) * TOKENS_PER_S))
            backlog += tokens
            requests += 1
        backlog = max(0.0, backlog - ready * TOKENS_PER_S)
        load = ScaleLoad(
            replicas=ready + len(starting),
            ready=ready,
            wait_s=backlog / (ready * TOKENS_PER_S) if ready else 0.0,
            requests=requests + int(backlog > 0),
        )
        wanted = policy.decide(float(now), load)
        assert rules.least <= wanted <= rules.most
        starting += [now + START_S] * (wanted - load.replicas)
        ready -= max(0, load.replicas - wanted)
        run.counts.append(ready + len(starting))
    return run


def test_a_burst_gets_replicas_that_go_again_and_costs_less_than_having_them_always() -> None:
    traffic = burst()
    fixed, scaled = simulate(ScaleRules(least=1, most=1), traffic), simulate(RULES, traffic)
    always = simulate(ScaleRules(least=6, most=6), traffic)
    assert fixed.late(10.0) > 0.5
    assert scaled.late(10.0) < 0.15
    assert always.late(10.0) <= scaled.late(10.0)
    assert sum(scaled.counts) < 0.6 * sum(always.counts)
    assert (max(scaled.counts[:120]), max(scaled.counts), scaled.counts[-1]) == (2, 6, 1)
    assert scaled.changes <= 14  # up in a few steps and down one by one: it does not swing


def test_no_more_replicas_run_than_the_budget_pays() -> None:
    rules = ScaleRules.within(price=0.5, budget=1.7, least=1, most=6, wait_s=1.0)
    assert rules.most == 3
    assert max(simulate(rules, burst()).counts) == 3
    assert ScaleRules.within(price=2.0, budget=1.0, most=6).most == 1
    assert ScaleRules.within(price=0.0, budget=None, most=6).most == 6


def test_a_short_peak_and_a_replica_that_starts_change_nothing() -> None:
    policy = ScalePolicy(RULES)

    def at(now: float, wait: float, *, replicas: int = 2, ready: int = 2) -> int:
        return policy.decide(now, ScaleLoad(replicas=replicas, ready=ready, wait_s=wait, requests=1))

    assert [at(0.0, 5.0), at(1.0, 0.1), at(2.0, 5.0), at(3.0, 5.0)] == [2, 2, 2, 2]
    assert at(4.0, 5.0) == 4  # twice as many at most
    assert [at(now, 9.0, replicas=4, ready=2) for now in (5.0, 8.0)] == [4, 4]
    assert [at(now, 0.1, replicas=4, ready=4) for now in (9.0, 60.0, 69.0, 70.0)] == [4, 4, 3, 4]


def test_without_requests_the_last_replica_stops_and_the_first_request_starts_it() -> None:
    policy = ScalePolicy(ScaleRules(least=0, most=2, idle_stop_s=30.0))

    def at(now: float, requests: int, replicas: int = 1) -> int:
        return policy.decide(now, ScaleLoad(replicas=replicas, ready=replicas, wait_s=0.0, requests=requests))

    assert [at(0.0, 0), at(29.0, 1), at(31.0, 0), at(60.0, 0)] == [1, 1, 1, 1]
    assert at(61.0, 0) == 0
    assert at(62.0, 0, replicas=0) == 0
    assert at(63.0, 1, replicas=0) == 1


@pytest.mark.parametrize("replicas", [0, 3])
def test_the_bounds_hold_whatever_runs(replicas: int) -> None:
    policy = ScalePolicy(ScaleRules(least=1, most=2))
    load = ScaleLoad(replicas=replicas, ready=replicas, wait_s=0.0, requests=0)
    assert policy.decide(0.0, load) == min(2, max(1, replicas))
