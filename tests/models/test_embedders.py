"""Decoders that make embeddings, against transformers: pooling, attention both ways, and names without a prefix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from numpy.typing import NDArray

from headrace import LLM
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import embed, logits
from headrace.errors import RequestError
from headrace.models.model_folder import open_model
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import Reference, prompt
from tests.support.models.minilm import minilm_folder

Tiny = Callable[[str], Reference]
MODULES = [
    {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for index, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_N")])
]


def embedder(folder: Path, source: Path, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Path:
    """Write a copy that pools the last token, as Qwen3-Embedding is published; `change` renames or adds tensors."""
    shutil.copytree(source, folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    if change is not None:
        path = folder / "model.safetensors"
        safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)
    return folder


def load(folder: Path) -> CpuExecutor:
    return CpuExecutor.load(open_model(folder), weights="f32", kv="f32", threads=2, context=CONTEXT)


def last_hidden(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        state = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
    return state / np.linalg.norm(state)


def test_a_decoders_embedding_is_its_last_token_if_its_files_say_so(tiny: Tiny, tmp_path: Path) -> None:
    reference = tiny("qwen3")

    def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    folder = embedder(tmp_path / "e", reference.folder, without_prefix)
    spec = open_model(folder).spec
    assert (spec.kind, spec.pooling, spec.normalise_embedding) == ("decoder", "last", True)
    executor = load(folder)
    for length in (1, 17, 300):
        tokens = prompt(length)
        assert embed(executor, [tokens])[0] @ last_hidden(reference.model, tokens) == pytest.approx(1.0, abs=1e-5)
    # It still generates.
    assert np.abs(logits(executor, [prompt(9)])[0] - reference.logits(prompt(9))).max() < 1e-3


def test_the_engine_gives_the_same_vector_as_transformers(tiny: Tiny) -> None:
    reference = tiny("qwen2-both-ways")
    with LLM(reference.folder, weights="f32", kv="f32", context=CONTEXT, kv_tokens=2048, cache=False) as llm:
        for length in (5, 300):
            found = llm.embed([prompt(length)])[0]
            expected = reference.embedding(prompt(length))
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
        with pytest.raises(RequestError, match="makes embeddings, not text"):
            llm.generate([prompt(5)], max_tokens=2)


@pytest.mark.parametrize("name", ["bert-max", "bert-weighted", "bert-sqrt", "embedding-gemma", "mpnet", "modernbert"])
def test_the_engine_pools_as_sentence_transformers_does(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    with LLM(reference.folder, weights="f32", kv="f32", context=CONTEXT, kv_tokens=2048, threads=2, cache=False) as llm:
        for length in (1, 300):
            found = llm.embed([prompt(length)])[0]
            expected = reference.embedding(prompt(length))
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_decoder_pools_the_same_however_its_text_is_split(tiny: Tiny, tmp_path: Path) -> None:
    for mode in ("max", "weightedmean"):
        folder = embedder(tmp_path / mode, tiny("qwen3").folder)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        found: list[bytes] = []
        for rows in (512, 32):
            with LLM(folder, weights="f32", kv="f32", context=CONTEXT, max_rows=rows, threads=2, cache=False) as llm:
                found.append(llm.embed([prompt(300)])[0].tobytes())
        assert found[0] == found[1]


def test_a_tied_config_with_another_head_in_the_files_uses_the_head(tiny: Tiny, tmp_path: Path) -> None:
    reference = tiny("qwen3")
    generator = np.random.default_rng(5)

    def with_head(tensors: dict[str, Any]) -> dict[str, Any]:
        shape = tensors["model.embed_tokens.weight"].shape
        return tensors | {"lm_head.weight": generator.normal(size=shape).astype(np.float32)}

    shutil.copytree(reference.folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    safetensors.numpy.save_file(with_head(safetensors.numpy.load_file(path)), path, {"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt(17)])).logits[0].numpy()
    assert not open_model(tmp_path / "m").spec.tied
    found = logits(load(tmp_path / "m"), [prompt(17)])[0]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_tied_config_with_the_same_head_in_the_files_stays_tied(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("qwen3").folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    assert open_model(tmp_path / "m").spec.tied


def test_a_real_encoder_keeps_its_vectors_at_int8() -> None:
    words = "the water runs down to the narrow wheel and turns it over while grain becomes flour between stones".split()
    generator = np.random.default_rng(3)
    made = [" ".join(generator.choice(words, size)) for size in (2, 5, 9, 20, 60) for _ in range(4)]
    texts = [*made, "How do I cancel my subscription?", "def f(x):\n    return x + 1", "Crème brûlée, 3.50 €", "no"]

    def vectors(weights: str) -> NDArray[np.float32]:
        with LLM(minilm_folder(), weights=weights, threads=2, cache=False) as llm:
            return llm.embed(texts)

    exact = vectors("f32")
    cosines = (vectors("int8") * exact).sum(axis=1)
    assert cosines.mean() >= 0.999
    assert cosines.min() >= 0.997  # of one short word; 0.998 for all longer texts
    assert np.sort(cosines)[1] >= 0.998
    coarse = (vectors("int8-g128") * exact).sum(axis=1)
    assert (cosines.mean(), cosines.min()) > (coarse.mean(), coarse.min())


def test_a_text_is_cut_if_the_caller_says_so() -> None:
    with LLM(minilm_folder(), weights="f32", threads=2, context=16, cache=False) as llm:
        long = "the water runs down to the narrow wheel and turns it over while grain becomes flour between stones"
        with pytest.raises(RequestError, match="do not fit"):
            llm.embed(long)
        cut = llm.embed(long, truncate=True)
        assert (
            cut.tobytes()
            == llm.embed("the water runs down to the narrow wheel and turns it over while grain").tobytes()
        )
        assert llm.embed([101, *range(2000, 2030)], truncate=True).shape == (1, 384)


def test_a_prompt_of_the_model_is_put_before_a_text(tmp_path: Path) -> None:
    shutil.copytree(minilm_folder(), tmp_path / "m")
    (tmp_path / "m" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find: "}}))
    with LLM(tmp_path / "m", weights="f32", threads=2, cache=False) as llm:
        assert llm.embed("wheels", prompt_name="query").tobytes() == llm.embed("find: wheels").tobytes()
        assert llm.embed("wheels").tobytes() != llm.embed("find: wheels").tobytes()
        with pytest.raises(RequestError, match="Its prompts are query"):
            llm.embed("wheels", prompt_name="other")
