"""Builds what serves a variant: its own engine, the workers of another process, or an upstream."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from headrace.config import Config, ModelConfig, ServerConfig
from headrace.engine.executors.default_sizes import default_context
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient
from headrace.engine.process.supervisor import SupervisorTimeouts
from headrace.engine.process.worker_address import WorkerTls
from headrace.errors import HeadraceError
from headrace.gateway.images.image_reader import ImageReader, encoder_threads
from headrace.gateway.output.reasoning import detect_reasoning_format, reasoning_format_by_name
from headrace.gateway.output.tool_formats import detect_tool_format, tool_format_by_name
from headrace.gateway.serving import fingerprint
from headrace.gateway.serving.served_variant import NO_BOUND, ModelDescription, NoEngine, NoTokenizer, ServedVariant
from headrace.gateway.upstreams.upstream import Upstream
from headrace.llm.in_workers import AsyncLLM
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import AUTOS
from headrace.models.vision.pixels import require_pillow
from headrace.models.vision.vision_folder import has_vision, open_vision
from headrace.models.weight_cache import cache_folder
from headrace.models.weight_choice import choose_plan, describe_choice
from headrace.variant import Variant

log: Final = logging.getLogger(__name__)


class Runs(Protocol):
    """An engine's processes, or an upstream."""

    async def start(self) -> None: ...

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


def own_engine(
    name: str,
    variant: Variant,
    model: ModelConfig,
    config: Config,
    progress: Callable[[int, int], None] | None,
    *,
    early: bool,
) -> AsyncLLM:
    options = msgspec.structs.asdict(variant)
    path, server = options.pop("model"), config.server
    plain = "@" not in name
    workers = model.workers if plain else ()
    discovers = plain and model.discover_workers
    return AsyncLLM(
        path,
        replicas=model.local_replicas(plain=plain),
        standby=model.standby,
        most_replicas=None if model.autoscale is None else model.autoscale.most,
        workers=workers,
        discovers=discovers,
        tls=_tls(config),
        fingerprint=fingerprint.of_model(open_model(find_model(path)), variant) if workers or discovers else "",
        watch=SupervisorTimeouts(ping=_ping_s(server), silence=server.heartbeat_s, longest_step=server.step_s),
        waits=_waits(server),
        drain_seconds=server.drain_s,
        progress=progress,
        early=early,
        **options,
    )


def _tls(config: Config) -> WorkerTls | None:
    workers = config.workers
    if not workers.cert_file:
        return None
    return WorkerTls(cert=workers.cert_file, key=workers.key_file, ca=workers.ca_file, name=workers.name)


def remake(name: str, variant: Variant, model: ModelConfig, config: Config) -> tuple[ServedVariant, AsyncLLM]:
    engine = own_engine(name, variant, model, config, None, early=False)
    try:
        return served_by_engine(name, model, engine, config), engine
    except BaseException:
        engine.abandon()
        raise


def _ping_s(server: ServerConfig) -> float:
    return min(SupervisorTimeouts().ping, server.heartbeat_s / 4)


def _waits(server: ServerConfig) -> ClientTimeouts:
    return ClientTimeouts(
        patience=server.worker_s,
        ping=_ping_s(server),
        suspicion=server.heartbeat_s / 2,
        longest_step=server.step_s,
    )


class AttachedEngine:
    """An engine whose workers another process supervises."""

    def __init__(
        self, variant: Variant, model: ModelConfig, addresses: Sequence[str], config: Config, *, plain: bool
    ) -> None:
        """`plain`: it is the model's variant without a name, which workers on other hosts serve too."""
        folder = open_model(find_model(variant.model))
        self.variant = msgspec.structs.replace(variant, model=str(folder.path))
        self.context = default_context(folder.spec) if variant.context is None else variant.context
        folder.tokenizer_cache = cache_folder() if variant.cache else None
        self.tokenizer = folder.tokenizer
        remote = (plain and model.discover_workers) or any(address in model.workers for address in addresses)
        self._is_local = any(address not in model.workers for address in addresses)
        self.client = EngineClient(
            addresses,
            tls=_tls(config),
            fingerprint=fingerprint.of_model(folder, variant) if remote else "",
            standby=model.standby,
            waits=_waits(config.server),
        )

    async def start(self) -> None:
        self.client.start()
        if self._is_local:
            await self.client.ready()

    def abandon(self) -> None:
        """There is nothing to stop."""

    async def close(self) -> None:
        await self.client.close()


