"""The CPU executor: the core runs each step in one call on its own threads, without the GIL.

Owns the core's model, its KV memory and the thread that waits for it. Does not know requests or scheduling.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.executor import Capacity, StepBatch, StepResult, StepTicket
from headrace.engine.executors.executor import SampleBatch as AnyRows
from headrace.engine.executors.sampler import CoreSampleBatch, Sampler
from headrace.engine.executors.step_thread import StepCall, StepThread
from headrace.engine.interface.sampling import SampledToken, SampleRow
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import LoadedTensors, load_tensors
from headrace.models.precision import KvType, WeightPlan, parse_kv_type, parse_plan
from headrace.models.spec import ModelSpec

DEFAULT_CONTEXT: Final = 8192  # tokens of one sequence, if the model allows that many
DEFAULT_MAX_ROWS: Final = 512


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_context(spec: ModelSpec) -> int:
    """Return the default context: tokens of one sequence."""
    return min(spec.context, DEFAULT_CONTEXT)


def choose_isa(named: str | None) -> str:
    """Return the instruction set to use: the named one, else HEADRACE_ISA, else the best of this machine."""
    if named is None:
        try:
            return _core.isa_default()
        except ValueError as error:
            raise RequestError(str(error), parameter="HEADRACE_ISA") from None
    known = _core.isa_available()
    if named not in (*known, *_core.isa_emulated()):
        raise RequestError(
            f"Instruction set '{named}' is not available on this machine. Available: {', '.join(known)}.",
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
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.kv_type: KvType = kv
        self.capacity = capacity
        self.threads = pool.threads
        self._model = _core.Model(describe(spec), tensors.tensors, pool, capacity.max_rows, isa)
        self._kv = _core.Kv(len(spec.layers), spec.kv_heads, spec.head_size, capacity.blocks, kv)
        self._sampler = Sampler(spec.vocab_size, pool, isa)
        self._thread = StepThread("headrace-step")
        self.load_report = LoadReport(0.0, tensors.bytes, tensors.mapped, self._model.scratch_bytes)

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        *,
        weights: str = "bf16",
        group: str | int | None = None,
        keep: Sequence[str] = (),
        kv: str = "bf16",
        threads: int | None = None,
        context: int | None = None,
        kv_tokens: int | None = None,
        max_rows: int = DEFAULT_MAX_ROWS,
        isa: str | None = None,
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> CpuExecutor:
        """Load a model. `context` is the most tokens of one sequence, `kv_tokens` of all together (default: four
        sequences)."""
        started = time.perf_counter()
        plan = parse_plan(weights, group=group, keep=keep)
        kv_type = parse_kv_type(kv)
        spec = folder.spec
        cores = usable_cores()
        count = cores if threads is None else threads
        if not 1 <= count <= 512:
            raise RequestError(f"'threads' must be 1 to 512, not {count}.", parameter="threads")
        length = default_context(spec) if context is None else context
        if not 1 <= length <= spec.context:
            raise RequestError(
                f"'context' must be 1 to {spec.context} tokens for this model, not {length}.", parameter="context"
            )
        if spec.kind == "encoder":
            max_rows = max(max_rows, length)  # an encoder computes a sequence in one piece
        blocks_each = -(-length // _core.BLOCK)
        blocks = 4 * blocks_each if kv_tokens is None else max(blocks_each, -(-kv_tokens // _core.BLOCK))
        capacity = Capacity(blocks=blocks, block_tokens=_core.BLOCK, max_rows=max_rows, context=length)
        chosen = choose_isa(isa)
        pool = _core.Pool(count)
        tensors = load_tensors(folder, plan, pool, cache=cache, progress=progress)
        executor = cls(spec, plan, tensors, pool, kv=kv_type, capacity=capacity, isa=chosen)
        report = executor.load_report
        executor.load_report = LoadReport(
            time.perf_counter() - started, report.weight_bytes, report.mapped, report.scratch_bytes
        )
        return executor

    @property
    def isa(self) -> str:
        return self._model.isa

    @property
    def kv_bytes_per_token(self) -> float:
        return self._kv.bytes_per_block / _core.BLOCK

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

    def close(self) -> None:
        """Wait for the step under way and end the waiting thread."""
        self._thread.close()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's KV in every layer, after the steps launched before."""
        self._thread.submit(self._kv.copy_block, source, target).result()

    @property
    def block_bytes(self) -> int:
        return self._kv.bytes_per_block

    def read_block(self, block: int) -> NDArray[np.uint8]:
        data = np.empty(self._kv.bytes_per_block, dtype=np.uint8)
        self._thread.submit(self._kv.read_block, block, data).result()
        return data

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        self._thread.submit(self._kv.write_block, block, data).result()

    def _step(self, batch: StepBatch) -> StepResult:
        for source, target in batch.copies:
            self._kv.copy_block(source, target)
        values = batch.out
        if values is None:
            # Fresh pages cost more than a small step, so callers that step in a loop pass their own array.
            width = self.spec.hidden_size if batch.hidden else self.spec.vocab_size
            values = np.empty((len(batch.wanted), width), dtype=np.float32)
        self._model.step(
            self._kv,
            batch.tokens,
            batch.offsets,
            batch.computed,
            batch.block_tables,
            batch.rope_variants,
            batch.wanted,
            values,
            batch.hidden,
            batch.peaks,
        )
        return StepResult(values, batch.peaks)


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Return a ModelSpec in the core's format."""
    experts = spec.experts
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "inner": spec.intermediate_size,
        "expert_inner": experts.intermediate_size if experts else 0,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
        "causal": spec.causal,
        "gated": spec.gated,
        "norm": spec.norm,
        "eps": spec.norm_eps,
        "qk_norm": spec.qk_norm,
        "activation": spec.activation,
        "attention_scale": spec.attention_scale,
        "attention_softcap": spec.attention_softcap,
        "logit_softcap": spec.logit_softcap,
        "embedding_scale": spec.embedding_scale,
        "top_k": experts.top_k if experts else 0,
        "normalise_experts": experts.normalise if experts else False,
        "ropes": [
            {
                "inv_freq": list(rope.inv_freq),
                "scale": rope.scale,
                "long_inv_freq": list(rope.inv_freq if rope.long_inv_freq is None else rope.long_inv_freq),
                "long_scale": rope.scale if rope.long_inv_freq is None else rope.long_scale,
            }
            for rope in spec.ropes
        ],
        "layers": [
            {
                "window": layer.window,
                "rope": -1 if layer.rope is None else layer.rope,
                "experts": experts.count if layer.experts and experts else 0,
            }
            for layer in spec.layers
        ],
        "tied": spec.tied,
    }
