"""Says what bounds a setting: where the time of a request goes, and how near prefill and decode are to the floors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from headrace.bench.engine_runs import EngineJob
from headrace.bench.machine import Machine
from headrace.bench.roofline import PREFILL, Floor, floor
from headrace.bench.step_measurement import StepMeasurement, measure_steps
from headrace.bench.tuning.search import Setting
from headrace.engine.process.open_engine import open_variant
from headrace.models.model_folder import ModelFolder
from headrace.models.precision import parse_plan
from headrace.models.text.tokenizer import Tokenizer
from headrace.variant import Variant

Bound = Literal["compute", "bandwidth", "KV memory", "queueing", "host", "tokeniser"]
ADVICE: Final[dict[Bound, str]] = {
    "compute": "prompts are bound by operations: reuse prefixes, use integer weights, or shorten prompts",
    "bandwidth": "decode is bound by reading weights and KV: batch, speculate, or use smaller weights and KV",
    "KV memory": "sequences are preempted for lack of it: use a smaller KV type, a shorter context or more memory",
    "queueing": "requests wait for others: batch more of them, add replicas, or limit what comes in",
    "host": "steps wait for Python between two launches: larger batches share that time, a larger model hides it",
    "tokeniser": "tokenising takes longer than computing: shorten prompts, or use more front processes",
}


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request, on average, by what takes them."""

    bound: Bound
    advice: str
    seconds: dict[str, float]
    prefill_share: float  # of the floor's speed that prefill reaches
    decode_share: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_batch_tokens_per_s: float
    batch: int
    prefill_floor: float  # tokens per second
    decode_floor: float
    host_share: float


def find_bottleneck(
    folder: ModelFolder,
    variant: Variant,
    setting: Setting,
    machine: Machine,
    bytes_per_second: float,
    jobs: list[EngineJob],
    figures: Mapping[str, float],
    *,
    reused: float,
) -> Bottleneck:
    """Measure the variant's steps, compare them with the floors, and name what takes most of a request's time."""
    opened = open_variant(
        msgspec.structs.replace(variant, speculation="none", draft_model=None, draft_heads=None, skip_layers=()),
        folder=folder,
    )
    try:
        steps = measure_steps(opened)
        tokeniser = _tokenising(opened.tokenizer, jobs)
    finally:
        opened.engine.close()
    plan = parse_plan(variant.weights, keep=variant.keep, embedder=folder.spec.embeds)
    least = floor(folder.spec, plan, machine, bytes_per_second)
    return judge(steps, least, jobs, figures, tokeniser=tokeniser, reused=reused if setting["prefix_cache"] else 0.0)


def judge(
    steps: StepMeasurement,
    least: Floor,
    jobs: list[EngineJob],
    figures: Mapping[str, float],
    *,
    tokeniser: float,
    reused: float,
) -> Bottleneck:
    count = max(1, len(jobs))
    prompt = sum(len(job.prompt) for job in jobs) / count
    answer = sum(job.answer for job in jobs) / count
    prefill = prompt * (1.0 - reused) / steps.prefill
    gap = figures.get("itl_p50", 1.0 / steps.decode)
    decode = answer * gap
    host = steps.host_share * decode
    seconds = {
        "tokeniser": tokeniser,
        "queueing": max(0.0, figures.get("ttft_p50", prefill) - prefill),
        "compute": prefill,
        "bandwidth": decode - host,
        "host": host,
    }
    bound: Bound = max(seconds, key=seconds.__getitem__)  # pyright: ignore[reportAssignmentType]
    if figures.get("preempted", 0.0) > 0.1 * count:
        bound = "KV memory"
    prefill_floor, decode_floor = 1e3 * PREFILL / least.prefill_ms, 1e3 / least.decode_ms
    return Bottleneck(
        bound=bound,
        advice=ADVICE[bound],
        seconds=seconds,
        prefill_share=steps.prefill / prefill_floor,
        decode_share=steps.decode / decode_floor,
        prefill_tokens_per_s=steps.prefill,
        decode_tokens_per_s=steps.decode,
        decode_batch_tokens_per_s=steps.decode_batch,
        batch=steps.batch,
        prefill_floor=prefill_floor,
        decode_floor=decode_floor,
        host_share=steps.host_share,
    )


def _tokenising(tokenizer: Tokenizer, jobs: list[EngineJob]) -> float:
    """Return the seconds to tokenise a prompt."""
    texts = [tokenizer.decode(list(job.prompt)) for job in jobs[:16]]
    began = time.perf_counter()
    for text in texts:
        tokenizer.encode(text)
    return (time.perf_counter() - began) / max(1, len(texts))
