"""What `millrace serve` does with its flags, and what it prints while models load and once they are served.

The configuration is millrace.config's, running it millrace.gateway's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from millrace.config.file import find, load
from millrace.errors import RequestError
from millrace.gateway.server import run
from millrace.models.loading import BUNDLED_NAMES, DEFAULT_MODEL


def serve_models(
    config: Path | None,
    flags: Mapping[str, Any],
    *,
    model: str | None,
    options: Mapping[str, Any],
    replicas: int | None,
    api_key: str | None,
) -> None:
    """`flags`: settings by their names, over the configuration's. `options` and `replicas` are `model`'s."""
    flags = dict(flags)
    if model is None and (options or replicas is not None):
        if find(config, os.environ) is not None:
            raise RequestError(
                "name the model that these flags are of; those of the configuration have their own there"
            )
        model = DEFAULT_MODEL
    if model is not None:
        name = model if model in BUNDLED_NAMES else Path(model).name or model
        flags["models"] = {name: {"path": model, "options": dict(options), "replicas": replicas or 1}}
    if api_key is not None:
        flags["keys"] = [{"name": "default", "key": api_key}]
    found = load(config, environ=os.environ, flags=flags)
    console = Console(stderr=True)

    def ready(url: str) -> None:
        names = ", ".join(found.models)
        console.print(f"Serving [bold]{names}[/bold] at [bold]{url}/v1[/bold]. Ctrl-C ends it. Try:\n")
        console.print(
            f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is time to first token?"}}]}}'\n""",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    with Bars(console) as bars:

        def begun(url: str) -> None:
            bars.stop()
            ready(url)

        run(found, ready=begun, loading=bars.show if console.is_terminal else None)


class Bars:
    """A bar for each model while its weights are packed, which takes minutes for a large one and happens once."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("packing {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def show(self, model: str, done: int, total: int) -> None:
        if not self._bars:
            self._progress.start()
        if model not in self._bars:
            self._bars[model] = self._progress.add_task(model, total=total)
        self._progress.update(self._bars[model], completed=done)

    def stop(self) -> None:
        if self._bars:
            self._progress.stop()
