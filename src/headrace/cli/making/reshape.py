"""`headrace reshape`: give a model fewer heads, feed-forward neurons or experts, and write it as a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.bench.evaluation.documents import read_documents
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.calibration_text import calibration_sequences
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.compress.compressed_folder import folder_bytes
from headrace.compress.reshaping import LayerReport, Shape, reshape_model
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
    calibrate: Path | None = None,
    calibrate_tokens: int = 8192,
    window: int | None = None,
) -> None:
    """Give a model fewer heads, feed-forward neurons or experts.

    Usage: headrace reshape path/to/model path/to/smaller --neurons 1024 --calibrate prompts.jsonl

    What matters least to your text goes, the same number in every layer, and what stays is fitted to the layer's former
    outputs. Train the result with `headrace adapt --full --distil-from MODEL`, then measure it with `headrace gate`.

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
    calibrate
        Text file, or JSONL file of prompts as `headrace evaluate` reads them. Default: a bundled English text about
        software.
    calibrate_tokens
        Calibrate on at most this many tokens.
    window
        Tokens of a calibration sequence. Default: 512, or the model's context if that is shorter.
    """
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


def _show(reports: list[LayerReport]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("error of what it adds, %", justify="right")
    for each in reports:
        table.add_row(str(each.layer), f"{each.error * 100:.1f}")
    Console(highlight=False, width=None if sys.stdout.isatty() else 100).print(table)
