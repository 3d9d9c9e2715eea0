"""`headrace inspect`: describe a model, the memory it needs, and the best speed this machine allows."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

import headrace._core as _core
from headrace.bench.machine import Machine, bandwidth, probe_machine
from headrace.bench.roofline import (
    PREFILL,
    Floor,
    best_peak,
    floor,
    kv_bytes_per_token,
    parameters,
)
from headrace.bench.step_profile import PhaseProfile
from headrace.bench.step_profile import profile as profile_steps
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.default_sizes import usable_cores
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import AUTO, parse_plan
from headrace.models.spec import ModelSpec
from headrace.models.step_work import active_parameters, decode_bytes
from headrace.variant import DEFAULT_MODEL

PRECISIONS = ("f32", "bf16", "int8", "int4", "int3", "int2")


def inspect(
    model: str = DEFAULT_MODEL,
    /,
    *,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    profile: Annotated[bool, Parameter(negative=())] = False,
    precision: str | None = None,
    json: bool = False,
) -> None:
    """Describe a model: its size, the memory it needs, and the best speed this machine allows.

    Usage: headrace inspect mini

    It measures the machine's bandwidth and peak rates for a few seconds. No program can beat the floors: a decoded
    token reads every weight once, and a prefill does every multiplication once.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name (see headrace pull).
    threads
        Threads to measure with. Default: the machine's cores.
    profile
        Load the model and run it, too: where the time of a prefill and of a decode step goes, component by component,
        and what share of it the floor explains.
    precision
        Weights to profile, such as int8. Default: what `headrace serve` would use.
    json
        Print one JSON object instead of the tables.
    """
    folder = open_model(find_model(model))
    spec = folder.spec
    pool = _core.Pool(threads or usable_cores())
    machine = probe_machine(pool)
    floors: list[Floor] = []
    for name in PRECISIONS:
        plan = parse_plan(name, embedder=spec.embeds)
        floors.append(floor(spec, plan, machine, bandwidth(pool, decode_bytes(spec, plan))))
    facts = _facts(spec, machine, floors, str(folder.path))
    if profile:
        facts["profile"] = _profile(folder, pool, machine, threads, precision)
    if json:
        print(msgspec.json.encode(facts).decode())
    else:
        console = Console(soft_wrap=True)
        _show(console, spec, machine, floors, facts)
        for phase in facts.get("profile", {}).get("phases", ()):
            _show_phase(console, phase, facts["profile"]["precision"])


def _profile(
    folder: ModelFolder, pool: _core.Pool, machine: Machine, threads: int | None, precision: str | None
) -> dict[str, Any]:
    executor = CpuExecutor.load(folder, weights=precision or AUTO, threads=threads, max_rows=PREFILL)
    try:
        plan = executor.plan
        rate = bandwidth(pool, decode_bytes(executor.spec, plan))
        phases = profile_steps(executor, bandwidth=rate, peak=best_peak(machine, plan.default))
        return {"precision": plan.default.name, "phases": phases}
    finally:
        executor.close()


def _show_phase(console: Console, phase: PhaseProfile, precision: str) -> None:
    title = f"{phase.phase} of {phase.tokens} token{'s' if phase.tokens > 1 else ''} with {precision}"
    table = Table(title=f"{title}: {phase.ms:,.2f} ms")
    for heading in ("component", "ms", "share", "ms per layer"):
        table.add_column(heading, justify="left" if heading == "component" else "right")
    for each in sorted(phase.components, key=lambda part: -part.ms):
        layer = "" if each.ms_per_layer is None else f"{each.ms_per_layer:.3f}"
        table.add_row(each.component, f"{each.ms:.3f}", f"{100 * each.share:.1f} %", layer)
    console.print(table)
    console.print(
        f"{phase.bytes_per_s / 1e9:.1f} GB/s and {phase.operations_per_s / 1e9:,.0f} Gop/s achieved. The floor is "
        f"{phase.floor_ms:,.2f} ms, by {phase.bound}: {100 * phase.efficiency:.0f} % of the time.\n"
    )


def _facts(spec: ModelSpec, machine: Machine, floors: list[Floor], path: str) -> dict[str, Any]:
    kv = kv_bytes_per_token(spec)
    fits = {
        entry.precision: {kind: max(0, int((machine.memory - entry.weight_bytes) // each)) for kind, each in kv.items()}
        for entry in floors
    }
    return {
        "path": path,
        "architecture": spec.architecture,
        "kind": spec.kind,
        "parameters": parameters(spec),
        "active_parameters": active_parameters(spec),
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
        "kv_shapes": [list(shape) for shape in spec.kv_shapes],
        "vocab_size": spec.vocab_size,
        "context": spec.context,
        "experts": None if spec.experts is None else {"count": spec.experts.count, "top_k": spec.experts.top_k},
        "kv_bytes_per_token": kv,
        "state_bytes": 4 * spec.state_floats,
        "machine": machine,
        "precisions": floors,
        "tokens_that_fit": fits,
    }


def _show(console: Console, spec: ModelSpec, machine: Machine, floors: list[Floor], facts: dict[str, Any]) -> None:
    experts = "" if spec.experts is None else f", {spec.experts.top_k} of {spec.experts.count} experts per token"
    tied = ", embedding and head tied" if spec.tied else ""
    millions = f"{facts['parameters'] / 1e6:,.1f} million parameters"
    console.print(f"[bold]{spec.architecture}[/bold] ({spec.kind}): {millions}{experts}{tied}")
    console.print(
        f"{len(spec.layers)} layers, hidden {spec.hidden_size}, {spec.heads} heads on {spec.kv_heads} KV heads of "
        f"{spec.head_size}, vocabulary {spec.vocab_size:,}, context {spec.context:,}"
    )
    for (heads, key, value), count in Counter(spec.kv_shapes).items():
        if spec.values_in_keys:
            console.print(f"{count} layers keep a latent of {value} dims and {key - value} dims of keys, for all heads")
        elif (heads, key, value) != (spec.kv_heads, spec.head_size, spec.head_size):
            sizes = f"{key}" if key == value else f"{key} for keys and {value} for values"
            console.print(f"{count} layers keep KV in {heads} heads of {sizes}")
    if spec.recurrent is not None:
        count = sum(layer.recurs for layer in spec.layers)
        console.print(f"{count} layers are recurrent: {4 * spec.state_floats / 1e6:,.2f} MB of state for each sequence")
    windows = sorted({layer.window for layer in spec.layers if layer.window})
    if windows:
        count = sum(1 for layer in spec.layers if layer.window)
        console.print(f"{count} layers attend to a window of {', '.join(f'{window:,}' for window in windows)} tokens")
    console.print(
        f"\n[bold]Machine[/bold]: {machine.cpu}, {machine.threads} threads, {machine.isa}, "
        f"{machine.memory / 2**30:.1f} GiB of memory available"
    )
    rates = ", ".join(f"{kind} {rate / 1e9:,.0f}" for kind, rate in machine.peaks.items() if rate)
    console.print(f"Peaks in Gop/s: {rates}\n")

    table = Table(title=f"Weights, and the best speed possible ({PREFILL}-token prefill)")
    for heading in ("precision", "weights", "read per token", "GB/s", "Gop/s", "decode floor", "prefill floor"):
        table.add_column(heading, justify="left" if heading == "precision" else "right")
    for entry in floors:
        table.add_row(
            entry.precision,
            f"{entry.weight_bytes / 1e6:,.1f} MB",
            f"{entry.decode_bytes / 1e6:,.1f} MB",
            f"{entry.bandwidth / 1e9:.1f}",
            f"{entry.peak / 1e9:,.0f}",
            f"{entry.decode_ms:,.2f} ms = {1e3 / entry.decode_ms:,.1f} tok/s",
            f"{entry.prefill_ms:,.1f} ms",
        )
    console.print(table)

    memory = Table(title="KV memory, and the tokens that fit beside the weights")
    memory.add_column("KV type")
    memory.add_column("bytes per token", justify="right")
    for entry in floors:
        memory.add_column(f"with {entry.precision}", justify="right")
    for kind, each in facts["kv_bytes_per_token"].items():
        fits = [f"{facts['tokens_that_fit'][entry.precision][kind]:,}" for entry in floors]
        memory.add_row(kind, f"{each:,.0f}", *fits)
    console.print(memory)
