"""Describes this machine as a device of the table, from probes; with a model's files also its measured step times."""

from __future__ import annotations

from collections.abc import Sequence

import headrace._core as _core
from headrace.bench.machine import PEAKS, bandwidth, probe_machine
from headrace.bench.planning.devices import Device
from headrace.bench.planning.step_costs import MeasuredCost, StepCost
from headrace.bench.step_measurement import measure_steps
from headrace.engine.executors.default_sizes import default_context, usable_cores
from headrace.engine.process.open_engine import open_variant
from headrace.models.model_folder import ModelFolder
from headrace.variant import Variant

_BUFFER = 256 << 20  # bytes read to measure bandwidth, beyond the caches


def this_machine(*, threads: int | None = None, price: float = 0.0) -> Device:
    """Probe the machine for a few seconds."""
    pool = _core.Pool(threads or usable_cores())
    machine = probe_machine(pool)
    best = {kind: machine.peaks.get(kind, 0.0) / 1e12 for kind in PEAKS}
    rates = {
        "f32": best["fma_f32"],
        "bf16": max(best["fma_f32"], best["dot_bf16"], best["amx_bf16"]),
        "int8": max(best["fma_f32"], best["dot_int8"], best["amx_int8"]),
    }
    return Device(
        title=f"{machine.cpu}, {machine.threads} threads, {machine.isa}",
        kind="cpu",
        memory=machine.memory / 1e9,
        bandwidth=bandwidth(pool, _BUFFER) / 1e9,
        operations=rates,
        price=price,
        priced="--price here=USD",
        source="measured on this machine",
    )


def measured_costs(
    folder: ModelFolder,
    precisions: Sequence[str],
    *,
    kv: str,
    context: int,
    threads: int | None = None,
    cache: bool = True,
) -> dict[str, StepCost]:
    """Load the model at each precision in turn and measure its steps."""
    found: dict[str, StepCost] = {}
    for weights in precisions:
        variant = Variant.of(
            str(folder.path),
            weights=weights,
            kv=kv,
            threads=threads,
            context=min(max(context, 1280), default_context(folder.spec)),
            speculation="none",
            cache=cache,
        )
        opened = open_variant(variant, folder=folder, cuts_texts=False)
        try:
            found[weights] = MeasuredCost(measure_steps(opened).model())
        finally:
            opened.engine.close()
    return found
