"""`headrace evaluate`: measure a model, or a precision of it, on a text.

Maps flags to variants and a text, shows progress and prints the table.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headrace.bench.evaluation.documents import Document, read_prompts, read_text
from headrace.bench.evaluation.evaluation import EvaluationOptions, EvaluationProgress, evaluate_variants
from headrace.bench.evaluation.evaluation_report import EvaluationReport
from headrace.bench.evaluation.evaluation_table import show
from headrace.bench.results.formatting import seconds
from headrace.cli.output_path import check_output_folder
from headrace.errors import RequestError
from headrace.models.formats.atomic_file import new_file
from headrace.variant import DEFAULT_MODEL, Variant

_COLUMNS: Final = 100  # width of a table that is not printed on a terminal
_PLAIN_EVERY: Final = 10.0  # seconds between lines of progress where there is no terminal


def evaluate(
    model: str = DEFAULT_MODEL,
    /,
    *,
    text: Path | None = None,
    prompts: Path | None = None,
    weights: str | None = None,
    keep: Annotated[list[str] | None, Parameter(negative=())] = None,
    kv: str = "bf16",
    kv_offsets: Path | None = None,
    against: str | None = None,
    against_weights: str | None = None,
    against_keep: Annotated[list[str] | None, Parameter(negative=())] = None,
    against_kv: str | None = None,
    precisions: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    speed: bool = True,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    cache: bool = True,
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
) -> None:
    """Measure a model, or a precision of it, on your own text.

    Usage: headrace evaluate mini --text notes.txt --weights int8 --against-weights f32

    Without a reference it prints perplexity, size and speed. With one it also prints the KL divergence per token and
    how often both agree on the most likely token. `--precisions` compares several precisions with the first.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name (see headrace pull).
    text
        Text file to measure on.
    prompts
        JSONL file to measure on. Each line has `prompt`, with or without `completion`, or `messages`, with or without
        `tools`. Of a completion, or an assistant's message at the end, only that part is scored.
    weights
        Precision of the weights: f32, bf16, fp8, int8, int4, int3 or int2; integers may end in -g32, -g64, -g128 or
        -channel. Default: bf16.
    keep
        PATTERN=PRECISION for tensors whose names match, such as "layers.*.attn.o=bf16". Repeatable.
    kv
        Precision of the KV cache: f32, bf16, int8, fp8 or int4.
    kv_offsets
        File of key offsets, as headrace kv-offsets makes it, for --kv int8 and int4. The reference has none.
    against
        Reference: another model with the same tokenizer. Default: the model itself, if another option names a
        reference.
    against_weights
        Precision of the reference's weights. Default: as --weights.
    against_keep
        As --keep, for the reference.
    against_kv
        Precision of the reference's KV cache. Default: as --kv.
    precisions
        Precisions of the weights to compare in one table, such as f32,bf16,int8,int4. The first is the reference.
    window
        Tokens computed together. Default: 512, or the model's context if that is shorter.
    stride
        Tokens that each window scores, its last ones; those before are their context. Default: half of the window. The
        window itself gives disjoint chunks, which is twice as fast.
    tokens
        Score at most this many tokens. Default: all.
    seed
        Seed of the intervals.
    speed
        Measure the speed of prompts and of decode.
    threads
        Threads to compute with. Default: the machine's cores.
    cache
        Keep the packed weights in the cache folder for the next start.
    json
        Write the report to this file as JSON; `-` prints it instead of the table.
    """
    if (text is None) == (prompts is None):
        raise RequestError("Pass a text to measure on: either --text FILE or --prompts FILE.jsonl.", parameter="text")
    check_output_folder(json, "json")
    common = {"threads": threads, "cache": cache}
    offsets = None if kv_offsets is None else str(kv_offsets)
    base = {"kv": kv, "keep": tuple(keep or ()), **common}
    named = (against, against_weights, against_keep, against_kv)
    reference: Variant | None = None
    if precisions is not None:
        if weights is not None or any(each is not None for each in named):
            raise RequestError(
                "--precisions names every precision, the first as the reference. Remove --weights and --against….",
                parameter="precisions",
            )
        first, *others = _names(precisions)
        reference = Variant.of(model, weights=first, **base)
        variants = [Variant.of(model, weights=each, kv_offsets=offsets, **base) for each in others]
    else:
        variants = [Variant.of(model, weights=weights or "bf16", kv_offsets=offsets, **base)]
        if any(each is not None for each in named):
            reference = Variant.of(
                against or model,
                weights=against_weights or weights or "bf16",
                kv=against_kv or kv,
                keep=tuple(against_keep or ()),
                **common,
            )
    documents, source = _documents(text, prompts)
    options = EvaluationOptions(window=window, stride=stride, tokens=tokens, seed=seed, speed=speed)
    with EvaluationBar() as bar:
        report = evaluate_variants(
            documents, variants, source=source, reference=reference, options=options, watch=bar.show
        )
    if json is not None:
        _write(report, json)
    if json is None or str(json) != "-":
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS))


def _documents(text: Path | None, prompts: Path | None) -> tuple[list[Document], str]:
    path = text or prompts
    assert path is not None
    return read_text(path) if text else read_prompts(path), path.name


def _names(precisions: str) -> list[str]:
    found = [each.strip() for each in precisions.split(",") if each.strip()]
    if len(found) < 2:
        raise RequestError(
            f"--precisions needs at least two names, such as f32,int8, not '{precisions}'.", parameter="precisions"
        )
    return found


def _write(report: EvaluationReport, path: Path) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if str(path) == "-":
        print(encoded.decode(), end="")
        return
    with new_file(path) as file:
        file.write(encoded)


class EvaluationBar:
    """A bar with the time left on a terminal, elsewhere a line now and then; both on standard error."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._terminal = self._progress.console.is_terminal
        self._task: TaskID | None = None
        self._begin = self._last = time.monotonic()
        self._first = 0

    def start_from(self, done: int) -> None:
        """Let the time left follow from what is done from now on: `done` was done before."""
        self._begin, self._first = time.monotonic(), done

    def __enter__(self) -> EvaluationBar:
        if self._terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._progress.stop()

    def show(self, state: EvaluationProgress) -> None:
        if not self._terminal:
            self._show_plain(state)
            return
        if self._task is None:
            self._task = self._progress.add_task(state.variant, total=state.total, completed=self._first)
        self._progress.update(self._task, completed=state.done, description=state.variant)

    def _show_plain(self, state: EvaluationProgress) -> None:
        now = time.monotonic()
        done = state.done - self._first
        if done <= 0 or now - self._last < _PLAIN_EVERY:
            return
        self._last = now
        left = (now - self._begin) * (state.total - state.done) / done
        print(f"{state.variant}: {state.done / state.total:.0%}, about {seconds(left)} left", file=sys.stderr)
