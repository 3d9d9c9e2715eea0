"""`headrace serve`: run the server until a signal stops it.

Maps flags to the configuration and prints progress. headrace.server runs the rest.
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

    Usage: headrace serve, headrace serve path/to/model --weights int8, or headrace serve --config headrace.toml

    Without a model and without a headrace.toml, it serves the bundled model.

    Parameters
    ----------
    model
        Model folder, bundled model (mini, draft) or hub id. Replaces the configuration's models.
    config
        Configuration file. Default: ./headrace.toml, if it exists.
    host
        Address to listen on; 0.0.0.0 is every address of the machine.
    port
        Port to listen on; 0 picks a free one.
    weights
        Precision of the weights: f32, bf16, int8 or int4.
    kv
        Precision of the KV cache: f32, bf16 or int8.
    threads
        Threads to compute with. Default: the machine's cores.
    context
        Maximum tokens of prompt and answer together.
    replicas
        Worker processes of the model.
    api_key
        API key that clients must send.
    log_format
        Log format: text or json.
    """
    flags: dict[str, Any] = {"server.host": host, "server.port": port, "log.format": log_format}
    options = {"weights": weights, "kv": kv, "threads": threads, "context": context}
    options = {name: value for name, value in options.items() if value is not None}
    if model is None and (options or replicas is not None):
        if find_config_file(config, os.environ) is not None:
            raise RequestError(
                "Name the model that these flags apply to. For models in the configuration, set them there."
            )
        model = DEFAULT_MODEL
    if model is not None:
        name = model if model in BUNDLED_NAMES else Path(model).name or model
        flags["models"] = {name: {"path": model, "options": options, "replicas": replicas or 1}}
    if api_key is not None:
        flags["keys"] = [{"name": "default", "key": api_key}]
    loaded = load_config(config, environ=os.environ, flags=flags)
    from headrace.server.server import run

    console = Console(stderr=True)

    def ready(url: str) -> None:
        names = ", ".join(loaded.models)
        console.print(f"Serving [bold]{names}[/bold] at [bold]{url}/v1[/bold]. Press Ctrl-C to stop. Try:\n")
        console.print(
            f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is time to first token?"}}]}}'\n""",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    with LoadingBars(console) as bars:

        def started(url: str) -> None:
            bars.stop()
            ready(url)

        run(loaded, ready=started, loading=bars.show if console.is_terminal else None)


class LoadingBars:
    """A progress bar for each model while its weights are packed: minutes for a large model, and only once."""

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
