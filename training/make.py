"""Runs the recipe: corpus, tokenizer, mini, draft, evaluation, card, installation. Skips steps that are done.

python -m training.make                        # everything, into build/training and then into the package
python -m training.make --steps tokenizer,mini # some steps
python -m training.make --toy                  # one minute, in its own folder, without installing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from headrace.models.model_folder import BUNDLED
from training import evaluate
from training.card import write_card
from training.corpus import facts
from training.decoder import Decoder
from training.distil import Teacher
from training.files import copy_model, copy_tokenizer, digest, read_checkpoint, read_model, write_model
from training.optimiser import RATES, Kind
from training.rows import MIXTURE, Drill, Stream, Task, load_tasks, pool
from training.shape import DRAFT, MINI, TOY_DRAFT, TOY_MINI, Shape
from training.tokenizer import read, text_of, write, write_text
from training.tokenizer import train as train_tokenizer
from training.train import Pace, Settings, SettingsChangedError, fast_half, train

ROOT: Final = Path(__file__).parent.parent
CARD: Final = ROOT / "docs" / "mini.md"
STEPS: Final = ("tokenizer", "mini", "draft", "evaluate", "card", "install")
TOY_STEPS: Final = STEPS[:4]


@dataclass(frozen=True)
class Recipe:
    folder: Path
    mini: Shape
    draft: Shape
    tokens: int  # budget of mini
    draft_tokens: int
    tokenizer_conversations: int
    seed: int = 0
    step_tokens: int = 4096
    optimiser: Kind = "muon"
    device: str = "cpu"
    compiled: bool = True
    threads: int | None = None
    sample: int | None = None  # held-out questions of each task in the evaluation; all by default
    milestone_sample: int = 40
    pool_size: int = 2048
    start: Path | None = None  # finished models, to be trained further
    peak: float = 1.0  # share of the optimiser's own learning rates
    blend: float = 1.0  # share of mini's new weights in what it ships with, where it was trained further
    new_facts: int = 1  # how many times as often as others facts come that the bundled models have not learnt
    drill: Drill = Drill()  # noqa: RUF009 - it is frozen
    pace: Pace = Pace()  # noqa: RUF009 - it is frozen
    precisions: tuple[tuple[str, str], ...] = evaluate.PRECISIONS

    def model(self, name: str) -> Path:
        return self.folder / name / "model"


TOY: Final = Recipe(
    folder=Path("build/training-toy"),
    mini=TOY_MINI,
    draft=TOY_DRAFT,
    tokens=150_000,
    draft_tokens=100_000,
    tokenizer_conversations=1_000,
    step_tokens=2048,
    compiled=False,
    sample=3,
    milestone_sample=2,
    pool_size=256,
    drill=Drill(pools=0),
    pace=Pace(print_steps=10, save_seconds=20.0, milestones=2),
    precisions=evaluate.PRECISIONS[:3],
)


def make_tokenizer(recipe: Recipe, tasks: Mapping[str, Task]) -> None:
    folder = recipe.folder / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return
    if recipe.start is not None:
        copy_tokenizer(recipe.start / "mini", folder)
        return
    # Pools are numbered from 0 in training; the tokenizer's sample is one that training never sees.
    sample = pool(tasks, recipe.seed, -1, recipe.tokenizer_conversations)
    texts = (text_of(conversation.turns, conversation.tools) for conversation in sample)
    write(train_tokenizer(texts, recipe.mini.vocabulary), folder)


def make_model(recipe: Recipe, tasks: Mapping[str, Task], name: str) -> None:
    mini = name == "mini"
    start = None if recipe.start is None else recipe.start / name
    settings = Settings(
        shape=recipe.mini if mini else recipe.draft,
        tokens=recipe.tokens if mini else recipe.draft_tokens,
        seed=recipe.seed,
        step_tokens=recipe.step_tokens,
        optimiser=recipe.optimiser,
        rates=None if recipe.peak == 1.0 else RATES[recipe.optimiser].scaled(recipe.peak),
        half=fast_half(recipe.device),
        compiled=recipe.compiled,
        begun=None if start is None else digest(start),
    )
    blend = recipe.blend if mini else 1.0
    made = {**settings.as_json(), "blend": blend, "new_facts": recipe.new_facts}
    folder = recipe.folder / name
    if finished(folder, made):
        return
    tokenizer_folder = recipe.folder / "tokenizer"
    # The draft learns from mini's own probabilities, in part on what mini itself would answer.
    teacher = None if mini else Teacher.load(recipe.model("mini"), recipe.threads)
    asked, mixture = emphasised(tasks, recipe.new_facts)
    stream = Stream(
        asked,
        read(tokenizer_folder),
        seed=recipe.seed,
        step_tokens=recipe.step_tokens,
        pool_size=recipe.pool_size,
        mixture=mixture,
        retell=None if teacher is None else teacher.answers,
        drill=recipe.drill if mini else None,
    )
    questions = evaluate.chosen_questions(tasks, recipe.milestone_sample)

    def milestone(model: Decoder, spent: float) -> None:
        write_model(model, tokenizer_folder, recipe.model(name))
        started = time.monotonic()
        counts = evaluate.quick(recipe.model(name), questions, threads=recipe.threads)
        seconds = time.monotonic() - started
        text = f"{name} after {spent:.0%}: {evaluate.shares(counts)} ({seconds:.0f} s)"
        print(text, flush=True)
        with (folder / "milestones.txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    model = train(
        settings,
        stream,
        folder,
        teacher=None if teacher is None else teacher.decoder,
        start=None if start is None else read_model(start),
        device=recipe.device,
        pace=recipe.pace,
        milestone=milestone,
    )
    if blend != 1.0 and start is not None:
        model = blended(read_model(start), model, blend)
    milestone(model, 1.0)
    write_text(folder / "done.json", json.dumps(made, indent=2) + "\n")


def emphasised(tasks: Mapping[str, Task], times: int) -> tuple[Mapping[str, Task], Mapping[str, float]]:
    """Return tasks and mixture in which facts that the bundled models have not learnt come `times` as often."""
    if times == 1 or facts.TASK not in tasks:
        return tasks, MIXTURE
    learnt = evaluate.learnt_facts()
    task = facts.Emphasised({name: times for name, digest in facts.digests().items() if learnt.get(name) != digest})
    return {**tasks, facts.TASK: task}, {**MIXTURE, facts.TASK: MIXTURE[facts.TASK] * task.growth()}


def finished(folder: Path, made: Mapping[str, Any]) -> bool:
    done = folder / "done.json"
    return done.exists() and json.loads(done.read_text(encoding="utf-8")) == made


def blended(old: Decoder, new: Decoder, share: float) -> Decoder:
    """Blend two models with this share of the new weights, to keep what the new run forgot."""
    weights = new.state_dict()
    old.load_state_dict(
        {name: weight.lerp(weights[name].to(weight), share) for name, weight in old.state_dict().items()}
    )
    return old


def make_evaluation(recipe: Recipe, tasks: Mapping[str, Task]) -> None:
    results = evaluate.evaluate(
        recipe.model("mini"),
        recipe.model("draft"),
        evaluate.chosen_questions(tasks, recipe.sample),
        precisions=recipe.precisions,
        threads=recipe.threads,
        wrong=recipe.folder / "wrong.jsonl",
    )
    results["facts"] = facts.digests()  # what these weights were trained on: the corpus may go on
    write_text(recipe.folder / "evaluation.json", json.dumps(results, indent=2) + "\n")
    print("\n".join(f"missed: {miss}" for miss in evaluate.missed(results)) or "every target is met")


def run(recipe: Recipe, steps: Sequence[str], tasks: Mapping[str, Task]) -> None:
    recipe.folder.mkdir(parents=True, exist_ok=True)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    for step in STEPS:
        if step not in steps:
            continue
        started = time.monotonic()
        print(f"== {step}", flush=True)
        match step:
            case "tokenizer":
                make_tokenizer(recipe, tasks)
            case "mini" | "draft":
                make_model(recipe, tasks, step)
            case "evaluate":
                make_evaluation(recipe, tasks)
            case "card":
                write_card(CARD, json.loads((recipe.folder / "evaluation.json").read_text(encoding="utf-8")))
            case _:
                for name in ("mini", "draft"):
                    copy_model(recipe.model(name), BUNDLED / name)
                write_text(evaluate.RESULTS, (recipe.folder / "evaluation.json").read_text(encoding="utf-8"))
        print(f"== {step}: {time.monotonic() - started:.0f} s", flush=True)


def losses(folder: Path) -> list[float]:
    """Return the losses that a run logged, in order."""
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def check_toy(recipe: Recipe) -> None:
    """Check that the toy's losses fell and its files load."""
    for name in ("mini", "draft"):
        found = losses(recipe.folder / name)
        if not found[-1] < 0.85 * found[0]:
            raise SystemExit(f"the loss of {name} did not fall: {found}")
        read_model(recipe.model(name))
        if read_checkpoint(recipe.folder / name) is None:
            raise SystemExit(f"{name} left no checkpoint")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.make", description="Make the bundled models.")
    parser.add_argument("--folder", type=Path, help="where work goes; build/training by default")
    parser.add_argument("--start", type=Path, help="folder with a finished mini and draft, which are trained further")
    parser.add_argument("--steps", default=None, help=f"some of {','.join(STEPS)}; all by default")
    parser.add_argument("--tokens", type=int, help="budget of mini; 40 million by default")
    parser.add_argument("--draft-tokens", type=int, help="budget of the draft; as mini's by default")
    parser.add_argument("--step-tokens", type=int, help="tokens of a training step")
    parser.add_argument("--peak", type=float, help="share of the usual learning rates; 1 by default")
    parser.add_argument(
        "--blend", type=float, help="share of mini's new weights, the others are --start's; 1 by default"
    )
    parser.add_argument(
        "--new-facts",
        type=int,
        help="how many times as often facts come that the bundled models have not learnt; once by default",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimiser", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--sample", type=int, help="held-out questions of each task to evaluate; all by default")
    parser.add_argument("--toy", action="store_true", help="a minute's run that shows that the recipe works")
    return parser.parse_args(arguments)


