"""EAGLE-3 layers on disk: what is written is read back, and what cannot be read is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.draft_heads import open_draft_heads
from headrace.models.eagle3_layer import (
    Eagle3Layer,
    chosen_layers,
    eagle3_config,
    eagle3_shapes,
    eagle3_spec,
    write_eagle3,
)
from headrace.models.model_folder import open_model
from headrace.models.spec import ModelSpec
from tests.support.models.eagle3_drafter import CHOSEN, drafter_config, drafter_tensors, nested_config, write_drafter


@pytest.fixture(scope="module")
def spec(tiny_folder: Path) -> ModelSpec:
    return open_model(tiny_folder).spec


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_a_layer_is_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    config = eagle3_config(spec, base="tiny", vocabulary=3)
    own = eagle3_spec(ConfigJson(config, path=tmp_path), spec, 3)
    size = spec.hidden_size
    layer = Eagle3Layer(
        own,
        chosen_layers(len(spec.layers)),
        numbers(size, 3 * size),
        {name: numbers(*shape) for name, shape in eagle3_shapes(own).items()},
        token_norm=numbers(size),
        state_norm=None,
        norm=numbers(size),
        head=numbers(3, size),
        tokens=np.array([1, 9, 4095], dtype=np.int32),
    )
    write_eagle3(tmp_path, layer, config)
    found = open_draft_heads(tmp_path, spec)
    assert isinstance(found, Eagle3Layer)
    assert found.spec == own
    assert found.reads == (1, 3, 5)
    assert found.tokens is not None
    assert found.tokens.tolist() == [1, 9, 4095]
    assert found.tensors.keys() == layer.tensors.keys()
    assert all(np.array_equal(found.tensors[name], layer.tensors[name]) for name in layer.tensors)
    for name in ("join", "token_norm", "norm", "head"):
        assert np.array_equal(getattr(found, name), getattr(layer, name))


def test_layers_are_counted_as_the_other_programs_do(spec: ModelSpec, tmp_path: Path) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    for config, expected in (
        ({}, (2, 3, 3)),
        ({name: [0, 2, 5]}, (0, 2, 5)),
        ({"eagle_config": {name: [0, 2, 4]}}, (1, 3, 5)),
        ({"eagle_config": {name: [0, 2, 4]}, name: [0, 2, 4]}, (0, 2, 4)),
    ):
        write_drafter(tmp_path, drafter_config(spec, **config), drafter_tensors(spec))
        found = open_draft_heads(tmp_path, spec)
        assert isinstance(found, Eagle3Layer)
        assert found.reads == expected
    assert chosen_layers(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({"num_hidden_layers": 2}, {}, "drafters of one layer"),
        ({"hidden_act": "gelu"}, {}, "the activation must be silu"),
        ({"layer_types": ["sliding_attention"]}, {}, "Expected full_attention"),
        ({"num_key_value_heads": 3}, {}, "Must divide num_attention_heads"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "reads one hidden state"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, {}, "integers from 0 to 5"),
        ({"norm_before_fc": True}, {}, r"input_norm\.weight.*Is missing"),
        ({}, {"fc_norm.0.weight": numbers(128)}, r"fc_norm\.0\.weight.*not a tensor of an EAGLE-3 layer"),
        ({}, {"mask_hidden": numbers(1, 384)}, "mask_hidden.*not a tensor of an EAGLE-3 layer"),
        ({}, {"midlayer.hidden_norm.weight": None}, "hidden_norm"),
        ({}, {"fc.weight": numbers(128, 256)}, "Expected 128x384: these heads belong to another model"),
        ({}, {"norm.weight": np.full(128, np.nan, np.float32)}, "NaN"),
        ({}, {"d2t": np.full(CHOSEN, 4095)}, "different tokens"),
        ({}, {"d2t": np.full(CHOSEN, np.iinfo(np.int64).max)}, "different tokens"),
        ({}, {"d2t": None}, "Expected 4096x128"),
        ({"hidden_size": 64}, {}, "Expected 64x384"),
    ],
)
def test_what_cannot_be_read_is_named(
    config: dict[str, Any], tensors: dict[str, Any], reason: str, spec: ModelSpec, tmp_path: Path
) -> None:
    stored = drafter_tensors(spec) | tensors
    kept = {name: each for name, each in stored.items() if each is not None}
    write_drafter(tmp_path, drafter_config(spec, **config), kept)
    with pytest.raises(ModelError, match=reason):
        open_draft_heads(tmp_path, spec)


def test_speculators_configs_say_where_the_residual_begins(spec: ModelSpec, tmp_path: Path) -> None:
    config = nested_config(spec)
    del config["norm_before_residual"]
    write_drafter(tmp_path, config, drafter_tensors(spec, "layers.0"))
    with pytest.raises(ModelError, match=r"norm_before_residual.*missing"):
        open_draft_heads(tmp_path, spec)
