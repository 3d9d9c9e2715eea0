"""Folders of draft heads: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.draft_heads import (
    EagleLayer,
    HeadBlock,
    MedusaHeads,
    eagle_config,
    eagle_shapes,
    eagle_spec,
    open_draft_heads,
    write_eagle,
    write_medusa,
)
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import open_model
from headrace.models.spec import ModelSpec


@pytest.fixture(scope="module")
def spec(tiny_folder: Path) -> ModelSpec:
    return open_model(tiny_folder).spec


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def store(path: Path, tensors: dict[str, Any]) -> None:
    kinds = {"float32": "F32", "int64": "I64"}
    write_safetensors(
        path,
        {
            name: (kinds[str(value.dtype)], value.shape, lambda value=value: [value.reshape(-1).view(np.uint8)])
            for name, value in tensors.items()
        },
    )


def published(size: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Two Medusa heads of one block, each with its own product to the vocabulary."""
    found = {}
    for head in range(2):
        found |= {
            f"{head}.0.linear.weight": numbers(size, size),
            f"{head}.0.linear.bias": numbers(size),
            f"{head}.1.weight": numbers(vocab, size),
        }
    return found | more


def test_medusa_heads_are_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    size = spec.hidden_size
    tokens = np.array([3, 5, 200], dtype=np.int32)
    heads = MedusaHeads([[HeadBlock(numbers(size, size), numbers(size))] for _ in range(3)], [], tokens)
    write_medusa(tmp_path, heads, base="tiny")
    found = open_draft_heads(tmp_path, spec)
    assert isinstance(found, MedusaHeads)
    assert found.count == 3
    assert found.tokens is not None
    assert found.tokens.tolist() == [3, 5, 200]
    assert np.array_equal(found.blocks[2][0].weight, heads.blocks[2][0].weight)
    assert json.loads((tmp_path / "config.json").read_text())["medusa_num_heads"] == 3


def test_published_medusa_heads_have_their_own_products(spec: ModelSpec, tmp_path: Path) -> None:
    tensors = published(spec.hidden_size, spec.vocab_size)
    store(tmp_path / "medusa_lm_head.safetensors", tensors)
    found = open_draft_heads(tmp_path, spec)
    assert isinstance(found, MedusaHeads)
    assert found.tokens is None
    assert [np.array_equal(own, tensors[f"{head}.1.weight"]) for head, own in enumerate(found.outputs)] == [True, True]
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    found = open_draft_heads(tmp_path, spec)
    assert isinstance(found, MedusaHeads)
    assert (found.count, len(found.outputs)) == (1, 1)


def test_an_eagle_layer_is_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    config = eagle_config(spec, base="tiny")
    own = eagle_spec(ConfigJson(config, path=tmp_path), spec, 2)
    tensors = {name: numbers(*shape) for name, shape in eagle_shapes(own).items()}
    size = spec.hidden_size
    layer = EagleLayer(own, numbers(size, 2 * size), numbers(size), tensors, np.array([1, 9], dtype=np.int32))
    write_eagle(tmp_path, layer, config)
    found = open_draft_heads(tmp_path, spec)
    assert isinstance(found, EagleLayer)
    assert found.spec == own
    assert found.tensors.keys() == tensors.keys()
    assert all(np.array_equal(found.tensors[name], tensors[name]) for name in tensors)
    assert np.array_equal(found.join, layer.join)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"0.0.linear.weight": numbers(8, 8)}, "Expected .*: these heads belong to another model"),
        ({"1.1.weight": None}, "Some heads have a product to the vocabulary"),
        ({"0.0.linear.bias": np.full(64, np.nan, np.float32)}, "NaN|shape"),
        ({"token_map": np.array([1, 1])}, "different tokens"),
        ({"token_map": np.array([10**6])}, "different tokens"),
        ({"0.0.linear.weight": None}, "no Medusa heads"),
    ],
)
def test_wrong_heads_are_refused_with_the_reason(
    changes: dict[str, Any], reason: str, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = published(spec.hidden_size, spec.vocab_size) | changes
    store(tmp_path / "medusa_lm_head.safetensors", {name: each for name, each in tensors.items() if each is not None})
    with pytest.raises(ModelError, match=reason):
        open_draft_heads(tmp_path, spec)


def test_folders_without_heads_say_what_is_expected(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        open_draft_heads(tmp_path / "missing", spec)
    with pytest.raises(ModelError, match=r"neither medusa_lm_head.safetensors \(Medusa\) nor model.safetensors"):
        open_draft_heads(tmp_path, spec)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="may execute code and is not read"):
        open_draft_heads(tmp_path, spec)
    store(tmp_path / "model.safetensors", {"x": numbers(2)})
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(spec, base="tiny")))
    with pytest.raises(ModelError, match="no EAGLE layer"):
        open_draft_heads(tmp_path, spec)
