"""`millrace serve`: the gateway and its engines, until a signal ends them.

Owns the command's flags. What they come to and what is printed is serving's, which is imported only once a worker has
begun to read its modules: a start takes nearly as long as all of the imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from millrace.engine.worker_start import worker_ahead


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

    Without a model and without a millrace.toml it serves the bundled model.

    Parameters
    ----------
    model
        Model folder, a bundled model (mini, draft), or a hub id; in place of the configuration's models.
    config
        The configuration; ./millrace.toml by default, where there is one.
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
    options = {"weights": weights, "kv": kv, "threads": threads, "context": context}
    with worker_ahead():
        from millrace.cli.serving import serve_models

        serve_models(
            config,
            {"server.host": host, "server.port": port, "log.format": log_format},
            model=model,
            options={name: value for name, value in options.items() if value is not None},
            replicas=replicas,
            api_key=api_key,
        )
