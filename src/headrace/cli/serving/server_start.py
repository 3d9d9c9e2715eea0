"""What `headrace serve` does: maps flags to the configuration, runs the server and prints where it is.

headrace.server runs the rest. What only some starts need is imported where it is needed, because a start takes as long
as its imports.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from headrace.cli.error_report import report_errors_as_json
from headrace.config.loader import find_config_file, variable_of
from headrace.errors import RequestError
from headrace.models.model_folder import BUNDLED_NAMES, local_model
from headrace.models.sources.downloaded_models import hub_name, package_name
from headrace.server.config_checks import load_config
from headrace.variant import DEFAULT_MODEL


def start_server(
    model: str | None = None,
    *,
    config: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    weights: str | None = None,
    kv: str | None = None,
    threads: int | None = None,
    context: int | None = None,
    replicas: int | None = None,
    api_key: str | None = None,
    log_format: str | None = None,
    insecure: bool = False,
    pull: bool = False,
) -> None:
    """Serve until a signal ends it. The parameters are those of `headrace serve`."""
    flags: dict[str, Any] = {"server.host": host, "server.port": port, "log.format": log_format}
    if insecure:
        flags["server.insecure"] = True
    if pull:
        flags["server.pull"] = True
    options = {"weights": weights, "kv": kv, "threads": threads, "context": context}
    options = {name: value for name, value in options.items() if value is not None}
    if model is None and (options or replicas is not None):
        if find_config_file(config, os.environ) is not None:
            raise RequestError(
                "Name the model that these flags apply to. For models in the configuration, set them there."
            )
        model = DEFAULT_MODEL
    if model is not None:
        name = model if model in BUNDLED_NAMES else served_name(model) or Path(model).name or model
        flags["models"] = {name: {"path": model, "options": options, "replicas": replicas or 1}}
    if api_key is not None:
        flags["keys"] = [{"name": "default", "key": api_key}]
    as_json = _wants_json(config, log_format)
    if as_json:
        report_errors_as_json()
    loaded = load_config(config, environ=os.environ, flags=flags)
    if loaded.server.pull:
        from rich.console import Console

        from headrace.cli.serving.pull import pull_missing

        pull_missing(loaded, Console(stderr=True, quiet=as_json))
    from headrace.server.server import run

    def ready(url: str) -> None:
        if as_json:
            structlog.get_logger("headrace").info("serving", models=sorted(loaded.models), url=f"{url}/v1")
        else:
            print(_welcome(url, loaded.models, keys=bool(loaded.keys)), file=sys.stderr, flush=True)

    if as_json or not sys.stderr.isatty():
        run(loaded, ready=ready)
        return
    from rich.console import Console

    from headrace.cli.serving.loading_bars import LoadingBars

    with LoadingBars(Console(stderr=True)) as bars:

        def started(url: str) -> None:
            bars.stop()
            ready(url)

        run(loaded, ready=started, loading=bars.show)


def served_name(model: str) -> str | None:
    """Return the name under which a downloaded model is served: that of its repository or package."""
    if (package := package_name(model)) is not None:
        return package.package
    if local_model(model) is not None and (hub := hub_name(model)) is not None:
        return hub.repository.rpartition("/")[2]
    return None


def _welcome(url: str, models: Iterable[str], *, keys: bool) -> str:
    """Return where the server is, in one line however many models there are, because programs that start a server look
    for it; and a first request."""
    key = "-H 'authorization: Bearer YOUR_KEY' " if keys else ""
    return f"""Serving {", ".join(models)} at {url}/v1. Press Ctrl-C to stop. Try:

  curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is time to first token?"}}]}}'
"""


def _wants_json(config: Path | None, flag: str | None) -> bool:
    """Return whether the log is JSON, also where the configuration has mistakes."""
    if flag is not None:
        return flag == "json"
    variable = os.environ.get(variable_of("log", "format"))
    if variable is not None:
        return variable.strip() == "json"
    file = find_config_file(config, os.environ)
    try:
        return file is not None and tomllib.loads(file.read_text(encoding="utf-8-sig"))["log"]["format"] == "json"
    except (OSError, ValueError, LookupError, TypeError):
        return False
