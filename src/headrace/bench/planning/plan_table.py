"""Prints a capacity plan as tables for the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from headrace.bench.planning.capacity_plan import Candidate, CapacityPlan
from headrace.bench.results.formatting import milliseconds, number, share

MOST_ROWS: Final = 12


def show_plan(plan: CapacityPlan, console: Console, *, every: bool = False) -> None:
    traffic = plan.load.traffic
    active = "" if plan.active_parameters > 0.5 * plan.parameters else f", {plan.active_parameters / 1e9:.1f} active"
    console.print(f"[bold]{plan.model}[/bold]: {plan.parameters / 1e9:.2f} billion parameters{active}")
    peak = f", {plan.load.peak:g} times that at the peak" if plan.load.peak != 1.0 else ""
    console.print(
        f"{plan.load.rate:.3g} requests/s{peak}; {traffic.prompt:,.0f} tokens in ({share(traffic.reused)} reused), "
        f"{traffic.answer:,.0f} out; context {plan.context:,}"
    )
    if traffic.beyond:
        console.print(f"{share(traffic.beyond)} of the requests need more than that context.")
    wanted = ", ".join(f"{name} {milliseconds(value * 1e3)}" for name, value in plan.objectives.items())
    console.print(f"Objectives: {wanted or 'none'}\n")
    rows = plan.candidates if every else plan.candidates[:MOST_ROWS]
    if rows:
        console.print(_candidates(rows, plan.chosen))
        console.print("* changes the model: gate it on your own prompts before it gets traffic.", style="dim")
    if not every and len(plan.candidates) > len(rows):
        console.print(f"{len(plan.candidates) - len(rows)} more with --all.", style="dim")
    if plan.chosen is None:
        console.print("[bold]No lossless candidate meets the objectives.[/bold] What each lacks:")
    if every or plan.chosen is None:
        for each in plan.rejected:
            console.print(f"  {each.device} {each.weights}: {each.why}", highlight=False)
    if plan.chosen is not None:
        console.print()
        _show_chosen(plan, plan.chosen, console)


def _candidates(rows: list[Candidate], chosen: Candidate | None) -> Table:
    table = Table(title="What serves it, cheapest first", title_justify="left")
    table.add_column("device")
    table.add_column("weights")
    for heading in ("devices", "TTFT p95", "ITL p95", "at once", "KV used", "USD/h", "USD/M tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        split = row.tensor * row.pipeline
        table.add_row(
            row.device,
            row.weights if row.lossless else f"{row.weights}*",
            f"{row.replicas}" if split == 1 else f"{row.replicas} x {split}",
            milliseconds(row.expected.latencies["ttft_p95"] * 1e3),
            milliseconds(row.expected.latencies["itl_p95"] * 1e3),
            f"{row.expected.batch:,.1f}",
            share(row.expected.kv_share),
            f"{row.price:,.2f}",
            f"{row.per_million:,.3f}",
            style="bold" if row is chosen else None,
        )
    return table


def _show_chosen(plan: CapacityPlan, chosen: Candidate, console: Console) -> None:
    split = ""
    if chosen.tensor > 1:
        split += f", tensor parallel {chosen.tensor}"
    if chosen.pipeline > 1:
        split += f", pipeline parallel {chosen.pipeline}"
    console.print(
        f"[bold]{chosen.devices} x {chosen.title}[/bold]: {chosen.replicas} "
        f"{'replica' if chosen.replicas == 1 else 'replicas'} of {plan.model} at {chosen.weights}{split}, "
        f"served by {'the own engine' if chosen.engine == 'headrace' else 'vLLM'}"
    )
    memory = chosen.memory
    table = Table(title="Memory of a replica", title_justify="left")
    for heading in ("weights", "activations", "KV memory", "KV tokens that fit", "KV tokens needed", "usable"):
        table.add_column(heading, justify="right")
    table.add_row(
        _gigabytes(memory.weights),
        _gigabytes(memory.activations),
        _gigabytes(memory.kv),
        f"{memory.kv_tokens:,.0f}",
        f"{memory.needed:,.0f}",
        _gigabytes(memory.usable),
    )
    console.print(table)
    expected = chosen.expected.latencies
    times = ", ".join(
        f"{name.replace('_', ' ')} {milliseconds(expected[name] * 1e3)}"
        for name in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "e2el_p50")
    )
    console.print(f"Expected: {times}")
    if chosen.step:
        total = sum(chosen.step.values())
        parts = ", ".join(f"{name} {share(each / total)}" for name, each in chosen.step.items() if each)
        console.print(f"A decode step: {milliseconds(total * 1e3)}: {parts}")
    console.print(
        f"Goodput: {plan.load.rate * plan.load.peak:.3g} requests/s at the peak; within the objectives up to "
        f"{chosen.capacity:.3g}"
    )
    console.print(
        f"Cost: {chosen.per_million:,.3f} USD per million tokens at the mean load, "
        f"{chosen.per_million_full:,.3f} if full"
    )
    if plan.breaks is not None:
        console.print(f"Breaks first, at {plan.breaks.times:.2f} times the peak: {plan.breaks.what}")
    hosted = plan.hosted
    if hosted is not None:
        cheaper = "own devices" if hosted.own_per_month < hosted.per_month else "a hosted API"
        console.print(
            f"Hosted API at {hosted.input_price:g} / {hosted.output_price:g} USD per million tokens in / out: "
            f"{number(hosted.per_month)} USD a month; own devices {number(hosted.own_per_month)}. Cheaper: {cheaper}. "
            f"Equal at {hosted.break_even:.3g} requests/s."
        )
    for line in plan.advice:
        console.print(line)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