def recipe_of(options: argparse.Namespace) -> Recipe:
    if options.toy:
        base = TOY
    else:
        tokens = options.tokens or 40_000_000
        base = Recipe(
            folder=Path("build/training"),
            mini=MINI,
            draft=DRAFT,
            tokens=tokens,
            draft_tokens=options.draft_tokens or tokens,
            tokenizer_conversations=20_000,
        )
    changed: dict[str, Any] = {
        name: value
        for name in (
            "folder",
            "start",
            "peak",
            "blend",
            "new_facts",
            "tokens",
            "draft_tokens",
            "step_tokens",
            "threads",
            "sample",
        )
        if (value := getattr(options, name)) is not None
    }
    if options.start is not None:
        changed["drill"] = replace(base.drill, pools=0)  # who has learnt to copy is not to begin with it
    return replace(base, seed=options.seed, optimiser=options.optimiser, device=options.device, **changed)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    recipe = recipe_of(options)
    steps = tuple(options.steps.split(",")) if options.steps else TOY_STEPS if options.toy else STEPS
    if unknown := set(steps) - set(STEPS):
        print(f"unknown step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    if options.toy and {"card", "install"} & set(steps):
        print("a toy is not installed", file=sys.stderr)
        return 2
    if recipe.blend != 1.0 and (recipe.start is None or not 0.0 < recipe.blend < 1.0):
        print("--blend is a share between 0 and 1, and needs --start", file=sys.stderr)
        return 2
    if recipe.new_facts < 1:
        print("--new-facts is a number of times, 1 or more", file=sys.stderr)
        return 2
    try:
        run(recipe, steps, load_tasks())
    except SettingsChangedError as error:
        print(error, file=sys.stderr)
        return 2
    if options.toy:
        check_toy(recipe)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main(sys.argv[1:]))
