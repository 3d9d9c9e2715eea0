"""`headrace adapt --heads`: train draft heads for a model on its own answers to your prompts, and measure them."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.adapt.head_examples import HeadExample, HeadModel, choose_vocabulary
from headrace.adapt.head_recipe import HeadRecipe
from headrace.adapt.head_run import AnswerFile, HeadJob, HeadRun
from headrace.adapt.training_rows import hold_out
from headrace.bench.evaluation.documents import Document, read_prompts
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.bench.self_speculation import check_takes_drafts
from headrace.cli.evaluate import EvaluationBar
from headrace.engine.speculation.speculator import Speculator
from headrace.engine.speculation.state_recorder import StateRecorder
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.models.config_json import ConfigJson
from headrace.models.draft_heads import eagle_config, eagle_spec, write_eagle, write_medusa
from headrace.models.eagle3_layer import chosen_layers, eagle3_config, eagle3_spec, write_eagle3
from headrace.models.formats.model_weights import content_digest
from headrace.models.model_folder import ModelFolder
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.weight_cache import cache_folder

if TYPE_CHECKING:
    from headrace.adapt.head_networks import Eagle3Network, EagleNetwork, MedusaNetwork
    from headrace.adapt.head_training import HeadTraining

HeadKind = Literal["medusa", "eagle", "eagle3"]

_HELD_OUT: Final = 0.1
_LEAST_TOKENS: Final = 4  # of an answer that is learnt
_LEAST_VOCABULARY: Final = 64
_SHORTEST_ANSWER: Final = 8  # tokens
_LONGEST_ANSWER: Final = 4096
_AT_ONCE: Final = 32  # answers
_CONTEXT: Final = 2048
_PARTIAL: Final = ".partial"


def train_heads(
    model: str,
    folder: ModelFolder,
    kind: HeadKind,
    recipe: HeadRecipe,
    *,
    data: Path | None,
    held_out: Path | None,
    out: Path,
    weights: str,
    vocabulary: int,
    answer_tokens: int,
    threads: int,
    restart: bool,
) -> None:
    recipe.check()
    check_takes_drafts(folder.spec, model)
    if kind == "eagle3" and folder.spec.streams is not None:
        raise RequestError(
            f"The layers of '{model}' have several streams of hidden states, which an EAGLE-3 layer cannot read. Use "
            "--heads eagle.",
            parameter="heads",
        )
    if data is None:
        raise RequestError("Pass your prompts: --data FILE.", parameter="data")
    _check(folder, out, vocabulary, answer_tokens)
    asked, held = _prompts(data, held_out, recipe.seed)
    job = HeadJob(
        model=content_digest(folder.weights.files, index_dir=cache_folder()),
        kind=kind,
        recipe=recipe,
        weights=weights,
        vocabulary=vocabulary,
        answer_tokens=answer_tokens,
        prompts=hashlib.sha256(repr((asked, held)).encode()).hexdigest(),
    )

    from headrace.adapt.head_networks import Eagle3Network, MedusaNetwork  # imports torch

    states = 1 + len(_reads(kind, folder))
    run = HeadRun.open(out.with_name(out.name + _PARTIAL), job, states * folder.spec.hidden_size, restart=restart)
    with _finished(out, run) as partial:
        answers = _answer_prompts(folder, job, run, asked, held, threads)
        trained = _train_network(folder, job, run, answers, out, base=model, threads=threads)
        found = trained.training.acceptance(answers.held_out, recipe.depth)
        if isinstance(trained.network, MedusaNetwork):
            write_medusa(partial, trained.network.heads(answers.inputs.tokens), base=model)
        elif isinstance(trained.network, Eagle3Network):
            write_eagle3(partial, trained.network.layer(answers.inputs.tokens), trained.config)
        else:
            write_eagle(partial, trained.network.layer(answers.inputs.tokens), trained.config)
        lines = [
            f"{sum(value.numel() for value in trained.network.trained.values()):,} weights, trained on "
            f"{sum(len(each.answer) for each in answers.train):,} tokens of {len(answers.train):,} answers of {model}.",
            f"On {len(answers.held_out):,} other answers, a step with {recipe.depth} drafts gives {found.tokens:.2f} "
            "tokens.",
        ]
        card = _card(kind, recipe, lines, found.by_draft, len(answers.inputs.head))
        (partial / "README.md").write_text(card, encoding="utf-8")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    if trained.training.resumed:
        print(f"Continued after step {trained.training.resumed}.", file=sys.stderr)
    console.print(f"{out}: {' '.join(lines)}", soft_wrap=True)
    table = Table("draft", "accepted, if those before it were", box=None)
    for place, share in enumerate(found.by_draft, start=1):
        table.add_row(str(place), f"{share:.0%}")
    console.print(table)
    console.print(f'Serve with options = {{ speculation = "heads", draft_heads = "{out}" }}')


def _reads(kind: str, folder: ModelFolder) -> tuple[int, ...]:
    """Return the layers of the model whose input such heads read beside its final states, over whole texts."""
    return chosen_layers(len(folder.spec.layers)) if kind == "eagle3" else ()


def _check(folder: ModelFolder, out: Path, vocabulary: int, answer_tokens: int) -> None:
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    longest = min(_LONGEST_ANSWER, folder.spec.context // 2)
    if not _SHORTEST_ANSWER <= answer_tokens <= longest:
        why = ", half of the model's context" if longest < _LONGEST_ANSWER else ""
        raise RequestError(
            f"'answer_tokens' must be {_SHORTEST_ANSWER} to {longest}{why}, not {answer_tokens}.",
            parameter="answer-tokens",
        )
    if vocabulary < _LEAST_VOCABULARY:
        raise RequestError(
            f"'vocabulary' must be at least {_LEAST_VOCABULARY}, not {vocabulary}.", parameter="vocabulary"
        )


class _Answers(NamedTuple):
    """The model's own answers, and what heads read of the model."""

    train: list[HeadExample]
    held_out: list[HeadExample]
    inputs: HeadModel


