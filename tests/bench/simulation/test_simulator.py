"""The simulation: what the engine's scheduler promises on traffic that is too large for a test machine, and its inputs.

Everything here is arithmetic with seeds, so the numbers are the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.bench.simulation.baseline_orders import ORDERS
from headrace.bench.simulation.scenarios import ScenarioSetup, abuse, capacity, cold, overload
from headrace.bench.simulation.simulator import Hardware, simulate
from headrace.bench.simulation.synthetic_traffic import TrafficMix, generate, read_simulation_trace
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.errors import RequestError

HARDWARE = Hardware(fixed=0.012, per_row=0.0007, per_pair=30e-9, noise=0.05, blocks=8192)
SETTING = ScenarioSetup(
    mix=TrafficMix(tenants=20, rate=1.5, seconds=90.0, prefixes=2),
    hardware=HARDWARE,
    limits=SchedulerLimits(max_sequences=32, max_rows=512, context=32_768),
    policy=Policy(),
    orders=list(ORDERS),
)


def test_a_tenant_with_a_hundred_times_its_load_hurts_nobody_else() -> None:
    found = {row.order: row for row in abuse(SETTING, 100.0)}
    assert found["fair"].change <= 0.2
    assert found["fair"].abuser_served > 0.3  # and gets what is left
    assert min(found["fcfs"].change, found["longest-prefix"].change) > 5.0


def test_a_prefix_that_nobody_sent_before_is_not_starved() -> None:
    found = {row.order: row for row in cold(replace(SETTING, mix=replace(SETTING.mix, cold=0.2, seconds=180.0)))}
    fair = found["fair"]
    assert fair.requests > 30
    assert fair.p50 < found["fcfs"].p50
    assert fair.most <= 2.0 * fair.rest_most


def test_under_twice_the_load_most_of_the_capacity_is_still_of_use() -> None:
    most = capacity(SETTING)
    found = {row.order: row for row in overload(SETTING, [2.0], most)}
    assert found["fair"].share >= 0.5
    assert found["fair"].goodput > 1.2 * max(found["fcfs"].goodput, found["longest-prefix"].goodput)
    assert found["fair"].most < 2 * SETTING.mix.seconds


@pytest.mark.parametrize("order", ORDERS)
def test_every_call_ends_and_none_is_counted_twice(order: str) -> None:
    calls = list(generate(replace(SETTING.mix, seconds=30.0)))
    run = simulate(calls, HARDWARE, policy=Policy(), limits=SETTING.limits, order=order, seed=1)  # pyright: ignore[reportArgumentType]
    assert sorted(id(record.request) for record in run.outcomes) == sorted(map(id, calls))
    for record in run.outcomes:
        if not record.refused:
            assert 0.0 < record.ttft <= record.end  # both since its arrival
            assert record.tokens == record.request.answer


def test_the_same_seed_gives_the_same_run() -> None:
    calls = list(generate(replace(SETTING.mix, seconds=20.0)))
    ends = [
        [record.end for record in simulate(calls, HARDWARE, policy=Policy(), limits=SETTING.limits, seed=seed).outcomes]
        for seed in (3, 3, 4)
    ]
    assert ends[0] == ends[1] != ends[2]


def test_larger_blocks_hold_more_empty_slots_and_serve_the_same() -> None:
    calls = list(generate(replace(SETTING.mix, seconds=20.0)))
    tokens, wasted = 16_384, [0.0]
    for size in (16, 64, 128):
        hardware = replace(HARDWARE, blocks=tokens // size, block_tokens=size)
        run = simulate(calls, hardware, policy=Policy(), limits=SETTING.limits, seed=1)
        assert [record.tokens for record in run.outcomes if not record.refused] == [
            record.request.answer for record in run.outcomes if not record.refused
        ]
        assert run.wasted > 1.5 * wasted[-1]
        wasted.append(run.wasted)
    assert wasted[-1] < 0.5


def test_a_trace_is_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        '{"at": 0, "prompt": 40, "answer": 5, "tenant": "a", "prefix": "p", "prefix_tokens": 32}',
        '{"at": 1.5, "prompt": 40, "answer": 5, "tenant": "a", "prefix": "p", "prefix_tokens": 32, "deadline": 2.0}',
    ]
    path.write_text("\n".join(lines) + "\n")
    first, second = read_simulation_trace(path)
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt != second.prompt
    assert (second.at, second.deadline) == (1.5, 2.0)
    for wrong in (
        '{"at": 1, "prompt": 0, "answer": 5}',
        '{"at": 1}',
        "no json",
        '{"at": 1, "prompt": 2, "answer": 1, "x": 1}',
    ):
        path.write_text(f"{lines[0]}\n{wrong}\n")
        with pytest.raises(RequestError, match="line 2"):
            list(read_simulation_trace(path))
