"""Checks the rules of a configuration that types and ranges cannot express.

Covers rules between sections and those that need the engine (surfaces, variant options). Rules of a single gateway
package live in that package and are called from here. Each rule yields its findings, so that all mistakes are reported
at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.config import (
    CanaryConfig,
    Config,
    FastConfig,
    KeyConfig,
    ModelConfig,
    PriceConfig,
    digest_of,
    names_of,
    upstreams_of,
    variants_of,
)
from headrace.config.adapter_section import check_adapters
from headrace.config.cache_section import ANSWERING_MODEL
from headrace.config.loader import ConfigCheck, read_config
from headrace.config.pin_section import check_pins
from headrace.config.toml_text import HIDDEN, key_path, quoted
from headrace.config.upstream_section import check_upstream
from headrace.config.value_types import Finding
from headrace.config.worker_section import check_autoscale, check_worker_addresses
from headrace.engine.interface.variant_check import check_variant
from headrace.errors import RequestError
from headrace.gateway.accounts import account_rules as accounts
from headrace.gateway.degradation.ladder import ladder_config as ladders
from headrace.gateway.ledger.prices import PriceError, make_price
from headrace.gateway.routing import routing_checks as routing
from headrace.lab.recording import recording_rules as recordings
from headrace.lab.techniques import without_lossy
from headrace.pipelines import pipeline_rules
from headrace.pipelines.tools import tool_rules
from headrace.server.http.allowed_hosts import is_loopback
from headrace.surfaces import SURFACES

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]*")
_ALIAS: Final = re.compile(r"[\x21-\x7e]+")
_VARIANT_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_SECRET: Final = re.compile(r"[\x21-\x7e]+")  # characters allowed after `Bearer ` in a header
_SHA256: Final = re.compile(r"[0-9A-Fa-f]{64}")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def load_config(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
    check: ConfigCheck | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Config:
    """Read and check the configuration, and turn lossy techniques off if it says so; raise ConfigError with every
    mistake. `check` replaces `check_config`. See config.loader.read_config."""
    config = read_declared(path, environ=environ, flags=flags, check=check, tables=tables)
    return without_lossy(config) if config.safety.lossless_only else config


def read_declared(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
    check: ConfigCheck | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration as it is written, with what `safety.lossless_only` turns off."""
    return read_config(path, environ=environ, flags=flags, check=check or check_config, tables=tables)