def _answer_prompts(
    folder: ModelFolder,
    job: HeadJob,
    run: HeadRun,
    asked: Sequence[Document],
    held: Sequence[Document],
    threads: int,
) -> _Answers:
    most = job.answer_tokens
    reads = _reads(job.kind, folder)
    # Prompts have at least as much of the context as answers.
    context = min(max(_CONTEXT, 2 * most), folder.spec.context)
    with (
        EvaluationBar() as bar,
        LLM(
            folder,
            weights=job.weights,
            threads=threads,
            speculation="none",
            prefix_cache=not reads,  # or the beginnings that prompts share would be missing
            context=context,
            max_sequences=_AT_ONCE,
        ) as llm,
    ):
        pace = _Pace(run.train.tokens + run.held_out.tokens)

        def asking() -> None:
            speed = pace.after(run.train.tokens + run.held_out.tokens)
            done = run.train.prompts + run.held_out.prompts
            bar.show(EvaluationProgress(f"the model's own answers{speed}", done, len(asked) + len(held)))

        bar.start_from(run.train.prompts + run.held_out.prompts)
        train = _record(llm, asked, most, run.train, asking, reads)
        kept = _record(llm, held, most, run.held_out, asking, reads)
        tokens = choose_vocabulary((each.answer.tolist() for each in train), folder.spec.vocab_size, job.vocabulary)
        products = llm.opened.executor.products
        embedded = np.unique(np.concatenate([each.tokens for each in [*train, *kept]])).astype(np.int32)
        every = np.arange(folder.spec.vocab_size, dtype=np.int32) if tokens is None else tokens
        inputs = HeadModel(
            embedded, products.embeddings(embedded), tokens, products.head_rows(every), products.head_norm()
        )
    return _Answers(train, kept, inputs)


class _TrainedHeads(NamedTuple):
    network: MedusaNetwork | EagleNetwork | Eagle3Network
    training: HeadTraining
    config: dict[str, object]  # of an EAGLE layer


