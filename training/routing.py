"""Trains the complexity classifier of routing on the answers of mini and draft to held-out questions.

A question is simple if draft's answer is right, and complex otherwise. The fit sees one half of the questions; the
printed numbers are of the other half: how often a complex question scores above a simple one, among all and among
those that need mini (if neither is right, a larger model would be needed). Learning from all questions ranks both
better than learning from the second kind.

    python -m training.routing [--models FOLDER] [--sample N] [--answers FILE] [--out FILE]

FOLDER contains `mini` and `draft`; the default is the bundled models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.executors.runner import Runner
from headrace.engine.executors.runner import RunnerSequence as Running
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.routing.complexity import FEATURES, WEIGHTS, Classifier, features
from headrace.gateway.routing.confidence import FIRST, TOP, Confidence
from headrace.lab.tuning.classifier_fit import Floats, balanced, fitted, ranked
from headrace.models.model_folder import BUNDLED, open_model
from training.corpus.conversation import Question
from training.corpus.scoring import is_right
from training.evaluate import MOST_TOKENS, SIDE_BY_SIDE, chosen_questions, learnt_facts, load, prompts_of
from training.rows import load_tasks
from training.tokenizer import messages_of, write_text

MODELS: Final = ("draft", "mini")


class Answered(msgspec.Struct, frozen=True):
    """One model's answer to a question."""

    right: bool
    prompt_tokens: int
    output_tokens: int
    logprobs: tuple[float, ...]  # of its tokens, without special ones
    tops: tuple[tuple[float, ...], ...]  # of the likeliest in the place of the first few

    def confidence(self, tokens: int | None = None) -> Confidence:
        """Return the state after `tokens`, or at the end."""
        found = Confidence()
        for place, logprob in enumerate(self.logprobs[:tokens]):
            found.add(logprob, self.tops[place] if place < len(self.tops) else ())
        return found


class Pair(msgspec.Struct, frozen=True):
    """Both models' answers to a question."""

    task: str
    group: str  # questions of one group are in the same half
    messages: list[dict[str, str]]
    tools: tuple[str, ...]
    draft: Answered
    mini: Answered

    def features(self) -> list[float]:
        tools = tuple(map(Tool, self.tools))
        return features(TextRequest(model="", messages=list[dict[str, Any]](self.messages), tools=tools))


class Pairs(msgspec.Struct, frozen=True):
    models: dict[str, str]  # digests of their weights: another model answers otherwise
    pairs: list[Pair]
    weight_bytes: dict[str, int]  # of both models
    isa: str
    weights: str

    def half(self, *, other: bool = False) -> list[Pair]:
        return [each for each in self.pairs if _is_second(each.group) == other]


def _is_second(group: str) -> bool:
    return blake2b(group.encode(), digest_size=1).digest()[0] % 2 == 1


def group_of(question: Question) -> str:
    """Group the questions about one fact, so that the halves share no answers."""
    return f"{question.task}/{question.expected if question.metric == 'fact' else question.key}"


def pair_of(question: Question, draft: Answered, mini: Answered) -> Pair:
    messages = [{"role": each["role"], "content": each["content"]} for each in messages_of(question.turns)]
    tools = tuple(cast("dict[str, Any]", each)["function"]["name"] for each in question.tools)
    return Pair(question.task, group_of(question), messages, tools, draft, mini)


def answers_of(folder: Path, questions: Sequence[Question], weights: str, threads: int | None) -> list[Answered]:
    """Generate greedy answers in a batch; see evaluate.greedy_answers."""
    model = open_model(folder)
    tokenizer = model.tokenizer
    executor = load(model, weights, "bf16", threads)
    runner, context = Runner(executor), executor.capacity.context
    prompts = prompts_of(model, questions)
    outputs: list[list[int]] = [[] for _ in prompts]
    measured: list[tuple[list[float], list[tuple[float, ...]]]] = [([], []) for _ in prompts]
    waiting = [place for place in reversed(range(len(prompts))) if len(prompts[place]) < context]
    active: list[tuple[int, Running]] = []
    while waiting or active:
        while waiting and len(active) < SIDE_BY_SIDE:
            place = waiting.pop()
            prompt = prompts[place]
            active.append((place, runner.open(prompt, total=min(len(prompt) + MOST_TOKENS, context))))
        rows = runner.prefill([sequence for _, sequence in active])
        going: list[tuple[int, Running]] = []
        for (place, sequence), row in zip(active, rows, strict=True):
            token = int(row.argmax())
            outputs[place].append(token)
            sequence.tokens.append(token)
            if not tokenizer.is_special(token):
                _measure(row, token, *measured[place])
            done = token in tokenizer.eos_ids or len(outputs[place]) == MOST_TOKENS or len(sequence.tokens) == context
            if done:
                runner.close(sequence)
            else:
                going.append((place, sequence))
        active = going
    executor.close()
    texts = [tokenizer.decode(output).strip() for output in outputs]
    return [
        Answered(is_right(question, text), len(prompt), len(output), tuple(logprobs), tuple(tops))
        for question, text, prompt, output, (logprobs, tops) in zip(
            questions, texts, prompts, outputs, measured, strict=True
        )
    ]


