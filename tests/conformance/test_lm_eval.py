"""The evaluation harness (lm-eval) against a server, without a network: multiple choice, perplexity and generation.

One run of the real program, which takes a dozen seconds because it loads transformers and datasets: its requests have
broken servers in ways that no test of our own had foreseen.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.text.tokenizer import Tokenizer

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed (the group 'test' has it)", allow_module_level=True)

DOCUMENTS: list[dict[str, Any]] = [
    {
        "question": "Order 4711: 3 lamps for Kim. How many lamps?",
        "choices": ["3 lamps, for Kim", "4711 — née “É” 😀"],
        "answer": 0,
    },
    {"question": "The Porto office opens at 9:30. When does it open?", "choices": ["at 9:30", "at noon"], "answer": 0},
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "text": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def samples(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the harness recorded of each task's documents."""
    folder = tmp_path_factory.mktemp("lm-eval")
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {json.dumps(str(documents))}}}}}\n"
    for name, text in TASKS.items():
        (folder / f"local_{name}.yaml").write_text(f"task: local_{name}\ntest_split: test\n{source}{text}")
    options = {
        "model": "mini",
        "base_url": f"{base_url}/completions",
        "tokenizer": BUNDLED / "mini",
        "num_concurrent": 2,
    }
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
        *("--tasks", ",".join(f"local_{name}" for name in TASKS), "--include_path", str(folder)),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OPENAI_API_KEY": "x",
    }
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return {name: _samples(folder / "out", name) for name in TASKS}


def _samples(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_local_{name}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@functools.cache
def tokenizer() -> Tokenizer:
    return open_model(BUNDLED / "mini").tokenizer


def scored(client: OpenAI, tokens: list[int]) -> tuple[list[float | None], list[bool]]:
    """Each token's log-probability, and whether it was the likeliest."""
    answer = client.completions.create(model="mini", prompt=tokens, echo=True, logprobs=1, max_tokens=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.top_logprobs is not None
    likeliest = [
        top is not None and max(top, key=lambda text: top[text]) == token
        for token, top in zip(found.tokens or [], found.top_logprobs, strict=True)
    ]
    return list(found.token_logprobs or []), likeliest


def total(logprobs: list[float | None]) -> float:
    return sum(each for each in logprobs if each is not None)


def test_choices_have_the_likelihoods_of_their_tokens(samples: dict[str, list[dict[str, Any]]], client: OpenAI) -> None:
    for document, sample in zip(DOCUMENTS, samples["choice"], strict=True):
        context = tokenizer().encode(f"{document['question']}\nAnswer:", False)
        for choice, ((logprob, greedy),) in zip(document["choices"], sample["resps"], strict=True):
            whole = tokenizer().encode(f"{document['question']}\nAnswer: {choice}", False)
            # The harness keeps the context's own tokens, also where the text of both would be cut otherwise.
            logprobs, likeliest = scored(client, [*context, *whole[len(context) :]])
            assert float(logprob) == pytest.approx(total(logprobs[len(context) :]), abs=1e-3)
            assert greedy == str(all(likeliest[len(context) :]))


def test_a_rolling_likelihood_is_that_of_the_echo(samples: dict[str, list[dict[str, Any]]], client: OpenAI) -> None:
    for document, sample in zip(DOCUMENTS, samples["perplexity"], strict=True):
        logprobs, _ = scored(client, tokenizer().encode(document["question"]))  # after the beginning of a text
        ((logprob,),) = sample["resps"]
        assert float(logprob) == pytest.approx(total(logprobs), abs=1e-3)


def test_a_generated_text_is_that_of_the_greedy_answer(
    samples: dict[str, list[dict[str, Any]]], client: OpenAI
) -> None:
    for document, sample in zip(DOCUMENTS, samples["text"], strict=True):
        prompt = tokenizer().encode(document["question"], False)
        answer = client.completions.create(model="mini", prompt=prompt, temperature=0, max_tokens=12, stop=["."])
        ((text,),) = sample["resps"]
        assert text == answer.choices[0].text
