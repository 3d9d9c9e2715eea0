"""Variants are measured beside a reference on the same tokens, and what cannot be compared is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench.evaluation.documents import Document
from headrace.bench.evaluation.evaluation import EvaluationOptions, EvaluationProgress, evaluate_variants
from headrace.bench.evaluation.evaluation_report import EvaluationReport
from headrace.errors import ModelError, RequestError
from headrace.llm import LLM
from headrace.models.synthetic.random_model import write_random_model
from headrace.variant import Variant

TEXT = " ".join(f"The mill stands by the river, and number {n} is open." for n in range(30))
QUIET = EvaluationOptions(window=64, speed=False)


def variant(folder: Path, weights: str, **options: Any) -> Variant:
    return Variant.of(str(folder), weights=weights, **({"threads": 2, "cache": False} | options))


def evaluated(variants: list[Variant], options: EvaluationOptions = QUIET, **more: Any) -> EvaluationReport:
    return evaluate_variants([Document(prompt=TEXT)], variants, source="text", options=options, **more)


@pytest.fixture(scope="module")
def table(tiny_folder: Path) -> EvaluationReport:
    names = ("f32", "bf16", "int8", "int4-channel")
    reference, *others = (variant(tiny_folder, name) for name in names)
    return evaluated(others, reference=reference)


def test_a_table_has_the_reference_first_and_less_fidelity_with_fewer_bits(table: EvaluationReport) -> None:
    assert [row.weights for row in table.variants] == ["f32", "bf16", "int8-g128", "int4-channel"]
    assert table.variants[0].distance is None
    distances = [row.distance for row in table.variants[1:] if row.distance is not None]
    assert len(distances) == 3
    losses = [found.kl.value for found in distances]
    assert 0 <= losses[0] < losses[1] < losses[2]  # bf16 loses nothing where rows and products stay in f32
    agreements = [found.top1.value for found in distances]
    assert agreements == sorted(agreements, reverse=True)
    sizes = [row.weight_bytes for row in table.variants]
    assert sizes == sorted(sizes, reverse=True)
    for found in distances:
        assert found.kl.low is not None
        assert found.kl.high is not None
        assert found.kl.low <= found.kl.value <= found.kl.high <= found.kl_max


def test_the_perplexity_change_is_the_ratio_of_the_perplexities(table: EvaluationReport) -> None:
    reference, *others = table.variants
    for row in others:
        assert row.distance is not None
        ratio = row.perplexity.value / reference.perplexity.value - 1
        assert row.distance.perplexity_change.value == pytest.approx(ratio, rel=1e-9, abs=1e-12)


def test_a_single_model_has_the_perplexity_that_the_engine_s_log_probabilities_give(tiny_folder: Path) -> None:
    report = evaluated([variant(tiny_folder, "bf16")], EvaluationOptions(window=64, tokens=40, speed=False))
    assert report.tokens == 40
    with LLM(tiny_folder, weights="bf16", threads=2, cache=False, context=256) as llm:
        before, _ = llm.tokenizer.frame
        ids = [*before, *llm.tokenizer.encode(TEXT, add_special_tokens=False)]
        ids = ids[: 40 + max(1, len(before))]
        (reported,) = llm.score([(ids[:1], ids[1:])])
    (row,) = report.variants
    assert row.distance is None
    # The first window alone covers these tokens, so both saw the same context.
    assert row.perplexity.value == pytest.approx(np.exp(-reported.logprob / len(reported.tokens)), rel=1e-5)
    assert row.loss.value == pytest.approx(np.log(row.perplexity.value))


def test_the_cost_of_the_kv_precision_is_measured_the_same_way(tiny_folder: Path) -> None:
    report = evaluated([variant(tiny_folder, "f32", kv="int8")], reference=variant(tiny_folder, "f32", kv="f32"))
    reference, row = report.variants
    assert row.distance is not None
    assert row.distance.kl.value > 0
    assert row.weight_bytes == reference.weight_bytes
    assert row.kv_bytes_per_token < reference.kv_bytes_per_token


def test_two_models_with_one_tokenizer_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    write_random_model("tiny", tmp_path / "other", seed=2)
    report = evaluated([variant(tiny_folder, "bf16")], reference=variant(tmp_path / "other", "bf16"))
    assert report.variants[1].distance is not None
    assert report.variants[1].distance.kl.value > 0.5


def test_speeds_are_measured_unless_switched_off(tiny_folder: Path, table: EvaluationReport) -> None:
    assert table.speed_prompt is None
    assert table.variants[0].speed is None
    timed = evaluated([variant(tiny_folder, "int8")], EvaluationOptions(window=64, tokens=60))
    assert timed.variants[0].speed is not None
    assert timed.speed_prompt == 61


def test_progress_covers_every_variant_and_ends_complete(tiny_folder: Path) -> None:
    seen: list[EvaluationProgress] = []
    evaluated(
        [variant(tiny_folder, "bf16"), variant(tiny_folder, "int8")],
        reference=variant(tiny_folder, "f32"),
        watch=seen.append,
    )
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert seen[-1].done == seen[-1].total == seen[0].total
    assert {each.variant for each in seen} == {"tiny bf16", "tiny int8"}


def test_a_model_with_another_tokenizer_is_refused(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    other = copy_of(tiny_folder)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    (a, first), (b, second) = list(vocabulary.items())[40:42]
    vocabulary[a], vocabulary[b] = second, first
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=f"different tokenizers: token {min(first, second)} is .*same tokenizer"):
        evaluated([variant(tiny_folder, "bf16")], reference=variant(other, "bf16"))


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"window": 8}, "window"),
        ({"window": 100_000}, "window"),
        ({"window": 64, "stride": 65}, "stride"),
        ({"window": 64, "stride": 0}, "stride"),
        ({"tokens": 0}, "tokens"),
    ],
)
def test_sizes_out_of_range_name_their_parameter(tiny_folder: Path, options: dict[str, int], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        evaluated([variant(tiny_folder, "bf16")], EvaluationOptions(speed=False, **options))
    assert caught.value.parameter == parameter


def test_a_text_without_a_token_to_predict_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match="too short"):
        evaluate_variants([Document()], [variant(tiny_folder, "bf16")], source="text", options=QUIET)


def test_an_encoder_a_missing_model_and_a_wrong_precision_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    write_random_model("minilm-l6", tmp_path / "encoder")
    with pytest.raises(RequestError, match="BertModel is an encoder"):
        evaluated([variant(tmp_path / "encoder", "bf16")])
    with pytest.raises((ModelError, RequestError), match="nothing-there"):
        evaluated([variant(tmp_path / "nothing-there", "bf16")])
    with pytest.raises(RequestError, match="Unknown precision 'int7'"):
        evaluated([variant(tiny_folder, "bf16"), variant(tiny_folder, "int7")])
