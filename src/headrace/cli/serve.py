"""`headrace serve`: the gateway and its engines, until a signal ends them.

Owns the command's flags and what it prints. The configuration is headrace.config's, running it headrace.gateway's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headrace.config.loader import find_config_file
from headrace.errors import RequestError
from headrace.models.model_folder import BUNDLED_NAMES
from headrace.server.config_checks import load_config
from headrace.variant import DEFAULT_MODEL


def serve(
    model: str | None = None,
    /,
    *,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    host: str | None = None,
    port: Annotated[int | None, Parameter(name=["--port", "-p"])] = None,
    weights: str | None = None,
    kv: str | None = None,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    context: int | None = None,
    replicas: int | None = None,
    api_key: str | None = None,
    log_format: str | None = None,
) -> None:
    """Serve models to OpenAI and Anthropic clients.

    Without a model and without a headrace.toml it serves the bundled model.

    Parameters
    ----------
    model
        Model folder, a bundled model (mini, draft), or a hub id; in place of the configuration's models.
    config
        The configuration; ./headrace.toml by default, where there is one.
    host
        Address to listen on; 0.0.0.0 is all of the machine's.
    port
        Port to listen on; 0 takes a free one.
    weights
        Precision of the model's weights: f32, bf16, int8 or int4.
    kv
        Precision of its KV cache: f32, bf16 or int8.
    threads
        Threads that its engine computes with; the machine's cores by default.
    context
        Most tokens, prompt and answer together.
    replicas
        Engine processes of the model.
    api_key
        A key that clients must send.
    log_format
        text or json.
    """
    flags: dict[str, Any] = {"server.host": host, "server.port": port, "log.format": log_format}
    options = {"weights": weights, "kv": kv, "threads": threads, "context": context}
    options = {name: value for name, value in options.items() if value is not None}
    if model is None and (options or replicas is not None):
        if find_config_file(config, os.environ) is not None:
            raise RequestError(
                "name the model that these flags are of; those of the configuration have their own there"
            )
        model = DEFAULT_MODEL
    if model is not None:
        name = model if model in BUNDLED_NAMES else Path(model).name or model
        flags["models"] = {name: {"path": model, "options": options, "replicas": replicas or 1}}
    if api_key is not None:
        flags["keys"] = [{"name": "default", "key": api_key}]
    found = load_config(config, environ=os.environ, flags=flags)
    from headrace.server.server import run

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

    with LoadingBars(console) as bars:

        def begun(url: str) -> None:
            bars.stop()
            ready(url)

        run(found, ready=begun, loading=bars.show if console.is_terminal else None)


class LoadingBars:
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

    def __enter__(self) -> LoadingBars:
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
