"""Reading the pooling of an encoder's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
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
        ([TRANSFORMER, POOLING, module("Dense", "2_Dense")], {}, "'Dense' is not supported"),
        ([TRANSFORMER, module("Pooling", "../elsewhere")], {}, "path.*folder inside"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "max"}, "pooling_mode.*one of cls, lasttoken, mean"),
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
