"""Opens a variant: loads the model, sizes its memory and assembles the engine. Used by the worker process and by
LLM."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from headrace.engine.engine import Engine
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import Capacity
from headrace.engine.interface.variant_check import check_variant
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.kv_cipher import KvCipher
from headrace.engine.memory.kv_disk import KvDisk
from headrace.engine.memory.kv_tiers import KvTiers
from headrace.engine.memory.prefix_file import KvIdentity, kv_identity
from headrace.engine.memory.state_pool import StatePool
from headrace.engine.pinned_prefixes import PinnedPrefixes
from headrace.engine.process.start_clock import StartClock
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.engine.speculation.draft_model import DraftModelDrafter
from headrace.engine.speculation.drafters import NgramDrafter
from headrace.engine.speculation.eagle3_head import eagle3_head
from headrace.engine.speculation.joined_layer import eagle_layer, prediction_layer
from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.engine.speculation.medusa import MedusaDrafter
from headrace.engine.speculation.speculator import DraftLength, Speculator
from headrace.errors import RequestError
from headrace.models.draft_heads import EagleLayer, open_draft_heads
from headrace.models.eagle3_layer import Eagle3Layer
from headrace.models.formats.model_weights import content_digest
from headrace.models.key_offsets import offsets_of
from headrace.models.model_folder import ModelFolder, find_model, open_model, with_expanded_kv
from headrace.models.own_module import OwnModule, own_module
from headrace.models.precision import parse_precision
from headrace.models.spec import ModelSpec
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.vision.vision_folder import image_bytes, own_files
from headrace.models.weight_cache import cache_folder
from headrace.surfaces import surfaces_with
from headrace.variant import Variant

log = logging.getLogger(__name__)

_HEADS_WEIGHTS: Final = "int8"  # of draft heads, if nothing else is set

ProgressCallback = Callable[[int, int], None]  # bytes of weights done, bytes in all


class OpenedVariant(msgspec.Struct, frozen=True):
    variant: Variant
    folder: ModelFolder
    executor: CpuExecutor
    engine: Engine
    pins: PinnedPrefixes
    tokenizer: Tokenizer


def open_variant(
    variant: Variant,
    *,
    folder: ModelFolder | None = None,
    progress: ProgressCallback | None = None,
    cuts_texts: bool = True,
    reads_images: bool = False,
    clock: StartClock | None = None,
) -> OpenedVariant:
    """Return the opened variant. Raise ModelError or RequestError if it cannot be served.

    `folder` is the model's folder, if it is open already. `cuts_texts` says whether prompts are tokenised here, so that
    the whole tokenizer is read, `reads_images` whether a server beside reads images for this model, which takes memory
    too. `clock` records how long each part takes.
    """
    clock = clock or StartClock()
    check_variant(variant)
    if folder is None:
        folder = open_model(find_model(variant.model))
    if not variant.latent_kv:
        folder = with_expanded_kv(folder)
    if folder.spec.state_floats:
        _check_recurrent(variant)
    clock.end("folder")
    own = own_module(folder, variant)
    images = image_bytes(folder.path, variant.image_weights, variant.image_patches) if reads_images else 0
    executor = _load(folder, variant, own, progress, images=images)
    clock.end("weights and KV memory")
    spec, capacity = executor.spec, executor.capacity
    folder.tokenizer_cache = cache_folder() if variant.cache else None
    tokenizer = folder.tokenizer if cuts_texts else folder.decoding_tokenizer
    clock.end("tokenizer")
    reuse = spec.causal and variant.prefix_cache
    cipher = None
    if variant.kv_disk_bytes and variant.kv_disk_key_env is not None:
        cipher = KvCipher.from_environment(variant.kv_disk_key_env, os.environ)
    keeps_kv = variant.saved_prefixes is not None or variant.kv_disk_bytes > 0
    identity = _kv_identity(variant, folder, executor) if keeps_kv and reuse else None
    digest_key = b"" if identity is None else msgspec.msgpack.encode(identity)
    if cipher is not None:
        digest_key += cipher.naming_key
    speculator = _speculator(variant, folder, executor, own) if spec.kind == "decoder" else None
    states = None
    if capacity.states:
        states = _state_pool(variant.max_sequences, capacity, reuse=reuse, drafts=speculator is not None)
    blocks = BlockManager(capacity.blocks, capacity.block_tokens, reuse=reuse, digest_key=digest_key, states=states)
    for prefix in variant.public_prefixes:
        blocks.declare_public(prefix)
    step_time = StepTimeModel()
    limits = SchedulerLimits(
        context=capacity.context,
        max_rows=capacity.max_rows,
        block_tokens=capacity.block_tokens,
        causal=spec.causal,
        whole_images=spec.image_span > 0,
        keeps_states=reuse and states is not None,
        max_sequences=variant.max_sequences if states is None else states.running,
        queued_sequences=variant.queued_sequences,
    )
    policy = Policy(surfaces=surfaces_with(variant.surfaces))
    if variant.batch_mode == "throughput":
        policy = policy.for_throughput()
    scheduler = Scheduler(blocks, limits, policy, step_time, rope_variant=spec.rope_variant)
    engine = Engine(
        executor,
        scheduler,
        blocks,
        tokenizer,
        speculator=speculator,
        tiers=_tiers(variant, blocks, executor, identity, cipher) if reuse else None,
        adapters=executor.adapters,
        step_time=step_time,
        sequences=variant.max_sequences,
        checks=variant.checks,
    )
    clock.end("engine")
    pins = _pins(variant, identity, engine)
    clock.end("saved prefixes")
    return OpenedVariant(variant, folder, executor, engine, pins, tokenizer)


def _check_recurrent(variant: Variant) -> None:
    """Raise RequestError for options that a model with recurrent layers cannot serve."""
    if variant.speculation == "self":
        raise RequestError(
            f"'{variant.model}' cannot draft for itself: it has recurrent layers, and a drafter keeps KV alone. Remove "
            "'speculation'.",
            parameter="speculation",
        )
    for name, value in (
        ("kv_memory_bytes", variant.kv_memory_bytes),
        ("kv_disk_bytes", variant.kv_disk_bytes),
        ("saved_prefixes", variant.saved_prefixes),
    ):
        if value:
            raise RequestError(
                f"'{name}' is not available for '{variant.model}': the model has recurrent layers, and KV is a part of "
                "their state. Remove the option.",
                parameter=name,
            )


def _state_pool(most: int, capacity: Capacity, *, reuse: bool, drafts: bool) -> StatePool:
    """Share the slots of recurrent states between at most `most` running sequences, prefixes to reuse, and drafts that
    may be rejected."""
    others = capacity.states // 2 if reuse else capacity.states // 4 if drafts else 0
    running = min(most, max(1, capacity.states - others))
    if running < most:
        log.info("recurrent states leave room for %d running sequences, not %d", running, most)
    kept = capacity.states - running if reuse or drafts else 0
    return StatePool(running, kept, (kept // 2 if reuse else kept) if drafts else 0)


def _load(
    folder: ModelFolder, variant: Variant, own: OwnModule | None, progress: ProgressCallback | None, *, images: int
) -> CpuExecutor:
    return CpuExecutor.load(
        folder,
        weights=variant.weights,
        group=variant.group,
        keep=variant.keep,
        kv=variant.kv,
        threads=variant.threads,
        context=variant.context,
        kv_tokens=variant.kv_tokens,
        kv_block=variant.kv_block,
        max_rows=_step_rows(folder.spec, variant),
        isa=variant.isa,
        arithmetic=variant.arithmetic,
        cache=cache_folder() if variant.cache else None,
        adapter_bytes=variant.adapter_memory_bytes,
        own=own,
        offsets=offsets_of(folder.spec, variant),
        images=images,
        progress=progress,
    )


def _step_rows(spec: ModelSpec, variant: Variant) -> int:
    """Return the tokens of one step: among them an image, which is computed in one piece beside all streams."""
    if not spec.image_span:
        return variant.max_rows
    return max(variant.max_rows, spec.image_span + variant.max_sequences)


def _speculator(
    variant: Variant, folder: ModelFolder, executor: CpuExecutor, own: OwnModule | None
) -> Speculator | None:
    lengths = DraftLength(most=variant.most_drafts)
    if variant.speculation == "ngram":
        return Speculator(NgramDrafter(), lengths)
    cache = cache_folder() if variant.cache else None
    if own is not None:
        return Speculator(LayerDrafter(prediction_layer(executor, own, cache=cache)), lengths)
    if variant.speculation == "self":
        shorter = executor.drafting(folder, variant.skip_layers, weights=variant.draft_weights, cache=cache)
        return Speculator(DraftModelDrafter(shorter, vocab_size=executor.spec.vocab_size), lengths)
    if variant.speculation == "heads" and variant.draft_heads is not None:
        heads = open_draft_heads(Path(variant.draft_heads).expanduser(), executor.spec)
        precision = parse_precision(variant.draft_weights or _HEADS_WEIGHTS, parameter="draft_weights")
        if isinstance(heads, EagleLayer):
            return Speculator(LayerDrafter(eagle_layer(executor, heads, precision)), lengths)
        if isinstance(heads, Eagle3Layer):
            return Speculator(LayerDrafter(eagle3_head(executor, heads, precision)), lengths)
        return Speculator(MedusaDrafter(executor, heads, precision), lengths)
    if variant.speculation == "none" or variant.draft_model is None:
        return None
    small = open_model(find_model(variant.draft_model))
    if small.spec.state_floats:
        raise RequestError(
            f"'{variant.draft_model}' cannot be a draft model: it has recurrent layers, whose state cannot be taken "
            "back after a rejected draft. Use another one.",
            parameter="draft_model",
        )
    draft = CpuExecutor.load(
        small,
        weights=variant.draft_weights or variant.weights,
        kv=variant.kv,
        threads=executor.threads,
        context=executor.capacity.context,
        kv_tokens=executor.capacity.blocks * executor.capacity.block_tokens,
        kv_block=executor.capacity.block_tokens,
        isa=executor.isa,
        cache=cache,
    )
    return Speculator(DraftModelDrafter(draft, vocab_size=executor.spec.vocab_size), lengths)


def _kv_identity(variant: Variant, folder: ModelFolder, executor: CpuExecutor) -> KvIdentity:
    # With the image part of a GGUF model, which is a file of its own: KV of images depends on it.
    files = (*folder.weights.files, *own_files(folder.path))
    return kv_identity(
        weights_digest=content_digest(files, index_dir=cache_folder() if variant.cache else None),
        spec=executor.spec,
        plan=executor.plan,
        kv=executor.kv_type,
        arithmetic=executor.arithmetic,
        block_tokens=executor.capacity.block_tokens,
        block_bytes=executor.block_bytes,
        offsets=executor.offsets_digest,
    )


def _tiers(
    variant: Variant, blocks: BlockManager, executor: CpuExecutor, identity: KvIdentity | None, cipher: KvCipher | None
) -> KvTiers | None:
    disk = None
    if variant.kv_disk_bytes and variant.kv_disk_folder is not None and identity is not None:
        # One folder for each kind of KV: a file never fits an engine of another kind.
        name = hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest()[:32]
        path = Path(variant.kv_disk_folder).expanduser() / name
        try:
            disk = KvDisk(path, block_bytes=executor.block_bytes, most_bytes=variant.kv_disk_bytes, cipher=cipher)
        except OSError as error:
            raise RequestError(
                f"Cannot use the folder {path}: {error.strerror or error}.", parameter="kv_disk_folder"
            ) from None
    if disk is None and not variant.kv_memory_bytes:
        return None
    return KvTiers(blocks, executor, memory_bytes=variant.kv_memory_bytes, disk=disk)


def _pins(variant: Variant, identity: KvIdentity | None, engine: Engine) -> PinnedPrefixes:
    if variant.saved_prefixes is None:
        return PinnedPrefixes(engine)
    pins = PinnedPrefixes(engine, Path(variant.saved_prefixes), identity)
    pins.restore()
    return pins
