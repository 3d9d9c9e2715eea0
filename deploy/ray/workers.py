"""Places Headrace's workers on the nodes of a Ray cluster and keeps them running; servers find them in a registry.

    python deploy/ray/workers.py mini --count 4 --cpus 8 --registry HEADRACE_REDIS -- --weights int8

Ray decides which node runs a worker, and starts it again elsewhere when the node is gone. What follows `--` goes to
`headrace worker`, such as the certificates that every node has in the same place. Each node needs Headrace, the model's
files, and the variable with the registry's URL. SIGTERM or Ctrl-C drains all workers. Needs the package `ray`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

LONGEST_PAUSE_S: Final = 30.0  # between starts of a worker that does not stay
STAYED_S: Final = 60.0  # after which a worker's next end is no repetition
PR_SET_PDEATHSIG: Final = 1


def worker_command(model: str, registry: str, node: str, listen: str, more: list[str]) -> list[str]:
    """Return the command of a worker that announces itself under its node's address."""
    command = [sys.executable, "-m", "headrace", "worker", model, "--listen", f"{listen}:0", "--registry", registry]
    return [*command, "--announce", node, *more]


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return this program's arguments, and those after `--`, which are for `headrace worker`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def next_pause(pause: float, lived_s: float) -> float:
    """Return the seconds before a worker that has ended starts again."""
    return 0.0 if lived_s > STAYED_S else min(LONGEST_PAUSE_S, max(0.5, 2 * pause))


def drain_with_parent() -> Callable[[], object]:
    """Return a function that lets a child drain when its parent is gone, however it went."""
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM))


class WorkerActor:
    """One worker process on a node. Ray gives it its processors, and places it again if the node is lost."""

    def __init__(self, model: str, registry: str, url: str, listen: str, more: list[str]) -> None:
        from ray.util import get_node_ip_address

        node = listen if listen.startswith("127.") else get_node_ip_address()
        self._command = worker_command(model, registry, node, listen, more)
        self._environ = {**os.environ, registry: url}
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._starting = threading.Lock()  # so that no worker starts while `stop` looks for one
        self._pause: Callable[[float], object] = self._ending.wait

    def run(self) -> int:
        """Run the worker until it is stopped, and start it again whenever it ends. Return its last exit code."""
        pause, code = 0.0, 0
        while True:
            began = time.monotonic()
            with self._starting:
                if self._ending.is_set():
                    return code
                process = subprocess.Popen(self._command, env=self._environ, preexec_fn=drain_with_parent())
                self._process = process
            code = process.wait()
            if self._ending.is_set():
                return code
            pause = next_pause(pause, time.monotonic() - began)
            self._pause(pause)

    def stop(self) -> None:
        """Drain: what does not finish in time continues on other workers."""
        with self._starting:
            self._ending.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="name, folder or file, as in `headrace worker`")
    parser.add_argument("--count", type=int, default=1, help="workers in the cluster")
    parser.add_argument("--cpus", type=float, default=1.0, help="processors of a worker, of its node's")
    parser.add_argument("--registry", required=True, help="environment variable with the URL of Redis")
    parser.add_argument("--listen", default="0.0.0.0", help="host that workers listen on")
    parser.add_argument("--address", default=None, help="of the cluster; by default that of RAY_ADDRESS, or a new one")
    own, more = split_arguments(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(own)
    url = os.environ.get(given.registry)
    if not url:
        parser.error(f"The environment variable {given.registry} is not set. Expected the URL of a Redis.")
    import ray

    ray.init(address=given.address, log_to_driver=True)
    # Two calls at once: `run` takes as long as the worker lives.
    remote: Any = ray.remote(num_cpus=given.cpus, max_restarts=-1, max_task_retries=-1, max_concurrency=2)(WorkerActor)
    placed = remote.options(scheduling_strategy="SPREAD")
    workers = [placed.remote(given.model, given.registry, url, given.listen, more) for _ in range(given.count)]
    running = [worker.run.remote() for worker in workers]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{given.count} workers of {given.model} are placed. Press Ctrl-C to drain them.", flush=True)
    try:
        ray.get(running)
    except KeyboardInterrupt:
        ray.get([worker.stop.remote() for worker in workers])
        ray.wait(running, num_returns=len(running), timeout=120.0)


if __name__ == "__main__":
    main()
