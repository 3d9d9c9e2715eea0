"""`headrace adapt`: train an adapter or a model on your own examples, and measure it against its base.

Maps flags to a recipe, reads the examples, shows progress, and runs the gate at the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter
from rich.console import Console

from headrace.adapt.head_recipe import HeadRecipe
from headrace.adapt.modules import parse_targets
from headrace.adapt.recipe import AdaptRecipe, BaseFormat, RoundedFormat, prepare_torch
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.adapt_card import score_table, write_card
from headrace.cli.making.adapt_data import AdaptData
from headrace.cli.making.adapt_heads import HeadKind, train_heads
from headrace.cli.making.adapt_teacher import Distil, Teacher
from headrace.engine.executors.default_sizes import usable_cores
from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec
from headrace.lab.cases.case import Case
from headrace.lab.gate.task_scores import VariantScores, ask_all, compare_scores, score_answers
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.variant import Variant

if TYPE_CHECKING:
    from headrace.adapt.adaptation import AdaptedModel

_MOST_LENGTH: Final = 1024


def adapt(
    model: str,
    /,
    *,
    data: Path | None = None,
    out: Path,
    held_out: Path | None = None,
    plain: Annotated[bool, Parameter(negative=())] = False,
    full: Annotated[bool, Parameter(negative=())] = False,
    merge: Path | None = None,
    rank: int = 16,
    alpha: float | None = None,
    targets: str = "all",
    base: BaseFormat = "f32",
    qat: RoundedFormat = "none",
    epochs: int | None = None,
    batch: int = 16,
    rate: float | None = None,
    decay: float = 0.0,
    max_length: int | None = None,
    patience: int = 2,
    seed: int = 0,
    distil_from: str | None = None,
    distil: Distil = "auto",
    teacher_share: float = 0.5,
    key_env: str | None = None,
    gate: bool = True,
    gate_prompts: int = 100,
    restart: Annotated[bool, Parameter(negative=())] = False,
    heads: HeadKind | None = None,
    drafts: int = 4,
    vocabulary: int = 8192,
    answer_tokens: int = 128,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
) -> None:
    """Train an adapter for a model, or the model itself, on your own examples.

    Usage: headrace adapt mini --data examples.jsonl --out my-adapter

    Needs PyTorch: pip install 'headrace[train]'. Writes a LoRA adapter in PEFT's layout, or a model folder with --full,
    with the recipe and the measured loss in its README. A command that was killed continues where it was when you
    repeat it. At the end, base and result answer held-out prompts; the exit code is 1 if the result is worse.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft) or hub id (owner/name).
    data
        JSONL file. Each line has `messages` that end with the assistant's answer, or `prompt` and `completion`. A text
        file (.txt, .md) is learnt as a whole.
    out
        Folder to write. It must not exist.
    held_out
        File like `data` to evaluate on. Default: a tenth of the examples, which is not trained on.
    plain
        Continue prompts as plain text, without the chat template.
    full
        Train all weights and write a model folder, not an adapter.
    merge
        Also write the model with the adapter merged into this folder.
    rank
        Rank of the adapter.
    alpha
        The adapter's product is scaled by alpha / rank. Default: twice the rank.
    targets
        Modules that get an adapter: all, attention, mlp, or names separated by commas, such as q_proj,v_proj.
    base
        Precision of the frozen weights: f32, or int8, int4, int3 or int2 (QLoRA), which take less memory.
    qat
        Round the weights to int8, int4, int3 or int2 in every step, as the engine does when it serves them
        (quantisation-aware training). Needs --full or --merge.
    epochs
        Passes over the examples, at most. Default: 3; 10 with --heads.
    batch
        Examples of one step.
    rate
        Peak learning rate. Default: 0.001; 0.0001 with --full.
    decay
        Weight decay.
    max_length
        Leave out examples with more tokens. Default: 1024, or the model's context if that is shorter.
    patience
        Stop after so many evaluations without a lower held-out loss; 0 never stops early. There are two evaluations in
        each epoch.
    seed
        Seed of the order of examples and of the adapter's first weights.
    distil_from
        Teacher: a model, a server (URL, or URL#MODEL), or a recording (JSONL), whose answers are learnt.
    distil
        What is learnt from a teacher: its `answers`, its `logits` (predictions for the examples' own answers, of a
        model with the same tokenizer), or `both`. Default: logits where that is possible, else answers.
    teacher_share
        Share of the loss that comes from the teacher's predictions; the rest comes from the answers.
    key_env
        Environment variable with the API key of the teacher's server.
    gate
        Ask the base and the result at the end, and compare them with the good answers.
    gate_prompts
        Held-out prompts to ask, at most.
    restart
        Begin again, though OUT.partial has a checkpoint, or answers for heads.
    heads
        Train draft heads that make the model faster, instead of the model: medusa, eagle or eagle3. They learn from the
        model's own answers to the prompts in --data, with --epochs (default 10), --batch, --rate, --seed and --base
        (precision of the model that answers).
    drafts
        With --heads: draft tokens to train, one after the other.
    vocabulary
        With --heads: tokens that the heads choose from, the most frequent of the answers; fewer are faster.
    answer_tokens
        With --heads: tokens of each answer, at most.
    threads
        Threads. Default: the machine's cores. Equal numbers of threads give equal results.
    """
    prepare_torch()
    folder = open_model(find_model(model))
    cores = threads or usable_cores()
    if heads is not None:
        for name, value in (("full", full), ("merge", merge), ("distil-from", distil_from), ("qat", qat != "none")):
            if value:
                raise RequestError(f"--heads trains no model. Remove --{name}.", parameter=name)
        settings = HeadRecipe(
            depth=drafts,
            epochs=10 if epochs is None else epochs,
            batch=batch,
            rate=1e-3 if rate is None else rate,
            seed=seed,
        )
        train_heads(
            model,
            folder,
            heads,
            settings,
            data=data,
            held_out=held_out,
            out=out,
            weights="auto" if base == "f32" else base,
            vocabulary=vocabulary,
            answer_tokens=answer_tokens,
            threads=cores,
            restart=restart,
        )
        return
    recipe = AdaptRecipe(
        full=full,
        rank=rank,
        alpha=2.0 * rank if alpha is None else alpha,
        targets=parse_targets(folder, targets),
        base=base,
        rounded=qat,
        rate=(1e-4 if full else 1e-3) if rate is None else rate,
        decay=decay,
        epochs=3 if epochs is None else epochs,
        batch=batch,
        patience=patience,
        seed=seed,
    )
    _check(recipe, out, merge)
    most = _longest(max_length, folder.spec.context)
    teacher = Teacher.of(distil_from, distil, folder, key_env, cores)
    examples = AdaptData.read(folder, data, held_out, teacher, most, plain=plain, seed=seed)
    if teacher is not None and teacher.folder is not None:
        recipe = _with_share(recipe, teacher_share)
    merged = merge is not None or (gate and bool(examples.cases))
    adapted = _train(
        folder, examples, recipe, out, base=model, teacher=teacher, merged=merged, threads=cores, restart=restart
    )
    scores: list[VariantScores] = []
    if gate and examples.cases and adapted.model is not None:
        weights = qat if qat != "none" else base if base != "f32" else "auto"
        specs = [
            _local(model, folder.path, weights, cores),
            _local(out.name, adapted.model, qat if qat != "none" else "auto", cores),
        ]
        scores = _measure(examples.cases[:gate_prompts], specs)
    write_card(adapted, folder, recipe, examples.describe(), "" if teacher is None else teacher.name, scores)
    adapted.publish(out, merge)
    if _report(out, adapted, recipe, scores) == "worse":
        sys.exit(1)


def _check(recipe: AdaptRecipe, out: Path, merge: Path | None) -> None:
    recipe.check()
    if recipe.full and merge is not None:
        raise RequestError("--full writes a model already. Remove --merge.", parameter="merge")
    if recipe.rounded != "none" and not recipe.full and merge is None:
        raise RequestError("--qat is for weights that are served as a whole. Add --merge or --full.", parameter="qat")
    for path in (out, merge):
        if path is not None and path.exists():
            raise RequestError(f"{path} exists. Choose another name, or remove it first.", parameter="out")


def _longest(max_length: int | None, context: int) -> int:
    """Return the most tokens of an example."""
    most = min(_MOST_LENGTH, context) if max_length is None else max_length
    if not 2 <= most <= context:
        raise RequestError(
            f"'max_length' must be 2 to {context}, the model's context, not {most}.", parameter="max-length"
        )
    return most


def _train(
    folder: ModelFolder,
    examples: AdaptData,
    recipe: AdaptRecipe,
    out: Path,
    *,
    base: str,
    teacher: Teacher | None,
    merged: bool,
    threads: int,
    restart: bool,
) -> AdaptedModel:
    from headrace.adapt.adaptation import adapt_model  # imports torch
    from headrace.adapt.training import TrainingProgress

    with EvaluationBar() as bar:

        def watch(state: TrainingProgress) -> None:
            held = "" if state.held_out_loss is None else f", held out {state.held_out_loss:.4f}"
            bar.show(EvaluationProgress(f"loss {state.loss:.4f}{held}", state.step, state.steps))

        adapted = adapt_model(
            folder,
            examples.rows,
            examples.held_out,
            recipe,
            out,
            base=base,
            teacher=None if teacher is None else teacher.folder,
            merge=merged,
            threads=threads,
            restart=restart,
            watch=watch,
        )
    if adapted.resumed:
        print(f"Continued after step {adapted.resumed}.", file=sys.stderr)
    return adapted


def _report(out: Path, adapted: AdaptedModel, recipe: AdaptRecipe, scores: Sequence[VariantScores]) -> str:
    """Print what was trained and the scores, and return the verdict; empty without scores."""
    state = adapted.state
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print(
        f"{out}: {recipe.describe()}, {adapted.trained:,} weights trained. Held-out loss "
        f"{state.evaluations[0].held_out_loss:.4f} before, {state.best_loss:.4f} after {state.best_step} of "
        f"{state.step} steps.",
        soft_wrap=True,
    )
    if not scores:
        return ""
    console.print(score_table(scores))
    verdict = compare_scores(scores[1], scores[0])
    console.print(f"Correct answers against the base: {verdict}.")
    return verdict


def _measure(cases: Sequence[Case], specs: Sequence[AnswererSpec]) -> list[VariantScores]:
    with EvaluationBar() as bar:

        def watch(done: int, total: int) -> None:
            bar.show(EvaluationProgress("answers of held-out prompts", done, total))

        answers = asyncio.run(ask_all(cases, specs, watch=watch))
    return [score_answers(spec.name, cases, found) for spec, found in zip(specs, answers, strict=True)]


def _local(name: str, path: Path, weights: str, threads: int) -> AnswererSpec:
    variant = Variant.of(str(path.absolute()), weights=weights, threads=threads)
    return AnswererSpec(name=name, variant=variant)


def _with_share(recipe: AdaptRecipe, share: float) -> AdaptRecipe:
    from msgspec.structs import replace

    changed = replace(recipe, teacher_share=share)
    changed.check()
    return changed
