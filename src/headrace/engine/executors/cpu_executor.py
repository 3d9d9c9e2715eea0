"""The CPU executor: the core runs each step in one call on its own threads, without the GIL.

Owns the core's model, its KV memory and the thread that waits for it. Does not know requests or scheduling.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.adapter_table import AdapterTable, adapter_format
from headrace.engine.executors.block_kv import MOST_PAGES, PAGE_TOKENS, BlockKv, block_bytes
from headrace.engine.executors.default_sizes import default_context, usable_cores
from headrace.engine.executors.executor import Capacity, StepBatch, StepResult, StepTicket
from headrace.engine.executors.executor import SampleBatch as AnyRows
from headrace.engine.executors.latent_scratch import latent_scratch
from headrace.engine.executors.memory import MemoryNeed, check_memory
from headrace.engine.executors.pooled_head import PooledHead
from headrace.engine.executors.sampler import CoreSampleBatch, Sampler
from headrace.engine.executors.shared_products import SharedProducts
from headrace.engine.executors.step_thread import StepCall, StepThread
from headrace.engine.interface.request import AdapterRef
from headrace.engine.interface.sampling import SampledToken, SampleRow
from headrace.engine.interface.variant_check import check_kv_block
from headrace.errors import RequestError
from headrace.models.key_offsets import KeyOffsets, offsets_of
from headrace.models.model_folder import ModelFolder, with_expanded_kv
from headrace.models.own_module import OwnModule, own_module
from headrace.models.packing import CoreTensor, LoadedTensors, load_tensors, packed_size
from headrace.models.precision import AUTO, KvType, WeightPlan, parse_kv_type, parse_plan
from headrace.models.prediction_module import JOIN_NAMES
from headrace.models.shorter_model import check_skipped, shorter_spec, shorter_tensors
from headrace.models.spec import ModelSpec, RecurrentSpec
from headrace.models.step_work import StepWork, step_work
from headrace.models.tensor_shapes import is_product
from headrace.models.vision.vision_folder import image_bytes
from headrace.models.weight_choice import choose_plan
from headrace.variant import DEFAULT_KV_BLOCK, Variant

DEFAULT_MAX_ROWS: Final = 512
_STATE_BYTES: Final = 1 << 30  # of all recurrent states, as far as ...
_LEAST_STATES: Final = 8  # ... so many fit; they are half of running sequences, half of prefixes
_MOST_STATES: Final = 256
DEFAULT_ADAPTER_BYTES: Final = 1 << 30
_ENDS: Final = ("embed", "head")  # tensors of a model's ends, which its prediction module shares
_SEQUENCES: Final = 4  # of the longest context, that the KV memory holds by default


def check_options(folder: ModelFolder, variant: Variant) -> None:
    """Raise RequestError for options that this model or this machine cannot serve. Reads no weights."""
    plan = parse_plan(variant.weights, group=variant.group, keep=variant.keep)
    plan.check_patterns(name for name in folder.shapes if is_product(name))
    spec = folder.spec
    context = default_context(spec) if variant.context is None else variant.context
    _check_sizes(spec, 1 if variant.threads is None else variant.threads, context)
    check_skipped(spec, variant.skip_layers)
    if not variant.latent_kv:
        folder = with_expanded_kv(folder)
    offsets_of(folder.spec, variant)
    choose_isa(variant.isa, variant.arithmetic)


def memory_of(folder: ModelFolder, variant: Variant) -> MemoryNeed:
    """Return the memory of a variant that `check_options` accepts, served with its images and without its draft model.
    Reads no weights."""
    if not variant.latent_kv:
        folder = with_expanded_kv(folder)
    plan = choose_plan(folder, variant.weights, group=variant.group, keep=variant.keep)
    context = default_context(folder.spec) if variant.context is None else variant.context
    own = own_module(folder, variant)
    kv = parse_kv_type(variant.kv)
    need = _memory_need(
        folder, plan, kv, context, variant.kv_tokens, own, block_tokens=variant.kv_block, rows=variant.max_rows
    )
    return msgspec.structs.replace(need, images=image_bytes(folder.path, variant.image_weights, variant.image_patches))


def _memory_need(
    folder: ModelFolder,
    plan: WeightPlan,
    kv: KvType,
    context: int,
    kv_tokens: int | None,
    own: OwnModule | None,
    *,
    block_tokens: int,
    rows: int,
) -> MemoryNeed:
    spec = folder.spec
    blocks_each = -(-context // block_tokens)
    blocks = _SEQUENCES * blocks_each if kv_tokens is None else max(blocks_each, -(-kv_tokens // block_tokens))
    drafts = 0
    if own is not None:
        drafts = own.weight_bytes + blocks * _block_bytes(own.folder.spec, kv, block_tokens)
        drafts += latent_scratch(own.folder.spec, rows)
    return MemoryNeed(
        precision=plan.name,
        weights=packed_size(spec, folder.shapes, plan),
        kv_token=_block_bytes(spec, kv, block_tokens) // block_tokens,
        kv_tokens=blocks * block_tokens,
        states=4 * spec.state_floats * state_slots(spec),
        drafts=drafts,
        scratch=latent_scratch(spec, rows),
    )


def _block_bytes(spec: ModelSpec, kv: KvType, block_tokens: int) -> int:
    return block_bytes(spec.kv_shapes, kv, block_tokens, values_in_keys=spec.values_in_keys)


def state_slots(spec: ModelSpec) -> int:
    """Return how many recurrent states the executor holds: of running sequences and of prefixes to reuse."""
    if not spec.state_floats:
        return 0
    return max(_LEAST_STATES, min(_MOST_STATES, _STATE_BYTES // (4 * spec.state_floats)))


def _check_sizes(spec: ModelSpec, threads: int, context: int) -> None:
    if not 1 <= threads <= 512:
        raise RequestError(f"'threads' must be 1 to 512, not {threads}.", parameter="threads")
    if not 1 <= context <= spec.context:
        raise RequestError(
            f"'context' must be 1 to {spec.context} tokens for this model, not {context}.", parameter="context"
        )


ARITHMETICS: Final = ("native", "portable")


def choose_isa(named: str | None, arithmetic: str | None = None) -> str:
    """Return the instruction set to use: the named one, else HEADRACE_ISA, else the best of this machine.

    `arithmetic` "portable" limits the choice to instruction sets that give the same bits on every machine; None means
    HEADRACE_ARITHMETIC, which is "native" by default.
    """
    place = "HEADRACE_ARITHMETIC" if arithmetic is None else "arithmetic"
    wanted = (os.environ.get("HEADRACE_ARITHMETIC") or "native") if arithmetic is None else arithmetic
    if wanted not in ARITHMETICS:
        raise RequestError(f"Unknown arithmetic '{wanted}'. Expected: {', '.join(ARITHMETICS)}.", parameter=place)
    if named is None:
        try:
            return _core.isa_default(wanted)
        except ValueError as error:
            raise RequestError(str(error), parameter="HEADRACE_ISA") from None
    known = _core.isa_available()
    if named not in (*known, *_core.isa_emulated()):
        raise RequestError(
            f"Instruction set '{named}' is not available on this machine. Available: {', '.join(known)}.",
            parameter="isa",
        )
    if wanted == "portable" and _core.isa_arithmetic(named) != wanted:
        fitting = ", ".join(isa for isa in known if _core.isa_arithmetic(isa) == wanted)
        raise RequestError(
            f"Instruction set '{named}' does not compute the portable arithmetic. Remove 'isa', or set it to one of: "
            f"{fitting}.",
            parameter="isa",
        )
    return named


class LoadReport(msgspec.Struct, frozen=True):
    """How long loading took, and its sizes in bytes."""

    seconds: float
    weight_bytes: int
    mapped: bool  # packed weights were in the cache and only had to be mapped
    scratch_bytes: int


class CpuExecutor:
    def __init__(
        self,
        spec: ModelSpec,
        plan: WeightPlan,
        tensors: LoadedTensors,
        pool: _core.Pool,
        *,
        kv: KvType,
        capacity: Capacity,
        isa: str,
        folder: ModelFolder | None = None,
        adapter_bytes: int = DEFAULT_ADAPTER_BYTES,
        offsets: KeyOffsets | None = None,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.kv_type: KvType = kv
        self.capacity = capacity
        self.threads = pool.threads
        self._pool = pool
        if offsets is not None:
            tensors = msgspec.structs.replace(tensors, tensors={**tensors.tensors, **offsets.tensors()})
        self.offsets_digest = "" if offsets is None else offsets.digest
        self._tensors = tensors
        self._model = _core.Model(describe(spec), tensors.tensors, pool, capacity.max_rows, isa)
        self._kv = BlockKv(
            spec.kv_shapes,
            capacity.blocks,
            kv,
            block_tokens=capacity.block_tokens,
            values_in_keys=spec.values_in_keys,
        )
        self._states = _core.States(capacity.states, spec.state_floats) if spec.state_floats else None
        self._sampler = Sampler(spec.vocab_size, pool, isa)
        self._head = PooledHead(spec, tensors.tensors, isa)
        self._thread = StepThread("headrace-step")
        self._kept = np.empty((0, spec.hidden_size), dtype=np.float32)
        self.adapters: AdapterTable | None = None
        if folder is not None and spec.kind == "decoder":
            format = adapter_format(plan.precision("layers.0.attn.qkv", tied=spec.tied).format)
            self.adapters = AdapterTable(folder, self._model, tensors.tensors, format=format, most_bytes=adapter_bytes)
        self.load_report = LoadReport(0.0, tensors.bytes, tensors.mapped, self._model.scratch_bytes)

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        *,
        weights: str = AUTO,
        group: str | int | None = None,
        keep: Sequence[str] = (),
        kv: str = "bf16",
        threads: int | None = None,
        context: int | None = None,
        kv_tokens: int | None = None,
        kv_block: int = DEFAULT_KV_BLOCK,
        max_rows: int = DEFAULT_MAX_ROWS,
        isa: str | None = None,
        arithmetic: str | None = None,
        cache: Path | None = None,
        adapter_bytes: int = DEFAULT_ADAPTER_BYTES,
        own: OwnModule | None = None,
        offsets: KeyOffsets | None = None,
        images: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> CpuExecutor:
        """Load a model. `context` is the most tokens of one sequence, `kv_tokens` of all together (default: four
        sequences), in blocks of `kv_block` tokens. There must be memory for `own` too, which `predicting` loads, and
        for `images`: the bytes that the model's image part will take beside it. `offsets`: of its keys in KV memory."""
        started = time.perf_counter()
        check_kv_block(kv_block)
        spec = folder.spec
        plan = choose_plan(folder, weights, group=group, keep=keep)
        kv_type = parse_kv_type(kv)
        cores = usable_cores()
        count = cores if threads is None else threads
        length = default_context(spec) if context is None else context
        _check_sizes(spec, count, length)
        if not spec.causal:
            max_rows = max(max_rows, length)  # such a sequence is computed in one piece
        max_rows = max(max_rows, spec.image_span)  # and so is an image whose tokens see each other
        need = _memory_need(folder, plan, kv_type, length, kv_tokens, own, block_tokens=kv_block, rows=max_rows)
        need = msgspec.structs.replace(need, images=images)
        blocks, blocks_each = need.kv_tokens // kv_block, -(-length // kv_block)

        def weights_at(precision: str) -> int:
            return packed_size(spec, folder.shapes, parse_plan(precision, keep=keep, embedder=spec.embeds))

        sequences = None if kv_tokens is not None and blocks > blocks_each else blocks // blocks_each
        check_memory(folder.path.name, need, weights_at, sequence=length, sequences=sequences)
        if need.kv_tokens > MOST_PAGES * PAGE_TOKENS:
            raise RequestError(
                f"'kv_tokens' must be at most {MOST_PAGES * PAGE_TOKENS}, not {kv_tokens}.", parameter="kv_tokens"
            )
        capacity = Capacity(
            blocks=blocks, block_tokens=kv_block, max_rows=max_rows, context=length, states=state_slots(spec)
        )
        chosen = choose_isa(isa, arithmetic)
        pool = _core.Pool(count)
        tensors = load_tensors(folder, plan, pool, cache=cache, progress=progress)
        executor = cls(
            spec,
            plan,
            tensors,
            pool,
            kv=kv_type,
            capacity=capacity,
            isa=chosen,
            folder=folder,
            adapter_bytes=adapter_bytes,
            offsets=offsets,
        )
        report = executor.load_report
        executor.load_report = LoadReport(
            time.perf_counter() - started, report.weight_bytes, report.mapped, report.scratch_bytes
        )
        return executor

    def drafting(
        self,
        folder: ModelFolder,
        skipped: Collection[int],
        *,
        weights: str | None = None,
        cache: Path | None = None,
    ) -> CpuExecutor:
        """Return an executor of this model without some layers, to draft for it. It has its own KV memory and shares
        the weights, unless `weights` names another precision, and the threads: only one of both may step at a time."""
        plan, tensors = self.plan, self._tensors
        if weights is not None:
            plan = choose_plan(folder, weights)
            tensors = load_tensors(folder, plan, self._pool, cache=cache)
        shorter = LoadedTensors(shorter_tensors(self.spec, tensors.tensors, skipped), tensors.bytes, tensors.mapped)
        return self.beside(shorter_spec(self.spec, skipped), shorter, plan=plan)

    def predicting(self, own: OwnModule, *, cache: Path | None = None) -> tuple[CpuExecutor, dict[str, CoreTensor]]:
        """Return an executor of the model's own prediction module, and the tensors before its layer, by JOIN_NAMES. It
        shares the embedding, the head and the threads, as `drafting` does."""
        loaded = load_tensors(own.folder, own.plan, self._pool, cache=cache)
        shared = {name: tensor for name, tensor in self._tensors.tensors.items() if name.split(".")[0] in _ENDS}
        joins = {name: loaded.tensors.pop(name) for name in JOIN_NAMES}
        tensors = LoadedTensors({**shared, **loaded.tensors}, loaded.bytes, loaded.mapped)
        return self.beside(own.folder.spec, tensors, plan=own.plan), joins

    def beside(self, spec: ModelSpec, tensors: LoadedTensors, *, plan: WeightPlan | None = None) -> CpuExecutor:
        """Return an executor of other tensors, with its own KV memory for as many tokens. It shares the threads: only
        one of both may step at a time."""
        return CpuExecutor(
            spec,
            self.plan if plan is None else plan,
            tensors,
            self._pool,
            kv=self.kv_type,
            capacity=self.capacity,
            isa=self.isa,
        )

    @property
    def products(self) -> SharedProducts:
        """The embedding and the head, for what drafts from hidden states."""
        return SharedProducts(self.spec, self._tensors.tensors, self._pool, self.isa)

    @property
    def arithmetic(self) -> str:
        """Return the arithmetic: executors with the same one compute the same bits on every machine."""
        return _core.isa_arithmetic(self.isa)

    @property
    def isa(self) -> str:
        return self._model.isa

    @property
    def kv_bytes_per_token(self) -> float:
        return self._kv.block_bytes / self.capacity.block_tokens

    @functools.cached_property
    def work(self) -> StepWork:
        return step_work(self.spec, self.plan, self.kv_bytes_per_token)

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds that all steps so far spent in each stage of the core. Waits for the step under way."""
        return self._model.stage_seconds()

    def launch(self, batch: StepBatch) -> StepTicket:
        return self._thread.submit(self._step, batch)

    def collect(self, ticket: StepTicket) -> StepResult:
        return cast("StepCall[StepResult]", ticket).result()

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[SampledToken]:
        return self._sampler.choose(logits, rows)

    def lay_out(self, rows: Sequence[SampleRow]) -> CoreSampleBatch:
        return self._sampler.lay_out(rows)

    def choose(self, logits: NDArray[np.float32], rows: AnyRows, peaks: NDArray[np.float32] | None = None) -> list[int]:
        return self._sampler.choose_laid_out(logits, cast("CoreSampleBatch", rows), peaks)

    def after_pooling(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._head.apply(vector)

    def close(self) -> None:
        """Wait for the step under way and end the waiting thread."""
        self._thread.close()
        if self.adapters is not None:
            self.adapters.close()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's KV in every layer, after the steps launched before."""
        self._thread.submit(self._kv.copy, source, target).result()

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    def read_block(self, block: int) -> NDArray[np.uint8]:
        return self._thread.submit(self._kv.read, block).result()

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        self._thread.submit(self._kv.write, block, data).result()

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return copies of the KV of several blocks, after the steps launched before."""
        return self._thread.submit(lambda: [self._kv.read(block) for block in blocks]).result()

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> None:
        """Restore what `read_blocks` returned, before the steps launched after."""

        def write() -> None:
            for block, data in zip(blocks, contents, strict=True):
                self._kv.write(block, data)

        self._thread.submit(write).result()

    def read_keys(self, layer: int, blocks: Sequence[int]) -> NDArray[np.float32]:
        """Return the keys of blocks in a layer of the KV memory, which must be f32: [tokens, KV heads, head size]."""
        return self._thread.submit(self._kv.keys, layer, blocks).result()

    def _adapter(self, ref: AdapterRef) -> _core.Adapter:
        assert self.adapters is not None
        return self.adapters.core(ref)

    def _step(self, batch: StepBatch) -> StepResult:
        for source, target in batch.copies:
            self._kv.copy(source, target)
        if self._states is not None:
            for source, target in batch.state_copies:
                self._states.copy(source, target)
        values = batch.out
        if values is None:
            # Fresh pages cost more than a small step, so callers that step in a loop pass their own array.
            width = self.spec.hidden_size if batch.hidden else self.spec.vocab_size
            count = len(batch.wanted if batch.answered is None else batch.answered)
            values = np.empty((count, width), dtype=np.float32)
        kept_layers = kept = None
        if batch.reads:
            kept_layers = np.unique(np.array(batch.reads, dtype=np.int32))
            kept = self._kept_states(len(kept_layers) * len(batch.tokens))
        self._model.step(
            self._kv.core,
            batch.tokens,
            batch.offsets,
            batch.computed,
            self._kv.page_tables(batch.block_tables, batch.computed, batch.offsets),
            batch.rope_variants,
            batch.wanted,
            values,
            batch.hidden,
            batch.peaks,
            batch.second_texts,
            [self._adapter(ref) for ref in batch.adapters],
            batch.slots,
            self._states,
            batch.state_slots,
            batch.features,
            batch.feature_rows,
            batch.spans,
            batch.places,
            batch.final_states,
            batch.state_trails,
            batch.answered,
            kept,
            kept_layers,
        )
        states = batch.final_states
        if kept is not None and kept_layers is not None and states is not None:
            of_layers = kept.reshape(len(kept_layers), len(batch.tokens), -1)
            places = np.searchsorted(kept_layers, batch.reads)
            states = np.concatenate([*(of_layers[place][batch.wanted] for place in places), states], axis=1)
        return StepResult(values, batch.peaks, states)

    def _kept_states(self, rows: int) -> NDArray[np.float32]:
        if len(self._kept) < rows:
            self._kept = np.empty((rows, self.spec.hidden_size), dtype=np.float32)
        return self._kept[:rows]


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Return a ModelSpec in the core's format."""
    experts = spec.experts
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "inner": spec.intermediate_size,
        "expert_inner": experts.intermediate_size if experts else 0,
        "shared_inner": experts.shared_size if experts else 0,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
        "latent": spec.latent.rank if spec.latent else 0,
        "query_latent": spec.latent.query_rank if spec.latent else 0,
        "turning": spec.latent.turning if spec.latent else 0,
        "keeps_latent": spec.latent.kept if spec.latent else False,
        "value_size": spec.value_size,
        "causal": spec.causal,
        "gated": spec.gated,
        "norm": spec.norm,
        "eps": spec.norm_eps,
        "qk_norm": "head" if spec.qk_norm == "unit" else spec.qk_norm,
        "unit_norms": spec.qk_norm == "unit",
        "growth": spec.query_growth,
        "growth_tokens": spec.growth_tokens,
        "growth_first": spec.growth_first,
        "activation": spec.activation,
        "gate_slope": spec.gate_slope,
        "gate_limit": spec.gate_limit,
        "attention_scale": spec.attention_scale,
        "attention_softcap": spec.attention_softcap,
        "logit_softcap": spec.logit_softcap,
        "embedding_scale": spec.embedding_scale,
        "attention_factor": spec.attention_factor,
        "recurrent_factor": spec.recurrent_factor,
        "mlp_factor": spec.mlp_factor,
        "reach": spec.context if spec.alibi else spec.max_distance,
        "alibi": list(spec.alibi),
        "top_k": experts.top_k if experts else 0,
        "normalise_experts": experts.normalise if experts else False,
        "sigmoid_experts": experts.scoring == "sigmoid" if experts else False,
        "expert_scale": experts.scale if experts else 1.0,
        "expert_margin": experts.margin if experts else 0.0,
        "scales_inputs": experts.scales_inputs if experts else False,
        "expert_groups": experts.groups if experts else 1,
        "top_groups": experts.top_groups if experts else 1,
        "group_best": experts.group_best if experts else 1,
        "parallel": spec.parallel,
        "feature_layers": spec.feature_layers,
        "paired": spec.paired,
        "attention_gate": spec.attention_gate,
        "streams": spec.streams.count if spec.streams else 0,
        "past_rank": spec.streams.rank if spec.streams else 0,
        "layer_input": spec.layer_inputs.size if spec.layer_inputs else 0,
        "recurrent": None if spec.recurrent is None else _describe_recurrent(spec.recurrent),
        "ropes": [
            {
                "inv_freq": list(rope.inv_freq),
                "axes": list(rope.axes),
                "scale": rope.scale,
                "long_inv_freq": list(rope.inv_freq if rope.long_inv_freq is None else rope.long_inv_freq),
                "long_scale": rope.scale if rope.long_inv_freq is None else rope.long_scale,
            }
            for rope in spec.ropes
        ],
        "layers": [
            {
                "attends": layer.attends,
                "recurs": layer.recurs,
                "mlp": layer.mlp,
                "window": layer.window,
                "chunk": layer.chunk,
                "normed": layer.qk_norm,
                "grows": layer.grows,
                "shares": -1 if layer.shares is None else layer.shares,
                "gate_cutoff": layer.gate_cutoff,
                "value_norm": spec.value_norm and layer.shares is None,
                "spans": "only" if layer.spans else "reach" if spec.image_span else "ignore",
                "rope": -1 if layer.rope is None else layer.rope,
                "experts": experts.count if layer.experts and experts else 0,
                "beside": layer.experts and experts is not None and experts.beside,
                "head_size": layer.head_size,
                "kv_heads": layer.kv_heads,
                "inner": layer.inner,
            }
            for layer in spec.layers
        ],
        "tied": spec.tied,
    }


def _describe_recurrent(spec: RecurrentSpec) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "taps": spec.taps,
        "heads": spec.heads,
        "groups": spec.groups,
        "head_size": spec.head_size,
        "state_size": spec.state_size,
        "norm_size": spec.inner // spec.norm_groups if spec.norm_groups else 0,
        "norm_first": spec.norm_first,
        "eps": spec.eps,
        "step_least": spec.step_least,
        "step_most": spec.step_most,
        "in_factors": [
            factor for size, factor in zip(spec.in_parts, spec.in_factors, strict=False) for factor in (factor,) * size
        ],
    }
