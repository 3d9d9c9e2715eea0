"""EncodingQueue: encodes one image at a time, tenants in turns, and drops images whose clients have left.

Clients that wait for the same image of a tenant share its features. Belongs to one event loop. Does not know caches.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from headrace.engine.interface.image_rows import AbandonedError
from headrace.gateway.images.feature_cache import FeatureKey

T = TypeVar("T")
# Encodes an image. It asks the function between tiles, and raises AbandonedError once that returns True.
Encode = Callable[[Callable[[], bool]], Awaitable[T]]


class _Job(Generic[T]):
    def __init__(self, key: FeatureKey, encode: Encode[T]) -> None:
        self.key = key
        self.encode = encode
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.is_started = False

    def is_abandoned(self) -> bool:
        return self.waiters == 0


class EncodingQueue(Generic[T]):
    def __init__(self, changed: Callable[[int], None]) -> None:
        """`changed` learns how many images are encoded or wait for it."""
        self._changed = changed
        self._jobs: dict[FeatureKey, _Job[T]] = {}
        self._waiting: OrderedDict[str, deque[_Job[T]]] = OrderedDict()  # by tenant; the first one's turn is next
        self._running: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, key: FeatureKey) -> bool:
        return key in self._jobs

    async def encoded(self, key: FeatureKey, encode: Encode[T]) -> T:
        """Return what `encode` returns, or the job with this key that is there already. If the caller is cancelled and
        no other waits, the job is dropped, or stopped at its next tile."""
        while True:
            job = self._jobs.get(key) or self._add(_Job(key, encode))
            job.waiters += 1
            try:
                return await asyncio.shield(job.outcome)
            except AbandonedError:
                continue  # it was stopped just before this caller came
            finally:
                job.waiters -= 1
                if not job.waiters and not job.is_started:
                    self._drop(job)

    async def finish(self, timeout: float) -> None:
        """Return when every job has ended, or after `timeout` seconds."""
        if self._jobs:
            await asyncio.wait([job.outcome for job in self._jobs.values()], timeout=timeout)

    def close(self) -> None:
        """Cancel what has not started."""
        for job in [job for jobs in self._waiting.values() for job in jobs]:
            self._drop(job)

    def _add(self, job: _Job[T]) -> _Job[T]:
        self._jobs[job.key] = job
        self._waiting.setdefault(job.key.tenant, deque()).append(job)
        self._changed(len(self._jobs))
        self._start_next()
        return job

    def _drop(self, job: _Job[T]) -> None:
        jobs = self._waiting.get(job.key.tenant)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.key.tenant]
        self._end(job)
        job.outcome.cancel()

    def _end(self, job: _Job[T]) -> None:
        del self._jobs[job.key]
        self._changed(len(self._jobs))

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the others
        job.is_started = True
        self._running = asyncio.ensure_future(self._run(job))

    async def _run(self, job: _Job[T]) -> None:
        try:
            found = await job.encode(job.is_abandoned)
        except asyncio.CancelledError:
            job.outcome.cancel()
        except Exception as error:
            job.outcome.set_exception(error)
            job.outcome.exception()  # seen, whether or not a client still waits
        else:
            job.outcome.set_result(found)
        finally:
            self._end(job)
            self._running = None
            self._start_next()
