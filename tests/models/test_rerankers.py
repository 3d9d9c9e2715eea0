"""Rerankers against transformers: the logit of a pair, its tokens, and what makes a score of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from headrace import LLM
from headrace.errors import ModelError, RequestError
from headrace.models.spec import RankingSpec
from headrace.models.text.pair_encoder import PairEncoder
from headrace.models.text.tokenizer import Tokenizer as OwnTokenizer
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import RERANKERS, Reference, prompt, saved_config, spec_of

Tiny = Callable[[str], Reference]
QUERY = "which wheel turns the mill"
DOCUMENTS = ["the water turns the wheel", "grain", "the stones turn and the grain becomes flour " * 8, "wheels"]


def load_tokenizer(folder: Path) -> OwnTokenizer:
    return OwnTokenizer.load(folder, 320)


def opened(folder: Path) -> LLM:
    return LLM(folder, weights="f32", kv="f32", context=CONTEXT, threads=2, cache=False)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_transformers(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    ranking = spec_of(saved_config(reference), reference.folder).ranking
    assert ranking is not None
    with opened(reference.folder) as llm:
        for length in (1, 17, 300):
            request = llm._asking.rank("", [""])[0]
            second = length // 2 if ranking.typed else -1
            tokens = prompt(length)
            changed = type(request)(id=f"t{length}", prompt=tuple(tokens), kind="embed", second_text=second)
            ((answer,),) = llm._run([changed])
            found = float(np.frombuffer(answer.vector or b"", "<f4")[-1])
            expected = reference.rank(tokens, second)
            assert abs(found - expected) < 1e-4 * max(1.0, abs(expected))
            assert ranking.score([expected]) == pytest.approx(1 / (1 + np.exp(-expected)))


def test_original_qwen3_reranker_scores_yes_against_no(tiny: Tiny, tmp_path: Path) -> None:
    reference = tiny("qwen3")
    shutil.copytree(reference.folder, tmp_path / "m")
    words = ("t", "Ġthe")  # tokens of the tiny vocabulary
    config = saved_config(reference) | {"classifier_from_token": list(words), "is_original_qwen3_reranker": True}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((tmp_path / "m" / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = (vocabulary[word] for word in words)
    with opened(tmp_path / "m") as llm:
        scores = llm.rerank(QUERY, DOCUMENTS[:2], instruction="find the wheel")
        for document, score in zip(DOCUMENTS[:2], scores, strict=True):
            text = f"<Instruct>: find the wheel\n<Query>: {QUERY}\n<Document>: {document}"
            whole = (
                "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
                text,
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            )
            encode = llm.tokenizer.encode
            logits = reference.logits([token for part in whole for token in encode(part, add_special_tokens=False)])
            chances = torch.softmax(torch.tensor(logits[-1][[no, yes]]), 0)
            assert score == pytest.approx(float(chances[1]), abs=1e-4)
        with pytest.raises(RequestError, match="reranker"):
            llm.generate("the", max_tokens=2)


def pair_reranker(folder: Path, tiny: Tiny) -> Path:
    """The tiny BERT reranker with a tokenizer that joins two texts as BERT's does."""
    reference = tiny("bert-reranker")
    shutil.copytree(reference.folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_query_and_documents_are_scored_as_pairs_of_the_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    folder = pair_reranker(tmp_path / "m", tiny)
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with opened(folder) as llm:
        together = llm.rerank(QUERY, DOCUMENTS)
        for document, score in zip(DOCUMENTS, together, strict=True):
            given = fast(QUERY, document, return_token_type_ids=True)
            second = given["token_type_ids"].index(1)
            logit = tiny("bert-reranker").rank(given["input_ids"], second)
            assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)
            assert llm.rerank(QUERY, [document]) == [score]  # the same bits alone


@pytest.mark.parametrize("most", [9, 24, 40])
def test_a_pair_is_shortened_as_transformers_shortens_it(most: int, tiny: Tiny, tmp_path: Path) -> None:
    folder = pair_reranker(tmp_path / "m", tiny)
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    own = load_tokenizer(folder)
    for query, document in ((QUERY, DOCUMENTS[2]), (DOCUMENTS[2], QUERY), (DOCUMENTS[2], DOCUMENTS[2])):
        expected = fast(query, document, truncation="longest_first", max_length=most, return_token_type_ids=True)
        encoder = PairEncoder(own, RankingSpec(template="pair", activation="sigmoid", typed=True), query, context=most)
        pair = encoder.encode(document, cut=True)
        assert list(pair.tokens) == expected["input_ids"]
        assert pair.cut
        assert [int(place >= pair.second_text) for place in range(len(pair.tokens))] == expected["token_type_ids"]
        with pytest.raises(RequestError, match="tokens together"):
            encoder.encode(document)


def test_markers_in_a_text_stay_text_in_a_pair(tiny: Tiny, tmp_path: Path) -> None:
    folder = pair_reranker(tmp_path / "m", tiny)
    encoder = PairEncoder(
        load_tokenizer(folder), RankingSpec(template="pair", activation="sigmoid"), "mill</s>", context=64
    )
    assert encoder.encode("</s> the <s>").tokens.count(1) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "classifier with 2 labels"),
        ({"id2label": None}, "classifier with 2 labels"),
        ({"num_labels": 3}, "num_labels.*3 labels"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.ReLU"}}, "activation_fn.*Sigmoid"),
    ],
)
def test_classifiers_that_are_no_rerankers_are_refused(values: dict[str, Any], message: str, tiny: Tiny) -> None:
    reference = tiny("bert-reranker")
    with pytest.raises(ModelError, match=message):
        spec_of(saved_config(reference) | values, reference.folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0"}},
            "identity",
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ],
)
def test_a_rerankers_activation_is_read(values: dict[str, Any], expected: str, tiny: Tiny) -> None:
    ranking = spec_of(saved_config(tiny("bert-reranker")) | values).ranking
    assert ranking is not None
    assert ranking.activation == expected
    assert ranking.score([0.0]) == (0.5 if expected == "sigmoid" else 0.0)


def test_a_reranker_makes_no_embeddings_and_an_embedder_reranks_nothing(tiny: Tiny) -> None:
    with opened(tiny("bert-reranker").folder) as llm, pytest.raises(RequestError, match="makes no embeddings"):
        llm.embed("the mill")
    with opened(tiny("bert").folder) as llm, pytest.raises(RequestError, match="not a reranker"):
        llm.rerank("the mill", ["wheel"])
