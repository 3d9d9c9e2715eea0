"""The wheel serves: it is built from the sources, installed in a virtual environment of its own, and answers a chat."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
TIMEOUT_S = 1800.0  # builds the core where no objects of it are left

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the object files of the last build, if they are still those of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    (found,) = folder.glob("headrace-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. It sees the installed packages, but not the editable one: a path file in a
    folder that another path file names is not read."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=TIMEOUT_S)
    python = folder / "bin" / "python"
    # Modules are compiled when they are imported: the tests import a third of them.
    install = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture(scope="module")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
    command = [str(installed / "bin" / "headrace"), "serve", "--port", "0", "--threads", "1"]
    log = tmp_path_factory.mktemp("log") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=log.parent, env={**environment, "NO_COLOR": "1"}
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[0]
    finally:
        process.terminate()
        process.wait(timeout=TIMEOUT_S)


def test_the_wheel_holds_the_package_the_core_and_the_bundled_models(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"headrace/_core\..*(so|pyd)", name) for name in names)
    for name in ("headrace/cli/__init__.py", "headrace/models/bundled/mini/config.json", "headrace/py.typed"):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "training/", "core/"))]


def test_its_command_comes_from_the_wheel(installed: Path) -> None:
    where = [str(installed / "bin" / "python"), "-c", "import headrace; print(headrace.__file__)"]
    done = subprocess.run(where, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, cwd=installed)
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_it_answers_a_chat(server: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    page = httpx.get(f"{server}/", timeout=TIMEOUT_S)
    assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (200, "text/html")
