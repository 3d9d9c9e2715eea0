"""Measures finished models: greedy answers to every held-out question, by Headrace, in each precision.

    python -m training.evaluate FOLDER [--sample N] [--precisions bf16,int4-g32] [--learnt]

FOLDER contains `mini` and `draft`. The evaluation reads model folders, so it measures the weights that ship.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner, logits
from headrace.engine.executors.runner import RunnerSequence as Running
from headrace.models.model_folder import ModelFolder, open_model
from training.corpus import facts
from training.corpus.conversation import Question
from training.corpus.scoring import is_right
from training.rows import Task, load_tasks
from training.tokenizer import messages_of, write_text

RESULTS: Final = Path(__file__).parent / "evaluation.json"  # of the bundled models
PRECISIONS: Final = (  # of the weights, of the KV cache
    ("bf16", "bf16"),
    ("int8", "bf16"),
    ("int4-g32", "bf16"),
    ("int4-g128", "bf16"),
    ("int4-channel", "bf16"),
    ("bf16", "int8"),
    ("int4-g32", "int8"),
)
TARGETS: Final = {  # least share of right answers of mini in bf16
    "facts": 0.90,
    "reading": 0.95,
    "extraction": 0.95,
    "tools": 0.95,
    "triage": 0.95,
    "arithmetic": 0.80,
}
ACCEPTANCE_TARGET: Final = 0.70
MOST_TOKENS: Final = 192  # of an answer
SIDE_BY_SIDE: Final = 32  # sequences

Counts = dict[str, dict[str, int]]  # by task: "right" of "of"


def load(folder: ModelFolder, weights: str, kv: str, threads: int | None = None) -> CpuExecutor:
    return CpuExecutor.load(
        folder, weights=weights, kv=kv, threads=threads, kv_tokens=SIDE_BY_SIDE * folder.spec.context
    )


def greedy_answers(
    executor: CpuExecutor, prompts: Sequence[Sequence[int]], stop: frozenset[int], most: int = MOST_TOKENS
) -> list[list[int]]:
    """Generate greedily after each prompt, up to and including the first stop token, or `most` tokens.

    Sequences come and go in one running batch; no answer depends on its company.
    """
    runner = Runner(executor)
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(reversed(range(len(prompts))))
    active: list[tuple[int, Running]] = []
    context = executor.capacity.context
    while waiting or active:
        while waiting and len(active) < SIDE_BY_SIDE:
            index = waiting.pop()
            prompt = prompts[index]
            if len(prompt) < context:  # a prompt without room for an answer has none
                active.append((index, runner.open(prompt, total=min(len(prompt) + most, context))))
        if not active:
            break
        rows = runner.prefill([sequence for _, sequence in active])
        going: list[tuple[int, Running]] = []
        for (index, sequence), row in zip(active, rows, strict=True):
            token = int(row.argmax())
            answers[index].append(token)
            sequence.tokens.append(token)
            if token in stop or len(answers[index]) == most or len(sequence.tokens) == context:
                runner.close(sequence)
            else:
                going.append((index, sequence))
        active = going
    return answers


def prompts_of(folder: ModelFolder, questions: Sequence[Question]) -> list[list[int]]:
    tokenizer = folder.tokenizer
    texts = [tokenizer.apply_template(messages_of(question.turns), tools=_declared(question)) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _declared(question: Question) -> Any:
    return list(question.tools) or None


def answer_texts(folder: ModelFolder, answers: Sequence[Sequence[int]]) -> list[str]:
    return [folder.tokenizer.decode(answer).strip() for answer in answers]


def counted(questions: Sequence[Question], texts: Sequence[str]) -> Counts:
    counts: Counts = {}
    for question, text in zip(questions, texts, strict=True):
        count = counts.setdefault(question.task, {"right": 0, "of": 0})
        count["right"] += is_right(question, text)
        count["of"] += 1
    return counts


def accepted(
    draft: CpuExecutor,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> Counts:
    """Count the answers' tokens that draft would also choose, given all tokens before."""
    counts: Counts = {}
    together = 16  # logits of whole rows are large
    for start in range(0, len(prompts), together):
        batch = slice(start, start + together)
        whole = [[*prompt, *answer] for prompt, answer in zip(prompts[batch], answers[batch], strict=True)]
        found = logits(draft, whole)
        for question, prompt, answer, rows in zip(questions[batch], prompts[batch], answers[batch], found, strict=True):
            guesses = rows[len(prompt) - 1 : -1].argmax(-1).tolist()
            count = counts.setdefault(question.task, {"right": 0, "of": 0})
            count["right"] += sum(guess == token for guess, token in zip(guesses, answer, strict=True))
            count["of"] += len(answer)
    return counts