def check_config(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield from _exposure(config)
    if config.server.processes > 1:
        yield from _processes(config)
    yield from _origins(config.server.cors_origins)
    yield from _models(config)
    for name, slo in config.slo.items():
        where = key_path("slo", name)
        yield from _surface(slo.surface or name, where if slo.surface is None else f"{where}.surface")
        if slo.fast_mode and config.fast == FastConfig():
            yield f"{where}.fast_mode", "the section [fast] is empty. Say there what fast mode changes"
    for name, surface in config.surfaces.items():
        where = key_path("surfaces", name)
        wrong = list(_surface(name, where))
        yield from wrong or ladders.findings(name, surface, f"{where}.ladder")
    yield from _keys(config.keys, environ)
    for name, model in config.models.items():
        for full, upstream in upstreams_of(name, model).items():
            suffix = full.removeprefix(name)[1:]
            where = key_path("models", name, "upstreams", suffix) if suffix else key_path("models", name, "upstream")
            yield from check_upstream(upstream, environ, where, processes=config.server.processes)
    yield from recordings.findings(config.recording, environ)
    served = names_of(config)
    yield from accounts.check_accounts(config, served)
    yield from routing.findings(config.routing, served)
    yield from _canary(config.canary, served)
    if config.drift.encoder is not None and config.drift.encoder not in served:
        known = ", ".join(map(quoted, served))
        yield "drift.encoder", f"expected a served encoder, one of {known}, found {quoted(config.drift.encoder)}"
    for key, kind in (("embedder", "encoder"), ("reranker", "reranker")):
        name: str = getattr(config.collections, key)
        if name and name not in served:
            known = ", ".join(map(quoted, served))
            yield f"collections.{key}", f"expected a served {kind}, one of {known}, found {quoted(name)}"
    for name, each in config.catalogues.items():
        for place, model in enumerate(each.models):
            if model not in served:
                known = ", ".join(map(quoted, served))
                where = f"{key_path('catalogues', name)}.models[{place}]"
                yield where, f"expected a served model, one of {known}, found {quoted(model)}"
        for place, surface in enumerate(each.surfaces):
            yield from _surface(surface, f"{key_path('catalogues', name)}.surfaces[{place}]")
    yield from pipeline_rules.findings(config, served)
    yield from tool_rules.findings(config, environ)
    for name, each in config.prices.items():
        yield from _price(name, each, served)
    yield from _caches(config, served)
    if config.storage.files_bytes < config.storage.file_bytes:
        yield (
            "storage.files_bytes",
            f"expected at least storage.file_bytes ({config.storage.file_bytes}), found {config.storage.files_bytes}",
        )


def _canary(config: CanaryConfig, served: Sequence[str]) -> Iterator[Finding]:
    if not config.stages or list(config.stages) != sorted(set(config.stages)):
        yield "canary.stages", f"expected ascending percentages such as [5, 25, 50], found {list(config.stages)}"
    if config.reference is not None and config.reference not in served:
        known = ", ".join(map(quoted, served))
        yield "canary.reference", f"unknown variant {quoted(config.reference)}; known variants: {known}"


def _price(name: str, config: PriceConfig, served: Sequence[str]) -> Iterator[Finding]:
    where = key_path("prices", name)
    if name not in served:
        yield where, f"unknown model or variant {quoted(name)}; known: {', '.join(map(quoted, served))}"
    for kind in ("input", "cached", "output", "second"):
        try:
            make_price(input=getattr(config, kind) or 0)
        except PriceError as error:
            yield f"{where}.{kind}", str(error)


def _caches(config: Config, served: Sequence[str]) -> Iterator[Finding]:
    exact, semantic = config.cache.exact, config.cache.semantic
    used = semantic.mode != "off" or any(each.caches.semantic not in (None, "off") for each in config.tenants.values())
    known = ", ".join(map(quoted, served))
    if used and semantic.embedder not in served:
        yield "cache.semantic.embedder", f"expected a served encoder, one of {known}, found {quoted(semantic.embedder)}"
    if semantic.verify not in ("", ANSWERING_MODEL, *served):
        yield (
            "cache.semantic.verify",
            f"expected {quoted(ANSWERING_MODEL)}, or a served reranker or chat model, one of {known}, "
            f"found {quoted(semantic.verify)}",
        )
    if semantic.verify == ANSWERING_MODEL and ANSWERING_MODEL in served:
        yield (
            "cache.semantic.verify",
            f"{quoted(ANSWERING_MODEL)} stands for the model that would answer, and is also a served model's name; "
            "give that model another name",
        )
    if exact.tenant_bytes > exact.bytes:
        yield (
            "cache.exact.tenant_bytes",
            f"expected at most cache.exact.bytes ({exact.bytes}), found {exact.tenant_bytes}",
        )
    results = config.cache.results
    if results.tenant_bytes > results.bytes:
        yield (
            "cache.results.tenant_bytes",
            f"expected at most cache.results.bytes ({results.bytes}), found {results.tenant_bytes}",
        )
    summary = config.shaping.summary_model
    if summary and summary not in served:
        yield (
            "shaping.summary_model",
            f"unknown model or variant {quoted(summary)}; known: {', '.join(map(quoted, served))}",
        )


def _processes(config: Config) -> Iterator[Finding]:
    """Yield what would not be right with several processes: state that each of them would have for itself."""
    one = "this needs server.processes = 1"
    exact = config.cache.exact
    tenants = [each.caches for each in config.tenants.values()]
    if (exact.mode != "off" or any(each.exact not in (None, "off") for each in tenants)) and exact.store != "redis":
        yield "cache.exact.store", f'{one}, or "redis": each process would have a cache of its own'
    results = config.cache.results
    if (results.mode != "off" or any(each.results not in (None, "off") for each in tenants)) and (
        results.store != "redis"
    ):
        yield "cache.results.store", f'{one}, or "redis": each process would have a cache of its own'
    if config.cache.semantic.mode != "off" or any(each.semantic not in (None, "off") for each in tenants):
        yield "cache.semantic.mode", f"{one}: each process would have a cache of its own"
    if config.server.address_requests_per_s is not None:
        yield "server.address_requests_per_s", f"{one}: each process would count for itself"
    if config.drift.share:
        yield "drift.share", f"{one}: each process would see a part of the traffic"
    if config.routing.shadows:
        yield "routing.shadows", f"{one}: each process would have bounds and sums of its own"
    for name in config.pipelines:
        why = "collections, approvals and runs that can be interrupted belong to one process"
        yield key_path("pipelines", name), f"{one}: {why}"
    for name, surface in config.surfaces.items():
        if surface.ladder.preset or surface.ladder.steps:
            yield key_path("surfaces", name, "ladder"), f"{one}: each process would see its own load only"


def _exposure(config: Config) -> Iterator[Finding]:
    server = config.server
    if not (config.keys or server.insecure or is_loopback(server.host)):
        yield (
            "server.host",
            f"{quoted(server.host)} is reachable from other machines, and there is no API key: anybody could use this "
            "server. Add a key (--api-key or [[keys]]), listen on 127.0.0.1, or allow it with --insecure "
            "(server.insecure = true)",
        )
    for name in ("metrics_need_key", "docs_need_key"):
        if getattr(server, name) and not (config.keys or config.admin.socket):
            yield f"server.{name}", "expected at least one API key; add one to [[keys]]"
    if server.internal_port and (server.internal_host, server.internal_port) == (server.host, server.port):
        yield "server.internal_port", f"expected another port than server.port, found {server.port} for both"
    if server.grpc_port:
        for key, address in (
            ("port", (server.host, server.port)),
            ("internal_port", (server.internal_host, server.internal_port)),
        ):
            if address == (server.host, server.grpc_port):
                yield "server.grpc_port", f"expected another port than server.{key}, found {server.grpc_port} for both"
    if not is_loopback(server.internal_host) and not server.metrics_need_key and not server.insecure:
        yield (
            "server.internal_host",
            f"{quoted(server.internal_host)} is reachable from other machines, and /metrics needs no key there. Set "
            "server.metrics_need_key, listen on 127.0.0.1, or allow it with --insecure (server.insecure = true)",
        )


def _origins(origins: Sequence[str]) -> Iterator[Finding]:
    for place, origin in enumerate(origins):
        if not _ORIGIN.fullmatch(origin):
            yield (
                f"server.cors_origins[{place}]",
                f'expected "*" or an origin such as "https://example.org", without a path, found {quoted(origin)}',
            )


def _models(config: Config) -> Iterator[Finding]:
    if not config.models:
        yield "models", "expected at least one model"
    if config.default_model is not None and config.default_model not in config.models:
        known = ", ".join(map(quoted, config.models))
        yield "default_model", f"expected one of the models, {known}, found {quoted(config.default_model)}"
    taken = {name: f"the model {quoted(name)}" for name in config.models}
    for name, model in config.models.items():
        for variant in (*model.variants, *model.upstreams):
            taken[f"{name}@{variant}"] = f"a variant of the model {quoted(name)}"
    for name, model in config.models.items():
        where = key_path("models", name)
        if not _MODEL_NAME.fullmatch(name):
            yield where, "expected a model name of letters, digits and . _ : / + - that starts with a letter or digit"
        for place, alias in enumerate(model.aliases):
            here = f"{where}.aliases[{place}]"
            if not _ALIAS.fullmatch(alias):
                yield here, f"expected a name of ASCII characters without spaces, found {quoted(alias)}"
            elif alias in taken:
                yield here, f"{quoted(alias)} is already {taken[alias]}"
            else:
                taken[alias] = f"an alias of {quoted(name)}"
        yield from _surface(model.surface, f"{where}.surface")
        yield from check_autoscale(model.autoscale, model.replicas, config.server.processes, where)
        yield from check_worker_addresses(model.workers, config.workers, where)
        if model.workers and model.upstream is not None:
            yield f"{where}.workers", "expected no workers: an upstream serves this model"
        yield from _discovery(model, config, where)
        yield from _pins(name, model, f"{where}.pins")
        yield from _variants(name, model, where)
    for name, model in config.models.items():
        where = f"{key_path('models', name)}.adapters"
        yield from check_adapters(name, model.adapters, where, named=taken)
        if model.adapters and model.upstream is not None and not model.variants:
            yield where, f"no engine of Headrace serves {quoted(name)}, so it cannot serve adapters"


def _discovery(model: ModelConfig, config: Config, where: str) -> Iterator[Finding]:
    if not model.discover_workers:
        return
    if model.upstream is not None:
        yield f"{where}.discover_workers", "expected false: an upstream serves this model"
    if config.workers.redis_env is None:
        yield "workers.redis_env", f"missing: {where}.discover_workers needs the registry that it names"


def _pins(name: str, model: ModelConfig, where: str) -> Iterator[Finding]:
    yield from check_pins(model.pins, where)
    if model.pins and model.upstream is not None and not model.variants:
        yield where, f"no engine of Headrace serves {quoted(name)}, so it cannot pin prompts"


def _variants(name: str, model: ModelConfig, where: str) -> Iterator[Finding]:
    for kind, names in (("variants", model.variants), ("upstreams", model.upstreams)):
        for variant in names:
            if not _VARIANT_NAME.fullmatch(variant):
                yield key_path("models", name, kind, variant), "expected a name of letters, digits and . _ -"
    for variant in model.variants:
        if variant in model.upstreams:
            yield key_path("models", name, "upstreams", variant), "the model already has a variant with this name"
    try:
        variants = variants_of(name, model, {})
    except RequestError as error:
        yield where, str(error)
        return
    wrong_before = ""
    for full, variant in variants.items():
        try:
            check_variant(variant)
        except RequestError as error:
            if str(error) == wrong_before:
                continue  # variants inherit it from the options
            wrong_before = str(error)
            suffix = full.removeprefix(name)[1:]
            place = key_path("models", name, "variants", suffix) if suffix else f"{where}.options"
            yield f"{place}.{error.parameter}" if error.parameter else place, str(error)


def _surface(name: str, where: str) -> Iterator[Finding]:
    if name not in SURFACES:
        yield where, f"unknown surface {quoted(name)}; known surfaces: {', '.join(SURFACES)}"


def _keys(keys: Sequence[KeyConfig], environ: Mapping[str, str]) -> Iterator[Finding]:
    names: dict[str, int] = {}
    digests: dict[str, int] = {}
    for place, key in enumerate(keys):
        where = f"keys[{place}]"
        first = names.setdefault(key.name, place)
        if first != place:
            yield f"{where}.name", f"duplicate name {quoted(key.name)}: keys[{first}] has it too"
        if key.surface is not None:
            yield from _surface(key.surface, f"{where}.surface")
        wrong = list(_secret(key, where, environ))
        if wrong:
            yield from wrong
            continue
        first = digests.setdefault(digest_of(key, environ), place)
        if first != place:
            yield where, f"duplicate secret: keys[{first}] has the same one"


def _secret(key: KeyConfig, where: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    given = [name for name in ("key", "key_env", "key_sha256") if getattr(key, name) is not None]
    if len(given) != 1:
        yield where, f"expected exactly one of key, key_env and key_sha256, found {' and '.join(given) or 'none'}"
    elif key.key_sha256 is not None:
        if not _SHA256.fullmatch(key.key_sha256):
            yield f"{where}.key_sha256", "expected 64 hexadecimal digits"
    elif key.key_env is not None:
        if not environ.get(key.key_env):
            yield f"{where}.key_env", f"the environment variable {key.key_env} is not set or empty"
        elif not _SECRET.fullmatch(environ[key.key_env]):
            yield (
                f"{where}.key_env",
                f"expected ASCII characters without spaces and line breaks in the environment variable {key.key_env}",
            )
    elif key.key == HIDDEN:
        yield f"{where}.key", f"expected a secret, found the placeholder {quoted(HIDDEN)} that `config show` prints"
    elif not _SECRET.fullmatch(key.key or ""):
        yield f"{where}.key", "expected ASCII characters without spaces"
