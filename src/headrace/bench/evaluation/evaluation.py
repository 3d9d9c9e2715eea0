"""Evaluates variants on documents: loads at most two at a time, scores the text, measures size and speed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from headrace.bench.evaluation.documents import Document, DocumentTokens, Window, cut, tokenise
from headrace.bench.evaluation.evaluation_report import EvaluatedVariant, EvaluationReport, distance, mean
from headrace.bench.evaluation.token_scores import DECODED, Doubles, Speed, TokenScores, measure_speed, score
from headrace.bench.machine import cpu_name
from headrace.engine.executors.cpu_executor import CpuExecutor, check_options
from headrace.errors import RequestError
from headrace.models.key_offsets import offsets_of
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.weight_cache import cache_folder
from headrace.variant import Variant

LEAST_WINDOW: Final = 16
DEFAULT_WINDOW: Final = 512


class EvaluationOptions(msgspec.Struct, frozen=True, kw_only=True):
    window: int | None = None  # tokens computed together; None: 512, or the models' context
    stride: int | None = None  # tokens that a window scores; None: half of the window
    tokens: int | None = None  # to score at most; None: all
    seed: int = 0  # of the bootstrap
    speed: bool = True  # measure prompt and decode speed


class EvaluationProgress(NamedTuple):
    variant: str
    done: int  # tokens computed, over all variants
    total: int


Watch = Callable[[EvaluationProgress], None]


class _Plan(msgspec.Struct, frozen=True):
    documents: list[DocumentTokens]
    windows: list[Window]
    window: int
    stride: int

    @property
    def work(self) -> int:
        return sum(len(window.tokens) for window in self.windows)

    def prompt(self, context: int) -> list[int]:
        """Return the prompt whose speed is measured: the longest window, cut so that the answer fits the context."""
        longest = max(self.windows, key=lambda window: len(window.tokens))
        return longest.tokens[: max(1, context - DECODED)]


class _Scored(NamedTuple):
    variant: EvaluatedVariant
    reference: EvaluatedVariant | None
    isa: str
    threads: int


def evaluate_variants(
    documents: Sequence[Document],
    variants: Sequence[Variant],
    *,
    source: str,
    reference: Variant | None = None,
    options: EvaluationOptions | None = None,
    watch: Watch = lambda _: None,
) -> EvaluationReport:
    """Measure variants, each beside the reference if there is one. Only one and the reference are in memory at once."""
    chosen = EvaluationOptions() if options is None else options
    every = [*variants] if reference is None else [reference, *variants]
    folders = {variant.model: _open(variant.model) for variant in every}
    for variant in every:
        check_options(folders[variant.model], variant)
    first = folders[every[0].model]
    plan = _plan(documents, list(folders.values()), chosen)
    total = plan.work * len(variants)
    with contextlib.ExitStack() as stack:
        beside = None
        if reference is not None:
            beside = stack.enter_context(_loaded(folders[reference.model], reference, plan))
        found: list[_Scored] = []
        for number, variant in enumerate(variants):

            def progress(done: int, name: str = _name(variant), before: int = number * plan.work) -> None:
                watch(EvaluationProgress(name, before + done, total))

            progress(0)
            with _loaded(folders[variant.model], variant, plan) as executor:
                scores = score(executor, plan.windows, reference=beside, progress=progress)
                found.append(_scored(executor, variant, beside, reference, scores, plan, chosen))
    rows = [each.variant for each in found]
    if found[0].reference is not None:
        rows.insert(0, found[0].reference)
    return EvaluationReport(
        source=source,
        tokens=sum(window.scored for window in plan.windows),
        chunks=len({window.chunk for window in plan.windows}),
        window=plan.window,
        stride=plan.stride,
        seed=chosen.seed,
        cpu=cpu_name(),
        isa=found[0].isa,
        threads=found[0].threads,
        speed_prompt=len(plan.prompt(_context(plan, first))) if chosen.speed else None,
        variants=rows,
    )


def _open(model: str) -> ModelFolder:
    folder = open_model(find_model(model))
    if folder.spec.kind != "decoder":
        raise RequestError(
            f"{folder.spec.architecture} is an encoder: it predicts no text. Evaluate a decoder.", parameter="model"
        )
    return folder


def _name(variant: Variant) -> str:
    return f"{Path(variant.model).name} {variant.weights}"


def _plan(documents: Sequence[Document], folders: Sequence[ModelFolder], options: EvaluationOptions) -> _Plan:
    window, stride = _sizes(folders, options)
    if options.tokens is not None and options.tokens < 1:
        raise RequestError(f"'tokens' must be at least 1, not {options.tokens}.", parameter="tokens")
    first = folders[0]
    tokens = [tokenise(document, first.tokenizer) for document in documents]
    for other in folders[1:]:
        _check_same_tokenizer(first, other, documents, tokens)
    _check_vocabulary(folders, tokens)
    windows = cut(tokens, window=window, stride=stride, most=options.tokens)
    if not windows:
        raise RequestError("The text is too short: it has no token that another precedes.", parameter="text")
    return _Plan(tokens, windows, window, stride)


def _sizes(folders: Sequence[ModelFolder], options: EvaluationOptions) -> tuple[int, int]:
    context = min(folder.spec.context for folder in folders)
    window = min(DEFAULT_WINDOW, context) if options.window is None else options.window
    if not LEAST_WINDOW <= window <= context:
        raise RequestError(
            f"'window' must be {LEAST_WINDOW} to {context} tokens, the models' context, not {window}.",
            parameter="window",
        )
    stride = window // 2 if options.stride is None else options.stride
    if not 1 <= stride <= window:
        raise RequestError(f"'stride' must be 1 to {window}, the window, not {stride}.", parameter="stride")
    return window, stride


def _check_same_tokenizer(
    one: ModelFolder, other: ModelFolder, documents: Sequence[Document], tokens: Sequence[DocumentTokens]
) -> None:
    why = one.tokenizer.difference(other.tokenizer)
    if why is None and any(
        # Chats are rendered by the first model's template, so only texts need the same tokens.
        document.messages is None and tokenise(document, other.tokenizer) != expected
        for document, expected in zip(documents, tokens, strict=True)
    ):
        why = "they cut the text into different tokens"
    if why is not None:
        raise RequestError(
            f"{one.path.name} and {other.path.name} have different tokenizers: {why}. Models are compared token by "
            "token, so both need the same tokenizer. Evaluate each alone, or choose another reference.",
            parameter="against",
        )


def _check_vocabulary(folders: Sequence[ModelFolder], tokens: Sequence[DocumentTokens]) -> None:
    largest = max((max((*text.prefix, *text.body), default=0) for text in tokens), default=0)
    for folder in folders:
        if largest >= folder.spec.vocab_size:
            raise RequestError(
                f"The text has token {largest}, and {folder.path.name} has only {folder.spec.vocab_size} tokens.",
                parameter="model",
            )


def _context(plan: _Plan, folder: ModelFolder) -> int:
    return min(plan.window + DECODED, folder.spec.context)


@contextlib.contextmanager
def _loaded(folder: ModelFolder, variant: Variant, plan: _Plan) -> Generator[CpuExecutor]:
    context = _context(plan, folder)
    executor = CpuExecutor.load(
        folder,
        weights=variant.weights,
        group=variant.group,
        keep=variant.keep,
        kv=variant.kv,
        threads=variant.threads,
        context=context,
        kv_tokens=context,
        isa=variant.isa,
        arithmetic=variant.arithmetic,
        cache=cache_folder() if variant.cache else None,
        offsets=offsets_of(folder.spec, variant),
    )
    try:
        yield executor
    finally:
        executor.close()


def _scored(
    executor: CpuExecutor,
    variant: Variant,
    beside: CpuExecutor | None,
    reference: Variant | None,
    scores: TokenScores,
    plan: _Plan,
    options: EvaluationOptions,
) -> _Scored:
    executors = [executor] if beside is None else [executor, beside]
    context = min(each.capacity.context for each in executors)
    speeds: list[Speed | None] = [None] * len(executors)
    if options.speed:
        speeds = [*measure_speed(executors, plan.prompt(context))]
    row = _row(executor, variant, scores.loss, scores, speeds[0], options.seed)
    row = msgspec.structs.replace(row, distance=distance(scores, options.seed))
    other = None
    if beside is not None and reference is not None and scores.reference_loss is not None:
        other = _row(beside, reference, scores.reference_loss, scores, speeds[1], options.seed)
    return _Scored(row, other, executor.isa, executor.threads)


def _row(
    executor: CpuExecutor, variant: Variant, loss: Doubles, scores: TokenScores, speed: Speed | None, seed: int
) -> EvaluatedVariant:
    return EvaluatedVariant(
        model=variant.model,
        weights=executor.plan.name,
        kv=executor.kv_type,
        kv_offsets=variant.offsets_file,
        keep=variant.keep,
        weight_bytes=executor.load_report.weight_bytes,
        kv_bytes_per_token=executor.kv_bytes_per_token,
        loss=mean(loss, scores, seed),
        perplexity=mean(loss, scores, seed, np.exp),
        speed=speed,
    )
