"""`headrace serve`: run the server until a signal stops it. server_start does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.serving.server_start import start_server


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
    insecure: bool = False,
    pull: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Serve models to OpenAI, Anthropic and Ollama clients.

    Usage: headrace serve, headrace serve path/to/model --weights int8, or headrace serve --config headrace.toml

    Without a model and without a headrace.toml, it serves the bundled model.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name. Replaces the configuration's
        models.
    config
        Configuration file. Default: ./headrace.toml, if it exists.
    host
        Address to listen on; 0.0.0.0 is every address of the machine.
    port
        Port to listen on; 0 picks a free one.
    weights
        Precision of the weights: auto (bf16, or what keeps the weights of a quantised file), f32, bf16, fp8, int8,
        int4, int3 or int2; -a16 after auto or integers leaves activations unrounded.
    kv
        Precision of the KV cache: f32, bf16, int8, fp8 or int4.
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
    insecure
        Allow an address that other machines reach without API keys: anybody there can use the server.
    pull
        Download models that are not on this machine.
    """
    start_server(
        model,
        config=config,
        host=host,
        port=port,
        weights=weights,
        kv=kv,
        threads=threads,
        context=context,
        replicas=replicas,
        api_key=api_key,
        log_format=log_format,
        insecure=insecure,
        pull=pull,
    )
