"""`headrace reshape --split-experts`: split a dense model into experts, measure what that costs, and write a card."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from headrace.bench.evaluation.documents import read_documents
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.calibration_memory import check_memory
from headrace.cli.making.calibration_text import calibration_sequences, split_documents
from headrace.cli.making.made_model import measure_made, table_console
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.compress.compressed_folder import folder_bytes
from headrace.compress.model_card import write_split_card
from headrace.compress.recipe import SplitPlan
from headrace.compress.reshape.splitting import memory_to_split, split_model
from headrace.compress.work_folder import SplitReport
from headrace.models.model_folder import find_model, open_model


def split(
    model: str,
    out: Path,
    plan: SplitPlan,
    *,
    calibrate: Path | None,
    calibrate_tokens: int,
    window: int | None,
    measure: Path | None,
    measure_tokens: int,
    quality: bool,
    speed: bool,
    restart: bool,
    threads: int | None,
) -> None:
    folder = open_model(find_model(model))
    documents = read_documents(calibrate or BUNDLED_TEXT)
    if measure is None:
        documents, held_out = split_documents(documents)
    else:
        held_out = read_documents(measure)
    sequences = calibration_sequences(folder, documents, window, calibrate_tokens)
    check_memory(
        f"Splitting {folder.path.name}",
        sequences,
        lambda tokens, longest: memory_to_split(folder.spec, tokens, longest, plan),
    )
    name = "the bundled text" if calibrate is None else calibrate.name
    with EvaluationBar() as bar:
        made = split_model(
            folder,
            out,
            sequences,
            plan,
            restart=restart,
            watch=lambda done, total: bar.show(EvaluationProgress("layers", done, total)),
        )
    if made.resumed:
        print(f"Continued after layer {made.resumed}.", file=sys.stderr)
    _show(made.reports)
    table = ""
    if quality:
        where = measure.name if measure else f"a tenth of {name}"
        table = measure_made(model, made.folder, held_out, where, speed=speed, tokens=measure_tokens, threads=threads)
    counted = sum(len(sequence) for sequence in sequences)
    write_split_card(
        made.folder, folder, plan, made.reports, calibration=f"{counted:,} tokens of {name}", quality=table
    )
    size = folder_bytes(made.folder)
    made.publish(out)
    print(
        f"{out}: {plan.shared} shared and {plan.routed} routed experts in each layer, of which a token goes through "
        f"{plan.shared} and {plan.active}: {plan.active_share:.0%} of the neurons. Weight files "
        f"{folder.weights.total_bytes / 1e6:,.1f} MB before, {size / 1e6:,.1f} MB after. "
        f"Heal it: headrace adapt {out} --full --distil-from {model} --data FILE --out HEALED"
    )


def _show(reports: Sequence[SplitReport]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("layer", "routed outputs, %", "of them kept, %", "best choice, %", "error of what it adds, %"):
        table.add_column(heading, justify="right")
    for each in reports:
        shares = (each.routed_size, each.kept, each.best, each.error)
        table.add_row(str(each.layer), *(f"{share * 100:.1f}" for share in shares))
    table_console().print(table)
