"""`headrace worker`: run one engine for servers on other hosts until a signal stops it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter
from rich.console import Console

from headrace.cli.error_report import report_errors_as_json
from headrace.cli.serving.loading_bars import LoadingBars
from headrace.config import Config, LogConfig, WorkersConfig, variants_of
from headrace.engine.process.worker_address import WorkerAddress, WorkerTls
from headrace.errors import RequestError
from headrace.observe.logs import configure_log
from headrace.server.config_checks import load_config
from headrace.variant import DEFAULT_MODEL, Variant

if TYPE_CHECKING:
    from headrace.server.worker_host import RegistryOptions


def worker(
    model: str = DEFAULT_MODEL,
    /,
    *,
    listen: Annotated[str, Parameter(name=["--listen", "-l"])],
    cert: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    weights: str | None = None,
    kv: str | None = None,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    context: int | None = None,
    registry: str | None = None,
    announce: str | None = None,
    name: str | None = None,
    lease_s: float = 10.0,
    preemptible: Annotated[bool, Parameter(negative="")] = False,
    drain_s: float = 30.0,
    log_format: str | None = None,
) -> None:
    """Run an engine for servers on other hosts, which name its address in `workers` of a model, or find it in Redis.

    Usage: headrace worker mini --listen 0.0.0.0:9000 --cert worker.pem --key worker-key.pem --ca ca.pem

    SIGTERM drains it: servers send it nothing more, and requests that do not finish in time continue on other workers.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled or downloaded model; with --config, a model or MODEL@VARIANT of the file.
    listen
        Host and port to listen on, such as 0.0.0.0:9000; port 0 picks a free one.
    cert
        Certificate of this worker (PEM). Required unless the host is a loopback address.
    key
        Private key of the certificate (PEM).
    ca
        CA that signs the servers' certificates (PEM). Only servers with such a certificate can connect.
    config
        Configuration file whose options of the model to use, so that worker and server agree.
    weights
        Precision of the weights, as in headrace serve.
    kv
        Precision of the KV cache: f32, bf16, int8, fp8 or int4.
    threads
        Threads to compute with. Default: the machine's cores.
    context
        Maximum tokens of prompt and answer together.
    registry
        Environment variable with the URL of the Redis in which servers with `discover_workers` find this worker.
        Default: `workers.redis_env` of --config.
    announce
        Host, or HOST:PORT, that servers connect to. Default: those of --listen.
    name
        Name of the model in the servers' configuration. Default: the model that you name here.
    lease_s
        Seconds after which a worker that does not renew its announcement is forgotten.
    preemptible
        The host may be taken away at any time: servers send it batch work first, and other requests only if no other
        worker takes them.
    drain_s
        Seconds that running requests may take after SIGTERM. Stay below the notice that your host gives.
    log_format
        Log format: text or json.
    """
    if log_format == "json":
        report_errors_as_json()
    if log_format not in (None, "text", "json"):
        raise RequestError(f"Unknown log format '{log_format}'. Expected text or json.", parameter="log_format")
    if drain_s <= 0:
        raise RequestError(f"--drain-s must be above 0, not {drain_s:g}.", parameter="drain_s")
    if not 1 <= lease_s <= 3600:
        raise RequestError(f"--lease-s must be from 1 to 3600, not {lease_s:g}.", parameter="lease_s")
    host, port = _host_and_port(listen)
    options = {"weights": weights, "kv": kv, "threads": threads, "context": context}
    options = {name: value for name, value in options.items() if value is not None}
    loaded = None if config is None else load_config(config, environ=os.environ)
    variant = Variant.of(model, **options) if loaded is None else _configured(model, loaded, str(config), options)
    workers = WorkersConfig() if loaded is None else loaded.workers
    announced = _registry(workers, registry, announce, name or _name_of(model), lease_s)
    configure_log(LogConfig(format="json" if log_format == "json" else "text"))
    from headrace.server.worker_host import WorkerHostOptions, run

    console = Console(stderr=True)
    with LoadingBars(console) as bars:

        def ready(address: WorkerAddress) -> None:
            bars.stop()
            if log_format != "json":
                console.print(f"Worker of {model} at {address}. Press Ctrl-C to stop.", highlight=False, soft_wrap=True)

        run(
            variant,
            WorkerHostOptions(
                host=host,
                port=port,
                tls=_tls(cert, key, ca),
                preemptible=preemptible,
                drain_s=drain_s,
                registry=announced,
            ),
            ready=ready,
            progress=(lambda done, total: bars.show(model, done, total)) if console.is_terminal else None,
        )


def _host_and_port(listen: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise RequestError(
            f"Cannot listen on '{listen}'. Expected HOST:PORT, such as 0.0.0.0:9000.", parameter="listen"
        )
    return host, port


def _tls(cert: Path | None, key: Path | None, ca: Path | None) -> WorkerTls | None:
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise RequestError("Pass --cert, --key and --ca together.", parameter="cert")
    return WorkerTls(cert=str(cert), key=str(key), ca=str(ca))


def _registry(
    workers: WorkersConfig, variable: str | None, announce: str | None, model: str, lease_s: float
) -> RegistryOptions | None:
    variable = variable or workers.redis_env
    if variable is None:
        if announce is not None:
            raise RequestError("--announce needs a registry. Pass --registry too.", parameter="announce")
        return None
    url = os.environ.get(variable)
    if not url:
        raise RequestError(
            f"The environment variable {variable} is not set or empty. Expected the URL of a Redis, such as "
            "redis://10.0.0.2:6379/0.",
            parameter="registry",
        )
    from headrace.server.worker_host import RegistryOptions

    host, port = ("", 0) if announce is None else _announced_address(announce)
    return RegistryOptions(
        url=url,
        namespace=workers.namespace,
        model=model,
        host=host,
        port=port,
        lease_s=lease_s,
        wait_s=workers.wait_ms / 1e3,
    )


def _announced_address(announce: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{announce}")
        if parts.hostname and parts.netloc == announce and parts.username is None:
            return parts.hostname, parts.port or 0
    except ValueError:
        pass
    raise RequestError(
        f"Cannot announce '{announce}'. Expected HOST or HOST:PORT, such as 10.0.0.5:9000.", parameter="announce"
    )


def _name_of(model: str) -> str:
    """Return the name that a configuration would have for a model: without its folders and MODEL@VARIANT's variant."""
    return Path(model).name.partition("@")[0]


def _configured(name: str, loaded: Config, file: str, options: dict[str, Any]) -> Variant:
    base = name.partition("@")[0]
    variants = variants_of(base, loaded.models[base], loaded.surfaces) if base in loaded.models else {}
    if name not in variants:
        known = ", ".join(full for each, model in loaded.models.items() for full in variants_of(each, model, {}))
        raise RequestError(f"{file} has no model '{name}' that an engine serves. Its models: {known}.")
    found = variants[name]
    changed = {field: getattr(found, field) for field in found.__struct_fields__} | options
    return Variant.of(changed.pop("model"), **changed)
