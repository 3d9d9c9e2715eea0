"""Reading the pooling and the prompts of an embedder's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError, RequestError
from headrace.models.sentence_files import read_prompts
from headrace.models.spec import PooledLayer
from tests.models.tiny_models import Reference, saved_config, spec_of

Tiny = Callable[[str], Reference]


def pooling_folder(folder: Path, modules: list[dict[str, Any]] | None, pooling: dict[str, Any] | None = None) -> Path:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def module(kind: str, path: str) -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


TRANSFORMER, POOLING, NORMALIZE = module("Transformer", ""), module("Pooling", "1_Pooling"), module("Normalize", "2_N")


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, ("mean", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, ("mean", False)),
        ([TRANSFORMER, POOLING], {"word_embedding_dimension": 64}, ("mean", False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode_cls_token": True}, ("cls", True)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "lasttoken", "include_prompt": True}, ("last", True)),
    ],
)
def test_pooling_is_read_as_sentence_transformers_reads_it(
    modules: list[dict[str, Any]] | None,
    pooling: dict[str, Any] | None,
    expected: tuple[str, bool],
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    spec = spec_of(saved_config(tiny("bert")), pooling_folder(tmp_path, modules, pooling))
    assert (spec.pooling, spec.normalise_embedding) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([TRANSFORMER], None, "Pooling module is missing"),
        ([TRANSFORMER, POOLING], None, "1_Pooling.*does not exist"),
        ([TRANSFORMER, POOLING, module("Dense", "2_Dense")], {}, "2_Dense.*does not exist"),
        ([TRANSFORMER, POOLING, module("LayerNorm", "2_LayerNorm")], {}, "'LayerNorm' is not supported"),
        ([TRANSFORMER, module("Dense", "2_Dense"), POOLING], {}, "'Dense' is not supported"),
        ([TRANSFORMER, module("Pooling", "../elsewhere")], {}, "path.*folder inside"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "first_two"}, "pooling_mode.*one of cls, lasttoken"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "Pooling cls and mean is not supported",
        ),
        ([TRANSFORMER, POOLING], {"include_prompt": False}, "include_prompt"),
        ([7], None, "Expected an object"),
        ([TRANSFORMER] * 40, None, "at most 16"),
    ],
)
def test_pooling_that_is_not_supported_is_refused(
    modules: list[Any], pooling: dict[str, Any] | None, message: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(saved_config(tiny("bert")), pooling_folder(tmp_path, modules, pooling))


def test_embedder_made_for_shorter_texts_says_so(tiny: Tiny, tmp_path: Path) -> None:
    values = saved_config(tiny("bert"))
    assert spec_of(values, tmp_path).context == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    spec = spec_of(values, tmp_path)
    assert (spec.context, spec.learned_positions) == (256, 512)


def test_prompts_are_read_with_the_default_one(tmp_path: Path) -> None:
    assert read_prompts(tmp_path).text(None) == ""
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"}))
    prompts = read_prompts(tmp_path)
    assert (prompts.text("query"), prompts.text("document"), prompts.text(None)) == ("Find: ", "", "Find: ")
    with pytest.raises(RequestError, match=r"no prompt 'other'\. Its prompts are document, query"):
        prompts.text("other")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": {"query": 3}}, "prompts.query.*a string"),
        ({"prompts": ["query"]}, "prompts.*an object"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "default_prompt_name.*one of a"),
    ],
)
def test_broken_prompts_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=message):
        read_prompts(tmp_path)


def dense_folder(folder: Path, **values: Any) -> Path:
    pooling_folder(folder, [TRANSFORMER, POOLING, module("Dense", "2_Dense"), NORMALIZE], {})
    (folder / "2_Dense").mkdir()
    config = {"in_features": 64, "out_features": 24, "bias": False, "activation_function": "torch.nn.Identity"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config | values))
    return folder


def test_dense_modules_are_layers_after_pooling(tiny: Tiny, tmp_path: Path) -> None:
    spec = spec_of(saved_config(tiny("bert")), dense_folder(tmp_path))
    assert spec.pooled_layers == (PooledLayer(inputs=64, outputs=24, bias=False, activation="identity"),)
    assert (spec.vector_size, spec.normalise_embedding) == (24, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"in_features": 32}, "in_features.*32.*Expected 64"),
        ({"activation_function": "torch.nn.Softmax"}, "activation_function.*Identity"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_dense_modules_that_do_something_else_are_refused(
    values: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(saved_config(tiny("bert")), dense_folder(tmp_path, **values))