def _train_network(
    folder: ModelFolder, job: HeadJob, run: HeadRun, answers: _Answers, out: Path, *, base: str, threads: int
) -> _TrainedHeads:
    import torch

    from headrace.adapt.head_networks import Eagle3Network, EagleNetwork, MedusaNetwork
    from headrace.adapt.head_training import HeadTraining

    torch.set_num_threads(threads)
    recipe = job.recipe
    head = answers.inputs.head
    config: dict[str, object] = {}
    if job.kind == "medusa":
        network = MedusaNetwork(folder.spec, recipe.depth)
    elif job.kind == "eagle":
        config = eagle_config(folder.spec, base=base)
        network = EagleNetwork(eagle_spec(ConfigJson(config, path=out), folder.spec, len(head)), recipe.seed)
    else:
        config = eagle3_config(folder.spec, base=base, vocabulary=len(head))
        spec = eagle3_spec(ConfigJson(config, path=out), folder.spec, len(head))
        network = Eagle3Network(spec, _reads(job.kind, folder), head, answers.inputs.norm, recipe.seed)
    with EvaluationBar() as bar:
        pace, learnt = _Pace(0), 0

        def watch(step: int, steps: int, loss: float, tokens: int) -> None:
            nonlocal learnt
            if step == training.resumed + 1:
                bar.start_from(training.resumed)
            learnt += tokens
            bar.show(EvaluationProgress(f"loss {loss:.3f}{pace.after(learnt)}", step, steps))

        learns_states = job.kind == "eagle"
        training = HeadTraining(network, answers.inputs, recipe, learns_states=learns_states, run=run, watch=watch)
        training.run(answers.train)
    return _TrainedHeads(network, training, config)


class _Pace:
    """Tokens per second of this command, as text."""

    def __init__(self, tokens: int) -> None:
        """`tokens` were done before."""
        self._tokens = tokens
        self._began = time.monotonic()

    def after(self, tokens: int) -> str:
        done = tokens - self._tokens
        return f", {done / max(1e-3, time.monotonic() - self._began):,.0f} tokens/s" if done else ""


@contextmanager
def _finished(out: Path, run: HeadRun) -> Generator[Path]:
    """Yield the run's folder, which becomes `out` when it is complete. If something fails, it stays to be continued,
    unless it has no work yet."""
    try:
        yield run.path
        run.clear()
        run.path.rename(out)
    except BaseException:
        if not run.has_work:
            run.remove()
        raise


def _prompts(data: Path, held_out: Path | None, seed: int) -> tuple[list[Document], list[Document]]:
    documents = read_prompts(data)
    if held_out is not None:
        return documents, read_prompts(held_out)
    if len(documents) < 2:
        raise RequestError("Training needs at least two prompts: one is held out.", parameter="data")
    train, held = hold_out(len(documents), _HELD_OUT, seed)
    return [documents[at] for at in train], [documents[at] for at in held]


def _record(
    llm: LLM,
    documents: Sequence[Document],
    most: int,
    file: AnswerFile,
    watch: Callable[[], None],
    reads: tuple[int, ...],
) -> list[HeadExample]:
    """Return the model's own answers to prompts, with their hidden states, in an order of their own. `file` has some
    of them already and gets the others."""
    room = llm.opened.executor.capacity.context - most
    prompts = [_prompt(llm.tokenizer, each)[-room:] for each in documents]
    for start in range(file.prompts, len(prompts), _AT_ONCE):
        recorder = StateRecorder(reads, prompts=bool(reads))
        llm.opened.engine.draft_with(Speculator(recorder))
        batch = prompts[start : start + _AT_ONCE]
        llm.generate(batch, max_tokens=most, temperature=0.0)
        file.add(
            [HeadExample(np.array(each.tokens), each.states, each.prompt) for each in recorder.answers], len(batch)
        )
        watch()
    answers = file.examples(_LEAST_TOKENS)
    if not answers:
        raise RequestError(f"The answers have fewer than {_LEAST_TOKENS} tokens.", parameter="data")
    return answers


def _prompt(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Return a prompt's tokens, without an answer that it has."""
    messages = document.messages
    if messages is None:
        return list(tokenizer.encode(document.prompt))
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return list(tokenizer.encode(tokenizer.apply_template(messages), add_special_tokens=False))


def _card(kind: str, recipe: HeadRecipe, lines: Sequence[str], shares: Sequence[float], vocabulary: int) -> str:
    by_draft = ", ".join(f"{share:.0%}" for share in shares)
    return "\n".join(
        [
            f"# Draft heads ({kind})",
            "",
            *lines,
            f"Accepted by draft, if those before it were: {by_draft}. They choose among {vocabulary:,} tokens.",
            "",
            f"Recipe: {recipe.depth} drafts, {recipe.epochs} epochs, batches of {recipe.batch}, rate {recipe.rate:g}, "
            f"seed {recipe.seed}.",
            "",
        ]
    )
