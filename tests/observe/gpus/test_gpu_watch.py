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


async def run_until(seen: threading.Event, watch: GpuWatch) -> None:
    task = asyncio.create_task(watch.run())
    await asyncio.to_thread(seen.wait)
    task.cancel()
    await asyncio.wait([task])


def watch(*readings: Sequence[Gpu] | Exception) -> GpuWatch:
    """A watch that has seen all readings."""
    seen, left = threading.Event(), list(readings)

    def read() -> Sequence[Gpu]:
        found = left.pop(0) if left else seen.set() or readings[-1]
        if isinstance(found, Exception):
            raise found
        return found

    made = GpuWatch(lambda: read, every_s=0.001, again_s=0.001)
    asyncio.run(run_until(seen, made))
    assert made.thread is not None
    made.thread.join()
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
    assert series() == {'headrace_gpu_busy_share{gpu="0",name="A"} 1.0'}


def test_a_driver_that_fails_is_asked_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("lost")
    made = watch([Gpu(0, "A")], error, error, [Gpu(0, "A", busy=1.0)], error)
    assert made.latest == ()
    assert sum("cannot read the GPUs" in line for line in caplog.messages) == 2


def test_what_a_driver_said_before_it_hung_does_not_stay(caplog: pytest.LogCaptureFixture) -> None:
    never, readings = threading.Event(), iter([[Gpu(0, "A", busy=0.5)]])

    def read() -> Sequence[Gpu]:
        if (found := next(readings, None)) is not None:
            return found
        never.wait()
        return ()

    async def run() -> None:
        made = GpuWatch(lambda: read, every_s=0.001)
        task = asyncio.create_task(made.run())
        while not any("does not answer" in line for line in caplog.messages):
            await asyncio.sleep(0.001)
        assert (made.latest, series()) == ((), set())
        task.cancel()
        await asyncio.wait([task])
        never.set()
        assert made.thread is not None
        await asyncio.to_thread(made.thread.join)

    asyncio.run(run())


def test_a_driver_that_is_loaded_later_is_found() -> None:
    seen, opened = threading.Event(), iter([None, None])

    def read() -> Sequence[Gpu]:
        seen.set()
        return [Gpu(0, "A")]

    made = GpuWatch(lambda: next(opened, read), every_s=0.001, again_s=0.001)
    asyncio.run(run_until(seen, made))
    assert made.thread is not None
    made.thread.join()
    assert made.latest == [Gpu(0, "A")]
