"""`headrace inspect`: describe a model, the memory it needs, and the best speed this machine allows."""

from __future__ import annotations

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
    active_parameters,
    decode_bytes,
    floor,
    kv_bytes_per_token,
    parameters,
)
from headrace.engine.executors.cpu_executor import usable_cores
from headrace.models.model_folder import find_model, open_model
from headrace.models.precision import parse_plan
from headrace.models.spec import ModelSpec
from headrace.variant import DEFAULT_MODEL

PRECISIONS = ("f32", "bf16", "int8", "int4")


def inspect(
    model: str = DEFAULT_MODEL,
    /,
    *,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
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
    json
        Print one JSON object instead of the tables.
    """
    folder = open_model(find_model(model))
    spec = folder.spec
    pool = _core.Pool(threads or usable_cores())
    machine = probe_machine(pool)
    floors: list[Floor] = []
    for precision in PRECISIONS:
        plan = parse_plan(precision, embedder=spec.embeds)
        floors.append(floor(spec, plan, machine, bandwidth(pool, decode_bytes(spec, plan))))
    facts = _facts(spec, machine, floors, str(folder.path))
    if json:
        print(msgspec.json.encode(facts).decode())
    else:
        _show(Console(soft_wrap=True), spec, machine, floors, facts)


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
        "vocab_size": spec.vocab_size,
        "context": spec.context,
        "experts": None if spec.experts is None else {"count": spec.experts.count, "top_k": spec.experts.top_k},
        "kv_bytes_per_token": kv,
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
