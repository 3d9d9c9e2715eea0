"""The GPUs' metrics follow what the drivers say, and a driver that fails or hangs disturbs nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.observe import metrics
from headrace.observe.gpus.gpu import Gpu
from headrace.observe.gpus.gpu_metrics import set_gpus
from headrace.observe.gpus.gpu_watch import GpuWatch


@pytest.fixture(autouse=True)
def no_gpus() -> Iterator[None]:
    yield
    set_gpus([])


def series() -> set[str]:
    return {line for line in metrics.exposition().decode().splitlines() if line.startswith("headrace_gpu_")}


def watch(*readings: Sequence[Gpu] | Exception) -> GpuWatch:
    """A watch that has seen all readings, and went on with the last one."""
    return asyncio.run(_watch(*readings))


async def _watch(*readings: Sequence[Gpu] | Exception) -> GpuWatch:
    seen, left = threading.Event(), list(readings)

    def read() -> Sequence[Gpu]:
        if len(left) == 1:
            seen.set()
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    made = GpuWatch(lambda: read, every_s=0.001)
    task = asyncio.create_task(made.run())
    await asyncio.to_thread(seen.wait)
    while made.latest != (() if isinstance(readings[-1], Exception) else readings[-1]):
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    return made


def test_metrics_have_what_the_driver_says() -> None:
    full = Gpu(0, "A", memory_used=20, memory_total=80, busy=0.25, celsius=54.0, watts=312.5)
    set_gpus([full, Gpu(1, "B", memory_total=80)])
    assert series() == {
        'headrace_gpu_busy_share{gpu="0",name="A"} 0.25',
        'headrace_gpu_memory_bytes{gpu="0",name="A",state="used"} 20.0',
        'headrace_gpu_memory_bytes{gpu="0",name="A",state="free"} 60.0',
        'headrace_gpu_celsius{gpu="0",name="A"} 54.0',
        'headrace_gpu_watts{gpu="0",name="A"} 312.5',
    }
    set_gpus([])
    assert series() == set()


def test_the_last_reading_counts() -> None:
    made = watch([Gpu(0, "A", busy=0.5)], [Gpu(0, "A", busy=1.0)])
    assert [gpu.busy for gpu in made.latest] == [1.0]


def test_a_driver_that_fails_is_asked_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("lost")
    made = watch([Gpu(0, "A")], error, error, [Gpu(0, "A", busy=1.0)], error)
    assert made.latest == ()
    assert sum("cannot read the GPUs" in line for line in caplog.messages) == 2


async def run_until(asked: threading.Event, watch: GpuWatch) -> None:
    task = asyncio.create_task(watch.run())
    await asyncio.to_thread(asked.wait)
    task.cancel()
    await asyncio.wait([task])


def test_a_driver_that_hangs_delays_nothing() -> None:
    never, asked = threading.Event(), threading.Event()

    def read() -> Sequence[Gpu]:
        asked.set()
        never.wait()
        return ()

    made = GpuWatch(lambda: read)
    asyncio.run(run_until(asked, made))
    assert made.latest == ()
    never.set()


def test_a_machine_without_gpus_has_none() -> None:
    opened = threading.Event()
    made = GpuWatch(opened.set, every_s=0.001)
    asyncio.run(run_until(opened, made))
    assert made.latest == ()
