"""Threads: the GIL is free while the core computes, idle threads cost nothing, and no number of them changes a bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

import headrace._core as _core
from tests.core.tiny import ISAS, SPECS, Share, Tiny, packed, same_bits, text

MODEL = SPECS["everything"]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "") or "libtsan" in os.environ.get("LD_PRELOAD", "")


@pytest.mark.parametrize("threads", [1, 2, 3, 17])
def test_a_pool_has_the_threads_that_were_asked_for(threads: int) -> None:
    assert _core.Pool(threads).threads == threads


@pytest.mark.parametrize("threads", [0, -1, 513, 2**31, 2**64, 1.5, "2", None])
def test_a_pool_of_a_wrong_size_is_refused(threads: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        _core.Pool(threads)  # pyright: ignore[reportArgumentType]


def test_the_largest_pool_works() -> None:
    weights = packed(np.eye(70, dtype=np.float32))
    rows = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    out = np.zeros((5, 70), np.float32)
    _core.multiply(weights, rows, out, _core.Pool(512), ISAS[0])
    assert np.array_equal(out, rows)


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's own memory does not fit the limit")
def test_a_pool_that_the_system_cannot_give_is_an_error_and_not_the_end() -> None:
    program = """
import resource
import headrace._core as _core
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20, -1))
try:
    _core.Pool(512)  # whose stacks would take gigabytes
except (RuntimeError, MemoryError, OSError):
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert _core.Pool(3).threads == 3
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_other_python_threads_run_during_a_step() -> None:
    tiny = Tiny(MODEL, isa="portable", blocks=160, max_rows=2500)
    share = Share(text(2500, MODEL), 0, range(157))
    ends: list[float] = []

    def compute() -> None:
        for _ in range(2):
            ends.append(time.monotonic())
            tiny.step([share], wanted=[2499])
        ends.append(time.monotonic())

    worker = threading.Thread(target=compute)
    worker.start()
    seen: list[float] = []
    while worker.is_alive():
        seen.append(time.monotonic())
        time.sleep(0.0005)
    worker.join()
    for begin, end in pairwise(ends):
        quarter = (end - begin) / 4
        assert any(begin + quarter < moment < end - quarter for moment in seen)


def test_idle_threads_take_no_time() -> None:
    pool = _core.Pool(4)
    tiny = Tiny(MODEL, pool=pool)
    tiny.rows(text(20, MODEL), (0, 1))
    time.sleep(0.05)  # threads look around for some microseconds before they sleep
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
    # And they wake up again.
    assert np.isfinite(tiny.rows(text(20, MODEL), (0, 1))).all()


def test_pools_come_and_go_while_steps_run() -> None:
    tokens = text(40, MODEL)
    expected = Tiny(MODEL).rows(tokens, (0, 1, 2))
    stop = threading.Event()

    def compute() -> int:
        tiny = Tiny(MODEL, threads=2)
        rounds = 0
        while not stop.is_set() or rounds == 0:
            assert same_bits(tiny.rows(tokens, (0, 1, 2), chunk=9), expected)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(compute)
        try:
            for turn in range(100):
                pool = _core.Pool(1 + turn % 4)
                if turn % 3 == 0:  # some are used before they go, some end while their threads still start
                    assert _core.find_nonfinite(np.zeros(200_000, np.float32), "f32", pool) == -1
                del pool
        finally:
            stop.set()
        assert running.result() > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_models_that_share_a_pool_take_turns(threads: int) -> None:
    names = ("everything", "plain")
    texts = {name: text(50, SPECS[name], seed=4) for name in names}
    expected = {name: Tiny(SPECS[name], "int8", 32).rows(texts[name], range(4)) for name in names}
    pool = _core.Pool(threads)

    def compute(name: str) -> bool:
        tiny = Tiny(SPECS[name], "int8", 32, pool=pool)
        return all(same_bits(tiny.rows(texts[name], range(4), chunk=chunk), expected[name]) for chunk in (1, 3, 50))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(compute, names * 4))


def test_one_model_stepped_from_two_threads_takes_turns() -> None:
    tiny = Tiny(MODEL, threads=2)
    tables = [range(place * 4, place * 4 + 4) for place in range(6)]
    tokens = text(50, MODEL)
    expected = Tiny(MODEL).rows(tokens, tables[0])
    with ThreadPoolExecutor(3) as executor:
        for found in executor.map(lambda table: tiny.rows(tokens, table, chunk=4), tables):
            assert same_bits(found, expected)


def test_packing_measuring_and_steps_share_a_pool() -> None:
    pool = _core.Pool(2)
    tokens = text(30, MODEL)
    expected = Tiny(MODEL).rows(tokens, (0, 1))
    matrix = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    alone = packed(matrix, "int4", 32).unpack()
    tiny = Tiny(MODEL, pool=pool)
    with ThreadPoolExecutor(3) as executor:
        steps = [executor.submit(tiny.rows, tokens, (0, 1), chunk=2) for _ in range(5)]
        packs = [executor.submit(packed, matrix, "int4", 32, pool) for _ in range(5)]
        rates = [executor.submit(_core.measure_peak, pool, "fma_f32", 0.01) for _ in range(3)]
        assert all(same_bits(step.result(), expected) for step in steps)
        assert all(np.array_equal(pack.result().unpack(), alone) for pack in packs)
        assert all(rate.result() > 0 for rate in rates)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_every_item_of_many_small_regions_is_done_once(threads: int) -> None:
    """Regions that follow one another closely: a thread that comes late to one must not take a part of the next."""
    pool = _core.Pool(threads)
    random = np.random.default_rng(threads)
    matrices = [random.standard_normal((outputs, 3)).astype(np.float32) for outputs in (100, 2600, 140, 1000)]
    weights = [packed(matrix) for matrix in matrices]
    rows = random.standard_normal((1, 3)).astype(np.float32)
    expected = [np.full((1, len(matrix)), np.nan, np.float32) for matrix in matrices]
    for weight, out in zip(weights, expected, strict=True):
        _core.multiply(weight, rows, out, _core.Pool(1), ISAS[0])
    for turn in range(2000):
        out = np.full_like(expected[turn % 4], np.nan)
        _core.multiply(weights[turn % 4], rows, out, pool, ISAS[0])
        assert same_bits(out, expected[turn % 4])