def _measure(row: NDArray[np.float32], token: int, logprobs: list[float], tops: list[tuple[float, ...]]) -> None:
    likely = row.astype(np.float64)
    total = float(likely.max() + np.log(np.exp(likely - likely.max()).sum()))
    logprobs.append(round(float(likely[token]) - total, 5))
    if len(tops) < FIRST:
        likeliest = np.sort(np.partition(likely, -TOP)[-TOP:])[::-1]
        tops.append(tuple(round(float(each) - total, 5) for each in likeliest))


def answer_all(models: Path, sample: int | None, *, weights: str = "bf16", threads: int | None = None) -> Pairs:
    """Answer `sample` questions of each task, or all."""
    learnt = learnt_facts() if models == BUNDLED else None
    questions = chosen_questions(load_tasks(), sample, learnt=learnt)
    found = {name: answers_of(models / name, questions, weights, threads) for name in MODELS}
    pairs = [
        pair_of(question, draft, mini)
        for question, draft, mini in zip(questions, found["draft"], found["mini"], strict=True)
    ]
    sizes: dict[str, int] = {}
    isa = ""
    for name in found:
        executor = load(open_model(models / name), weights, "bf16", threads)
        sizes[name], isa = executor.load_report.weight_bytes, executor.isa
        executor.close()
    return Pairs(digests(models), pairs, sizes, isa, weights)


def digests(models: Path) -> dict[str, str]:
    return {
        name: blake2b((models / name / "model.safetensors").read_bytes(), digest_size=8).hexdigest() for name in MODELS
    }


def answers_from(file: Path | None, models: Path, sample: int | None, **options: Any) -> Pairs:
    """Read these models' answers from the file, or generate and save them."""
    if file is not None and file.exists():
        kept = msgspec.json.decode(file.read_bytes(), type=Pairs)
        if kept.models == digests(models):
            return kept
    pairs = answer_all(models, sample, **options)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, msgspec.json.encode(pairs).decode())
    return pairs


def labelled(pairs: Sequence[Pair]) -> tuple[Floats, Floats, Floats]:
    """Return features, labels (1: complex), and counts that give both labels the same weight."""
    values = np.array([each.features() for each in pairs], dtype=np.float64).reshape(len(pairs), len(FEATURES))
    labels = np.array([0.0 if each.draft.right else 1.0 for each in pairs])
    return values, labels, balanced(labels)


def train(pairs: Pairs) -> Classifier:
    values, labels, counts = labelled(pairs.half())
    *weights, bias = (round(float(each), 5) for each in fitted(values, labels, counts))
    classifier = Classifier(dict(zip(FEATURES, weights, strict=True)), bias)
    other = pairs.half(other=True)
    needed = [each for each in other if each.draft.right or each.mini.right]
    made = {
        "by": "python -m training.routing",
        "models": pairs.models,
        "questions": len(pairs.pairs),
        "draft right": sum(each.draft.right for each in pairs.pairs),
        "only mini right": sum(each.mini.right and not each.draft.right for each in pairs.pairs),
        "other half, ranked right": round(_ranked_by(classifier, other), 3),
        "other half, where mini is needed": round(_ranked_by(classifier, needed), 3),
    }
    return msgspec.structs.replace(classifier, made=made)


def _ranked_by(classifier: Classifier, pairs: Sequence[Pair]) -> float:
    values, labels, _ = labelled(pairs)
    return ranked(np.array([classifier.score(list(each)) for each in values]), labels)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.routing", description="Fit the complexity score.")
    parser.add_argument("--models", type=Path, default=BUNDLED, help="holds mini and draft")
    parser.add_argument("--sample", type=int, help="questions of each task; all by default")
    parser.add_argument("--answers", type=Path, help="keeps the models' answers, and takes them from there")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args(arguments)
    classifier = train(answers_from(options.answers, options.models, options.sample, threads=options.threads))
    write_text(options.out, msgspec.json.format(msgspec.json.encode(classifier), indent=2).decode() + "\n")
    for name, value in classifier.made.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
