"""What a server imports before it takes requests: not the parts that its configuration leaves out, which would only
make it start later. Mistakes in those parts are found at the start all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError
from headrace.server.config_checks import load_config

# As `headrace serve` does it, but nothing is served.
STARTED = """
import gc, json, os, sys
from headrace import slim_imports
slim_imports.import_for_server()
collects = gc.isenabled()
import headrace.cli
import headrace.cli.serving.server_start
from headrace.server.config_checks import load_config
from headrace.server.server import Server
flags = {"server.port": 0, "storage.folder": sys.argv[1], "models": {"draft": {"path": "draft"}}}
server = Server(load_config(environ={}, flags=flags))
server.fleet.abandon()
server.listening.close()
found = {"modules": sorted(sys.modules), "collects": collects, "blas": os.environ.get("OPENBLAS_NUM_THREADS")}
print(json.dumps(found))
"""
# The engine runs in a worker. The rest is for some configurations, for terminals, or for mistakes.
LEFT_OUT = (
    "headrace.cli.serving.loading_bars",
    "headrace.cli.serving.pull",
    "headrace.engine.engine",
    "headrace.engine.executors.cpu_executor",
    "headrace.engine.process.worker",
    "headrace.engine.scheduling",
    "headrace.engine.speculation",
    "headrace.gateway.caches.catalogues",
    "headrace.gateway.caches.semantic.guarded_question",
    "headrace.gateway.caches.semantic.semantic_cache",
    "headrace.gateway.ledger.postgres",
    "headrace.gateway.serving.autoscaler",
    "headrace.gateway.serving.registry",
    "headrace.lab.online.semantic_trial",
    "headrace.llm.in_process",
    "headrace.pipelines.pipelines",
    "headrace.server.api.pipelines.pipeline_endpoints",
    "headrace.server.grpc",
    "headrace.server.processes",
    *("aiohttp", "asyncpg", "attr", "cyclopts", "difflib", "grpc", "http.server", "llguidance", "numpy.random"),
    *("pygments", "redis", "rich.console", "torch", "urllib.request"),
)
MOST_MODULES = 1_080  # about 1,280 when everything was imported


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("storage")
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", STARTED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=300)
    return json.loads(done.stdout)


def test_a_server_imports_only_what_its_configuration_uses(started: dict[str, Any]) -> None:
    modules: list[str] = started["modules"]
    unused = [each for each in modules if any(each == part or each.startswith(f"{part}.") for part in LEFT_OUT)]
    assert unused == []
    assert "headrace.server.routes" in modules
    assert len(modules) < MOST_MODULES


def test_libraries_are_imported_without_threads_and_the_environment_stays(started: dict[str, Any]) -> None:
    assert started["collects"] is False
    assert started["blas"] is None
    assert {"numpy", "structlog"} <= set(started["modules"])


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ('[cache.semantic]\nmode = "on"\nembedder = "nobody"', "cache.semantic.embedder"),
        ('[catalogues.faq]\nfile = "faq.jsonl"\nmodels = ["nobody"]', "catalogues.faq.models"),
        ('[pipelines.ask]\nmodel = "nobody"', "pipelines.ask"),
        ("[models.draft]\ndiscover_workers = true", "workers.redis_env"),
        ('[models.draft.autoscale]\nmost = "many"', "models.draft.autoscale.most"),
    ],
)
def test_a_mistake_in_a_part_that_is_imported_late_is_found_at_the_start(
    section: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f"{section}\n" if "models.draft" in section else f"[models.draft]\n{section}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, environ={})
    assert any(expected in str(each) for each in raised.value.mistakes), raised.value