VariantEngine = AsyncLLM | AttachedEngine


def served_by_engine(name: str, model: ModelConfig, engine: VariantEngine, config: Config) -> ServedVariant:
    folder = open_model(find_model(engine.variant.model))
    tokenizer = engine.tokenizer
    template = None if tokenizer.tool_template is None else tokenizer.tool_template.source
    tools = (
        tool_format_by_name(model.tool_format, tokenizer)
        if model.tool_format
        else detect_tool_format(template, tokenizer)
    )
    reasoning = (
        reasoning_format_by_name(model.reasoning_format, tokenizer)
        if model.reasoning_format
        else detect_reasoning_format(template, tokenizer)
    )
    return ServedVariant(
        name=name,
        engine=engine.client,
        tokenizer=tokenizer,
        context=engine.context,
        kind=folder.spec.kind,
        width=folder.spec.vector_size,
        ranking=folder.spec.ranking,
        fingerprint=fingerprint.of_model(folder, engine.variant, special_tokens=model.special_tokens),
        tools=tools,
        reasoning=reasoning,
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines=_deadlines(config),
        prompts=folder.prompts,
        special_tokens=model.special_tokens == "completions",
        description=_description(folder, engine.variant),
        **_images(name, folder, engine, config),
    )


def _images(name: str, folder: ModelFolder, engine: VariantEngine, config: Config) -> dict[str, Any]:
    """Return the fields of a variant that say what it makes of images."""
    if not has_vision(folder.path):
        architecture = folder.spec.architecture
        unread = architecture.endswith("ForConditionalGeneration")
        return {"no_images": f"Headrace loads no image part of {architecture}. Send text only."} if unread else {}
    try:
        require_pillow()
        vision = open_vision(folder.path).within(engine.variant.image_patches)
    except HeadraceError as error:
        log.warning("'%s' reads no images. %s", name, error)
        return {"no_images": str(error)}
    from headrace.engine.executors.image_encoder import ImageEncoder  # the core, which only images need in this process

    variant = engine.variant
    encoder = ImageEncoder(
        vision,
        threads=encoder_threads(config.images),
        isa=variant.isa,
        arithmetic=variant.arithmetic,
        cache=cache_folder() if variant.cache else None,
        weights=variant.image_weights,
    )
    reader = ImageReader(name, vision, encoder, engine.tokenizer, config.images)
    return {"images": reader}


def _description(folder: ModelFolder, variant: Variant) -> ModelDescription:
    plan = choose_plan(folder, variant.weights, group=variant.group, keep=variant.keep)
    return ModelDescription(
        family=folder.spec.family,
        parameters=sum(math.prod(shape) for shape in folder.shapes.values()),
        precision=plan.name if variant.weights in AUTOS else variant.weights,
        format=folder.weights.files[0].suffix.removeprefix("."),
        weight_bytes=folder.weights.total_bytes,
        choice=describe_choice(folder, plan, drafts=variant.speculation == "mtp"),
    )


def served_by_upstream(upstream: Upstream, model: ModelConfig, config: Config) -> ServedVariant:
    """Return the variant that an upstream serves."""
    takes, context = upstream.takes, upstream.config.context
    return ServedVariant(
        name=upstream.name,
        engine=NoEngine(upstream.name),
        tokenizer=upstream.tokenizer or NoTokenizer(upstream.name),
        context=NO_BOUND if context is None else context,
        kind="decoder" if takes.chat or takes.completions else "encoder",
        fingerprint=fingerprint.of_upstream(upstream.config),
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines=_deadlines(config),
        upstream=upstream,
    )


def _deadlines(config: Config) -> dict[str, float]:
    """Seconds, by surface."""
    return {
        surface: each.deadline_ms / 1000.0 for surface, each in config.surfaces.items() if each.deadline_ms is not None
    }