def learnt_facts() -> dict[str, str]:
    """Return the digests of the facts that the bundled models were trained on, by the facts' ids."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["facts"]


def is_learnt(question: Question, learnt: Mapping[str, str]) -> bool:
    """Return whether a model that learnt these facts can know the expected answer."""
    name = question.key.partition(": ")[0]
    return question.task != facts.TASK or learnt.get(name) == facts.digest(question.expected)


def chosen_questions(
    tasks: Mapping[str, Task], sample: int | None, seed: int = 0, *, learnt: Mapping[str, str] | None = None
) -> list[Question]:
    """Return all held-out questions, or `sample` of each task. `learnt` leaves out facts that are not among these."""
    questions: list[Question] = []
    for name, task in tasks.items():
        held_out = [question for question in task.questions() if learnt is None or is_learnt(question, learnt)]
        if sample is not None and sample < len(held_out):
            held_out = Random(f"{seed}/{name}").sample(held_out, sample)
        questions += held_out
    return questions


def quick(folder: Path, questions: Sequence[Question], *, threads: int | None = None) -> Counts:
    """Count one model's right answers in bf16."""
    model = open_model(folder)
    executor = load(model, "bf16", "bf16", threads)
    answers = greedy_answers(executor, prompts_of(model, questions), model.tokenizer.eos_ids)
    executor.close()
    return counted(questions, answer_texts(model, answers))


def evaluate(
    mini: Path,
    draft: Path,
    questions: Sequence[Question],
    *,
    precisions: Sequence[tuple[str, str]] = PRECISIONS,
    threads: int | None = None,
    wrong: Path | None = None,
) -> dict[str, Any]:
    """Return every number of the model card. Write mini's wrong answers to `wrong` as JSON lines."""
    model, small = open_model(mini), open_model(draft)
    prompts = prompts_of(model, questions)
    stop = model.tokenizer.eos_ids
    drafter = load(small, "bf16", "bf16", threads)
    results: dict[str, Any] = {"questions": len(questions), "isa": drafter.isa, "precisions": []}
    for index, (weights, kv) in enumerate(precisions):
        executor = load(model, weights, kv, threads)
        answers = greedy_answers(executor, prompts, stop)
        texts = answer_texts(model, answers)
        counts = counted(questions, texts)
        results["precisions"].append(
            {
                "weights": weights,
                "kv": kv,
                "weight_bytes": executor.load_report.weight_bytes,
                "kv_bytes_per_token": executor.kv_bytes_per_token,
                "tasks": counts,
            }
        )
        executor.close()
        print(f"mini {weights}, KV {kv}: {shares(counts)}", flush=True)
        if index == 0:
            agreed = accepted(drafter, questions, prompts, answers)
            results["acceptance"] = agreed
            results["answer_tokens"] = sum(map(len, answers)) / max(len(answers), 1)
            print(f"acceptance: {shares(agreed)}", flush=True)
            if wrong is not None:
                write_text(wrong, wrong_answers(questions, texts))
    counts = counted(questions, answer_texts(small, greedy_answers(drafter, prompts, stop)))
    results["draft"] = {"weight_bytes": drafter.load_report.weight_bytes, "tasks": counts}
    drafter.close()
    print(f"draft bf16, KV bf16: {shares(counts)}", flush=True)
    return results


def wrong_answers(questions: Sequence[Question], texts: Sequence[str]) -> str:
    lines = [
        json.dumps(
            {
                "task": question.task,
                "metric": question.metric,
                "asked": [[turn.role, turn.content] for turn in question.turns],
                "expected": question.expected,
                "answered": text,
            },
            ensure_ascii=False,
        )
        for question, text in zip(questions, texts, strict=True)
        if not is_right(question, text)
    ]
    return "".join(line + "\n" for line in lines)


def share(counts: Counts, task: str | None = None) -> float:
    """Return the share of right answers in a task, or in all."""
    chosen = [count for name, count in counts.items() if task in (None, name)]
    return sum(count["right"] for count in chosen) / max(sum(count["of"] for count in chosen), 1)


def shares(counts: Counts) -> str:
    return ", ".join(f"{task} {share(counts, task):.1%}" for task in counts)


def missed(results: Mapping[str, Any]) -> list[str]:
    """Return the missed targets, and by how much."""
    mini = results["precisions"][0]["tasks"]
    found = [(task, share(mini, task), least) for task, least in TARGETS.items() if task in mini]
    found.append(("acceptance of the draft", share(results["acceptance"]), ACCEPTANCE_TARGET))
    return [
        f"{name}: {value:.1%}, {least - value:.1%} below {least:.0%}" for name, value, least in found if value < least
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Evaluate finished models.")
    parser.add_argument("folder", type=Path, help="holds mini and draft")
    parser.add_argument("--sample", type=int, help="questions of each task; all by default")
    parser.add_argument("--precisions", help="of the weights, by commas; KV is bf16; the card's seven by default")
    parser.add_argument(
        "--learnt", action="store_true", help="leave out facts that the bundled models were not trained on"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a target is missed")
    options = parser.parse_args(arguments)
    named = options.precisions.split(",") if options.precisions else None
    results = evaluate(
        options.folder / "mini",
        options.folder / "draft",
        chosen_questions(load_tasks(), options.sample, learnt=learnt_facts() if options.learnt else None),
        precisions=PRECISIONS if named is None else [(name, "bf16") for name in named],
        threads=options.threads,
    )
    if options.out is not None:
        write_text(options.out, json.dumps(results, indent=2) + "\n")
    misses = missed(results)
    print("\n".join(f"missed: {miss}" for miss in misses) or "every target is met")
    return 1 if misses and options.strict else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
