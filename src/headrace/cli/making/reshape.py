"""`headrace reshape`: write a model with fewer heads, neurons or experts, or a dense one split into experts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.bench.evaluation.documents import read_documents
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.calibration_text import calibration_sequences
from headrace.cli.making.reshape_split import split
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.compress.compressed_folder import folder_bytes
from headrace.compress.recipe import SplitPlan
from headrace.compress.reshape.reshaping import LayerReport, Shape, reshape_model
from headrace.errors import RequestError
from headrace.models.model_folder import find_model, open_model


def reshape(
    model: str,
    out: Path,
    /,
    *,
    kv_heads: int | None = None,
    heads: int | None = None,
    neurons: int | None = None,
    experts: int | None = None,
    expert_neurons: int | None = None,
    split_experts: int | None = None,
    active: int | None = None,
    shared: int | None = None,
    calibrate: Path | None = None,
    calibrate_tokens: int = 8192,
    window: int | None = None,
    measure: Path | None = None,
    measure_tokens: int | None = None,
    quality: bool = True,
    speed: bool = True,
    restart: bool = False,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
) -> None:
    """Give a model fewer heads, feed-forward neurons or experts, or split a dense model into experts.

    Usage: headrace reshape path/to/model path/to/smaller --neurons 1024 --calibrate prompts.jsonl

    What matters least to your text goes, the same number in every layer, and what stays is fitted to the layer's former
    outputs. Train the result with `headrace adapt --full --distil-from MODEL`, then measure it with `headrace gate`.

    --split-experts keeps all neurons, but a token goes through some of them only. The result is measured, and its
    README has the numbers. A command that was killed continues where it was when you repeat it.

    Parameters
    ----------
    model
        Model folder in Hugging Face layout, or bundled model.
    out
        Folder to write. It must not exist.
    kv_heads
        Average key and value heads into this many, which must divide those of the model (multi-head to grouped-query
        attention). The KV cache shrinks with them.
    heads
        Query heads that stay. They go in groups, with the key and value head that they share.
    neurons
        Neurons of each feed-forward layer that stay. A multiple of 32 suits int8 and int4, of 128 best.
    experts
        Experts of each mixture that stay: those that get the largest shares of the tokens.
    expert_neurons
        Neurons of each expert that stay. A multiple of 32 suits int8 and int4, of 128 best.
    split_experts
        Split each dense feed-forward layer into this many routed experts, beside --shared ones, all of the same size.
    active
        Routed experts that a token goes through, with --split-experts.
    shared
        Experts that every token goes through, with --split-experts: the neurons that fire most. Default: 1.
    calibrate
        Text file, or JSONL file of prompts as `headrace evaluate` reads them. Default: a bundled English text about
        software.
    calibrate_tokens
        Calibrate on at most this many tokens.
    window
        Tokens of a calibration sequence. Default: 512, or the model's context if that is shorter.
    measure
        Text or JSONL file to measure the result of --split-experts on. Default: a tenth of the calibration text, which
        is not calibrated on.
    measure_tokens
        Measure on at most this many tokens. Default: 10000.
    quality
        Measure the result of --split-experts against the original.
    speed
        Measure the speed of both too.
    restart
        Begin again, though OUT.partial has layers that --split-experts has finished.
    threads
        Threads to measure the result of --split-experts with. Default: the machine's cores.
    """
    sizes = {"kv_heads": kv_heads, "heads": heads, "neurons": neurons}
    sizes |= {"experts": experts, "expert_neurons": expert_neurons}
    if split_experts is not None:
        _check_alone(sizes)
        if active is None:
            raise RequestError("Pass --active K too: the routed experts that a token goes through.", parameter="active")
        split(
            model,
            out,
            SplitPlan(split_experts, active, 1 if shared is None else shared),
            calibrate=calibrate,
            calibrate_tokens=calibrate_tokens,
            window=window,
            measure=measure,
            measure_tokens=10_000 if measure_tokens is None else measure_tokens,
            quality=quality,
            speed=speed,
            restart=restart,
            threads=threads,
        )
        return
    options = {"active": active, "shared": shared, "measure": measure, "measure-tokens": measure_tokens}
    _check_unused({name: value is not None for name, value in {**options, "threads": threads}.items()})
    _check_unused({"no-quality": not quality, "no-speed": not speed, "restart": restart})
    folder = open_model(find_model(model))
    sequences = calibration_sequences(folder, read_documents(calibrate or BUNDLED_TEXT), window, calibrate_tokens)
    shape = Shape(kv_heads=kv_heads, heads=heads, neurons=neurons, experts=experts, expert_neurons=expert_neurons)
    with EvaluationBar() as bar:
        reports = reshape_model(
            folder, out, sequences, shape, lambda done, total: bar.show(EvaluationProgress("layers", done, total))
        )
    _show(reports)
    print(
        f"{out}: weight files {folder.weights.total_bytes / 1e6:,.1f} MB before, {folder_bytes(out) / 1e6:,.1f} MB "
        f"after. Heal it: headrace adapt {out} --full --distil-from {model} --data FILE --out HEALED"
    )


def _check_alone(sizes: Mapping[str, int | None]) -> None:
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise RequestError(
            f"--split-experts cannot be combined with --{given[0].replace('_', '-')}. Reshape first, and split the "
            "result.",
            parameter=given[0],
        )


def _check_unused(given: Mapping[str, bool]) -> None:
    for name, is_given in given.items():
        if is_given:
            raise RequestError(
                f"--{name} is for --split-experts. Pass --split-experts N too.", parameter=name.removeprefix("no-")
            )


def _show(reports: list[LayerReport]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("error of what it adds, %", justify="right")
    for each in reports:
        table.add_row(str(each.layer), f"{each.error * 100:.1f}")
    Console(highlight=False, width=None if sys.stdout.isatty() else 100).print(table)
