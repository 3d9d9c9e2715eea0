"""Model folders that many tests share: made by `headrace make-model`'s own code, without torch."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in every process that a test starts. Its threads spin while they wait for each
# other: beside other work on the same cores, a step of training takes seconds instead of milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes. Where Python may not keep bytecode, as in many images, each of them compiles the
# package again, which doubles the time that a server takes to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests pass on a busy machine too: examples may take any time.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

# A shell starts background jobs with SIGINT ignored, which every process that a test starts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a cache of packed weights of its own; spread the workers' collection of everything."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        cache = os.environ["HEADRACE_CACHE"] = tempfile.mkdtemp(prefix="headrace-tests-")  # not the user's
        config.add_cleanup(partial(shutil.rmtree, cache, ignore_errors=True))
    elif config.args == config.getini("testpaths"):
        collect_apart(config, worker)


def collect_apart(config: pytest.Config, worker: str) -> None:
    """Begin a worker's collection at a folder of its own: each loads what the others have compiled."""
    parts = sorted(str(each) for path in config.args for each in Path(path).iterdir() if has_tests(each))
    start = len(parts) * int(worker.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    config.args = [*parts[start:], *parts[:start]]


def has_tests(path: Path) -> bool:
    return fnmatch(path.name, "test_*.py") or any(path.rglob("test_*.py"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of all workers in one order again."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: str(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and keep what is there then out of later ones: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama-like decoder with random weights; not to be changed."""
    from headrace.models.synthetic.random_model import write_random_model  # compiled only once from here on

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model("tiny", folder, seed=1)
    return folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a model folder that the test may spoil."""

    def copy(folder: Path) -> Path:
        target = tmp_path / "copy"
        shutil.copytree(folder, target)
        return target

    return copy
