"""Reference modes: they give the same tokens, and leave out what they say they leave out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.bench.engine_runs import EngineJob, run_jobs
from headrace.bench.references.allocation import MemoryRequest, simulate_allocation
from headrace.bench.references.engine_modes import MODES, compare_modes, reference_jobs
from headrace.bench.references.kernels import compare_attention, compare_fusion, full_attention, tiled_attention
from headrace.bench.simulation.simulator import Hardware, simulate
from headrace.bench.simulation.synthetic_traffic import LogNormalLengths, SurfaceProfile, TrafficMix, generate
from headrace.cli import main
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.models.model_folder import open_model
from headrace.variant import Variant
from tests.support.tiny_engine import open_tiny


def test_every_mode_gives_the_same_tokens_and_computes_what_it_says(tiny_folder: Path) -> None:
    folder = open_model(tiny_folder)
    jobs = reference_jobs(folder.spec.vocab_size, requests=4, prompt=64, answer=6)
    variant = Variant.of(str(tiny_folder), weights="int8", threads=2, context=128, kv_tokens=1024, cache=False)
    found = {row.mode: row for row in compare_modes(folder, variant, jobs, batch=2, rounds=1)}
    assert tuple(found) == MODES
    assert all(row.same_tokens for row in found.values())
    answers = sum(job.answer for job in jobs)
    prompts = sum(len(job.prompt) for job in jobs)
    # Without a cache, the token after n tokens takes all n again; the last token of an answer is never computed.
    assert found["no-prefix-reuse"].rows == prompts + answers - len(jobs)
    assert found["engine"].rows < found["no-prefix-reuse"].rows
    assert found["no-kv-cache"].rows == sum(sum(len(job.prompt) + done for done in range(job.answer)) for job in jobs)


def test_static_batches_wait_for_their_slowest_request(tiny_folder: Path) -> None:
    jobs = [EngineJob(prompt=tuple(range(number, number + 20)), answer=2 + 10 * (number % 2)) for number in range(4)]
    opened = open_tiny(tiny_folder)
    ticks = iter(range(10**6))
    try:
        static = run_jobs(opened, jobs, batching="static", batch=2, clock=lambda: float(next(ticks)))
        free = run_jobs(opened, jobs, clock=lambda: float(next(ticks)))
        serial = run_jobs(opened, jobs, batching="serial", clock=lambda: float(next(ticks)))
    finally:
        opened.engine.close()
    assert static.tokens == free.tokens == serial.tokens
    assert static.ttft[2] > static.e2el[1]  # the third starts after the longer one of the first two
    assert free.ttft[2] < free.e2el[1]
    assert free.latencies()["ttft_p95"] < static.latencies()["ttft_p95"] < serial.latencies()["ttft_p95"]


def test_idle_time_between_arrivals_is_skipped(tiny_folder: Path) -> None:
    jobs = [EngineJob(prompt=(1, 2, 3), answer=2, at=1000.0 * number) for number in range(3)]
    opened = open_tiny(tiny_folder)
    ticks = iter(range(10**6))
    try:
        run = run_jobs(opened, jobs, clock=lambda: float(next(ticks)))
    finally:
        opened.engine.close()
    assert run.seconds < 1000.0
    assert max(run.e2el) < 100.0


def test_pages_waste_less_than_pieces_and_hold_more_sequences() -> None:
    requests = [MemoryRequest(100, 20 + number % 50, 200) for number in range(100)]
    found = {
        policy: simulate_allocation(requests, policy, kv_tokens=4096, context=1024)
        for policy in ("paged", "contiguous-request", "contiguous-context")
    }
    context = found["contiguous-context"]
    assert context.at_once <= 4.0
    assert context.wasted > 0.8
    assert found["contiguous-request"].wasted == pytest.approx(1 - 125 / 300, abs=0.1)
    assert found["paged"].wasted < 0.1
    assert found["paged"].at_once > 2 * found["contiguous-request"].at_once > 4 * context.at_once
    assert found["paged"].time < found["contiguous-request"].time < context.time


def test_larger_blocks_waste_more_and_hold_fewer_sequences() -> None:
    requests = [MemoryRequest(100 + number % 37, 20 + number % 50, 200) for number in range(100)]
    found = [
        simulate_allocation(requests, "paged", kv_tokens=4096, context=1024, block=size) for size in (16, 32, 64, 128)
    ]
    assert [each.block for each in found] == [16, 32, 64, 128]
    wasted, at_once = [each.wasted for each in found], [each.at_once for each in found]
    assert wasted == sorted(wasted)
    assert wasted[0] < 0.08 < 0.25 < wasted[-1]
    assert at_once == sorted(at_once, reverse=True)


def test_gaps_that_are_too_short_are_counted_as_unusable() -> None:
    # Two of 400 in 1000: 200 are free and nothing fits.
    requests = [MemoryRequest(300, 100, 100)] * 4
    found = simulate_allocation(requests, "contiguous-request", kv_tokens=1000, context=1000)
    assert found.at_once == 2.0
    assert found.time == 200
    assert found.unusable == pytest.approx(0.2 * 0.5)


def test_preempted_sequences_start_again_and_all_end() -> None:
    requests = [MemoryRequest(16, 100, 100)] * 8
    found = simulate_allocation(requests, "paged", kv_tokens=512, context=512)
    assert found.preempted > 0
    assert found.time >= 8 * 100 * 66 // 512


def test_tiled_attention_is_exact_for_any_length() -> None:
    rng = np.random.default_rng(1)
    for tokens in (1, 63, 64, 65, 200):
        q, k, v = (rng.standard_normal((2, tokens, 16), dtype=np.float32) for _ in range(3))
        np.testing.assert_allclose(tiled_attention(q, k, v), full_attention(q, k, v), atol=2e-6)
    assert compare_attention(300, rounds=1).difference < 1e-5
    joined = compare_fusion(33, rounds=1)
    assert joined.difference < 1e-4
    assert joined.better_bytes < joined.plain_bytes


def test_the_simulator_shows_what_continuous_batching_gains() -> None:
    kind = SurfaceProfile(
        share=1.0,
        prefix=LogNormalLengths(median=20, spread=0.0),
        own=LogNormalLengths(median=40, spread=0.0),
        answer=LogNormalLengths(median=60, spread=0.9),
    )
    mix = TrafficMix(tenants=5, rate=40.0, seconds=10.0, kinds={"chat": kind}, bursts=0.0)
    calls = [replace(call, at=0.0) for call in generate(mix)]
    limits = SchedulerLimits(max_sequences=16, queued_sequences=4096, queued_per_tenant=4096)
    runs = {
        order: simulate(calls, Hardware(noise=0.0), policy=Policy(), limits=limits, order=order)  # pyright: ignore
        for order in ("fcfs", "static", "serial")
    }
    for run in runs.values():
        assert all(record.tokens == record.request.answer for record in run.outcomes)
        assert run.unserved == 0
    assert 1.3 * runs["fcfs"].seconds < runs["static"].seconds
    assert 3.0 * runs["static"].seconds < runs["serial"].seconds


def test_the_command_prints_all_three(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "reference", str(tiny_folder), "--requests", "2", "--prompt", "24", "--answer", "3"]
    arguments += ["--rounds", "1", "--threads", "2", "--no-cache"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in found["engine"]] == list(MODES)
    assert [(row["policy"], row["block"]) for row in found["memory"]] == [
        *(("paged", size) for size in (16, 32, 64, 128)),
        ("contiguous-request", 0),
        ("contiguous-context", 0),
    ]
    assert len(found["kernels"]) == 7
    assert main([*arguments, "--what", "memory"]) == 0
    assert "contiguous-context" in capsys.readouterr().out
    assert main([*arguments, "--context", "10"]) == 2
    assert "context must be from 30" in capsys.readouterr().err
