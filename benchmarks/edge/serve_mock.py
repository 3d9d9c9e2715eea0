"""Serves the mock engine through Headrace's own gateway, and prints its URL once it is ready.

    python benchmarks/edge/serve_mock.py --tokens-per-s 20

Models: `at-once`, and `paced` at the given pace. The server is the real one from socket to log; only the fleet differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from mock_engine import MockEngine

from headrace.config import Config, ServerConfig, StorageConfig
from headrace.config.observe_section import ObserveConfig, TracesConfig
from headrace.gateway.output.reasoning import detect_reasoning_format
from headrace.gateway.output.tool_formats import detect_tool_format
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.model_folder import BUNDLED, open_model
from headrace.observe.logs import configure_log
from headrace.server import server


def main() -> None:
    parser = argparse.ArgumentParser(description="Headrace's gateway before an engine that computes nothing.")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each stream of the model `paced`")
    parser.add_argument("--profile", type=Path, help="write cProfile's numbers there at the end")
    parser.add_argument("--traces", help="URL of a collector of traces; default: none")
    parser.add_argument("--sample", type=float, default=0.1, help="share of the requests whose traces are exported")
    options = parser.parse_args()

    fleet = make_mock_fleet(options.tokens_per_s)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            server=ServerConfig(port=options.port, idle_s=600.0),  # so long may the others be measured meanwhile
            storage=StorageConfig(folder=folder),
            observe=ObserveConfig(traces=TracesConfig(url=options.traces, sample=options.sample)),
        )

        def ready(url: str) -> None:
            print(url, os.getpid(), flush=True)

        if options.profile is None:
            server.run(config, fleet=fleet, ready=ready)
        else:
            configure_log(config.log)
            _profiled(server.serve(config, fleet=fleet, ready=ready), options.profile)


def make_mock_fleet(tokens_per_s: float) -> Fleet:
    return _MockFleet({"at-once": _served("at-once", None), "paced": _served("paced", tokens_per_s)}, {}, "at-once")


class _MockFleet(Fleet):
    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """There is nothing to start."""


def _served(name: str, tokens_per_s: float | None) -> ServedVariant:
    tokenizer = open_model(BUNDLED / "mini").tokenizer
    template = None if tokenizer.tool_template is None else tokenizer.tool_template.source
    return ServedVariant(
        name=name,
        engine=MockEngine(tokenizer, tokens_per_s),
        tokenizer=tokenizer,
        context=8192,
        fingerprint="fp_0123456789",
        tools=detect_tool_format(template, tokenizer),
        reasoning=detect_reasoning_format(template, tokenizer),
    )


def _profiled(serving: Coroutine[Any, Any, None], path: Path) -> None:
    import cProfile

    profile = cProfile.Profile(time.thread_time)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    profile.enable()
    try:
        loop.run_until_complete(serving)
    finally:
        profile.disable()
        profile.dump_stats(path)


if __name__ == "__main__":
    main()
