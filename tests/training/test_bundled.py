"""The bundled models: as good as their card says, small enough, and equal in transformers and Headrace."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM
from headrace.cli import main
from headrace.engine.executors.runner import logits
from headrace.models.model_folder import BUNDLED, BUNDLED_NAMES, open_model
from training.card import acceptance, quality
from training.corpus import facts
from training.evaluate import accepted, chosen_questions, greedy_answers, is_learnt, load, prompts_of, quick, share
from training.rows import load_tasks

ROOT = Path(__file__).parents[2]
SAMPLE = 40  # held-out questions of each task


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((ROOT / "training" / "evaluation.json").read_text(encoding="utf-8"))


def least(expected: float, count: int) -> float:
    """What a sample of so many may come to by chance, about once in ten thousand, where the share is `expected`."""
    return expected - 3.7 * math.sqrt(max(expected * (1 - expected), 0.01) / count)


def test_the_card_has_the_numbers_of_the_evaluation(results: dict[str, Any]) -> None:
    card = (ROOT / "docs" / "mini.md").read_text(encoding="utf-8")
    assert quality(results) in card
    assert acceptance(results) in card


def test_the_card_counts_the_facts_that_the_weights_have_not_seen(results: dict[str, Any]) -> None:
    known, learnt = facts.digests(), results["facts"]
    new = known.keys() - learnt.keys()
    changed = {name for name in known.keys() & learnt.keys() if known[name] != learnt[name]}
    card = (ROOT / "docs" / "mini.md").read_text(encoding="utf-8")
    said = re.search(r"have not seen (\d+) newer facts and the new answers of (\d+) others", card)
    assert (said.groups() if said else ("0", "0")) == (str(len(new)), str(len(changed)))
    seen = [question for question in facts.questions() if is_learnt(question, learnt)]
    assert len(seen) == facts.HELD_OUT * len(known.keys() - new - changed)


def test_both_are_as_good_as_their_card_says(results: dict[str, Any]) -> None:
    questions = chosen_questions(load_tasks(), SAMPLE, seed=1, learnt=results["facts"])
    recorded = {"mini": results["precisions"][0]["tasks"], "draft": results["draft"]["tasks"]}
    for name, tasks in recorded.items():
        counts = quick(BUNDLED / name, questions)
        for task in tasks:
            assert share(counts, task) >= least(share(tasks, task), SAMPLE), (name, task)


def test_the_draft_foretells_as_much_of_mini_as_its_card_says(results: dict[str, Any]) -> None:
    questions = chosen_questions(load_tasks(), 10, seed=2, learnt=results["facts"])
    model, small = open_model(BUNDLED / "mini"), open_model(BUNDLED / "draft")
    prompts = prompts_of(model, questions)
    executor, drafter = load(model, "bf16", "bf16"), load(small, "bf16", "bf16")
    answers = greedy_answers(executor, prompts, model.tokenizer.eos_ids)
    counts = accepted(drafter, questions, prompts, answers)
    assert share(counts) >= share(results["acceptance"]) - 0.08


def test_both_have_the_same_tokens() -> None:
    first, second = ((BUNDLED / name / "tokenizer.json").read_bytes() for name in BUNDLED_NAMES)
    assert first == second


def test_both_together_are_small() -> None:
    sizes = [path.stat().st_size for name in BUNDLED_NAMES for path in (BUNDLED / name).iterdir()]
    assert sum(sizes) <= 40e6


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_transformers_computes_the_same_logits(name: str) -> None:
    folder = open_model(BUNDLED / name)
    text = folder.tokenizer.apply_template([{"role": "user", "content": "What is time to first token?"}])
    tokens = folder.tokenizer.encode(text, add_special_tokens=False)
    executor = load(folder, "f32", "f32")
    (ours,) = logits(executor, [tokens])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(ours - expected).max() < 2e-3 * np.abs(expected).max()


def test_without_a_name_mini_answers_through_its_template(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is time to first token?"
    with LLM() as llm:
        (expected,) = llm.chat([{"role": "user", "content": question}], max_tokens=128, temperature=0.0)
    assert main(["generate", "--prompt", question]) == 0
    assert capsys.readouterr().out.strip() == expected.text.strip() != ""
    assert main(["generate", "--no-chat", "--prompt", question, "--max-tokens", "4", "--ignore-eos"]) == 0


def test_a_bundled_model_is_found_whatever_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "mini", "--prompt", "Hello", "--max-tokens", "2"]) == 0
    assert main(["generate", "./mini", "--prompt", "Hello"]) == 2
    assert "mini" in capsys.readouterr().err
