"""Adapter folders: patterns, and what cannot be served is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.models.adapters.adapter_config import ADAPTER_CONFIG, read_adapter_config
from headrace.models.adapters.adapter_folder import ADAPTER_FILE, adapter_digest, read_adapter
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.model_folder import open_model
from tests.support.models.lora_folders import write_adapter_files, write_lora

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def changed(folder: Path, **keys: Any) -> Path:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | keys), encoding="utf-8")
    return folder


def test_patterns_choose_rank_and_scale_as_peft_does(tiny_folder: Path, tmp_path: Path) -> None:
    folder = open_model(tiny_folder)
    path = write_lora(folder, tmp_path / "a", rank=4, alpha=8, ranks={"q_proj": 2})
    config = read_adapter_config(changed(path, alpha_pattern={r"model\.layers\.0\..*v_proj": 3, "o_proj": 1}))
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 4.0
    assert config.scale_of("model.layers.0.self_attn.v_proj") == 0.75
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 2.0
    assert config.scale_of("model.layers.1.self_attn.o_proj") == 0.25
    assert read_adapter_config(changed(path, use_rslora=True)).scale_of("model.layers.1.mlp.up_proj") == 4.0
    assert len(read_adapter(path, folder).parts) == 7 * len(folder.spec.layers)


def test_the_digest_is_of_the_content(tiny_folder: Path, tmp_path: Path) -> None:
    folder = open_model(tiny_folder)
    one, same, other = (write_lora(folder, tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert adapter_digest(one) == adapter_digest(same) != adapter_digest(other)
    assert adapter_digest(changed(same, lora_alpha=9)) != adapter_digest(one)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' is 'LOHA'. Only LORA"),
        ({"bias": "all"}, "'bias' is set to 'all'"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is set to \"\\['lm_head'\\]\""),
        ({"lora_bias": True}, "'lora_bias' is set"),
        ({"layer_replication": [[0, 4]]}, "'layer_replication' is set"),
        ({"trainable_token_indices": [1]}, "'trainable_token_indices' is set"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is set"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa', which changes the base"),
        ({"r": 0}, "'r' must be a rank of 1 to 1024, not 0"),
        ({"r": "4"}, "'r' must be a number"),
        ({"lora_alpha": None}, "'lora_alpha' must be a number"),
        ({"use_rslora": "yes"}, "'use_rslora' must be true or false"),
        ({"rank_pattern": {"(a+)+": 4}}, "too complex"),
        ({"rank_pattern": {".*" * 12 + "x": 4}}, "too complex"),
        ({"alpha_pattern": {"(.|.)" * 9 + "x": 4}}, "too complex"),
        ({"rank_pattern": {f"{number}.*": 4 for number in range(65)}}, "65 patterns with wildcards"),
        ({"rank_pattern": {"(": 4}}, "invalid pattern"),
        ({"alpha_pattern": [4]}, "'alpha_pattern' must be an object"),
        ({"use_dora": True}, "'use_dora' is true, but 'model.layers.0.self_attn.q_proj' has no magnitude vector"),
        ({"r": 5}, r"lora_A.weight': The shape is \[4, \d+\], expected \[5, "),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    keys: dict[str, Any], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = open_model(tiny_folder)
    path = changed(write_lora(folder, tmp_path / "a"), **keys)
    with pytest.raises(ModelError, match=message):
        read_adapter(path, folder)


def test_folders_and_tensors_that_cannot_be_served_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = open_model(tiny_folder)
    with pytest.raises(ModelError, match="no such adapter folder"):
        read_adapter(tmp_path / "nowhere", folder)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, folder)
    path = write_lora(folder, tmp_path / "a")
    good = (path / ADAPTER_FILE).read_bytes()
    (path / ADAPTER_FILE).rename(path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"Files like adapter_model\.bin can run code"):
        read_adapter(path, folder)
    (path / ADAPTER_FILE).write_bytes(good[:-4])
    with pytest.raises(ModelError, match=ADAPTER_FILE):
        read_adapter(path, folder)

    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    size = folder.spec.hidden_size
    down, up = np.zeros((4, size)), np.zeros((folder.spec.q_size, 4))

    def refused(tensors: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            read_adapter(write_adapter_files(tmp_path / "b", config, tensors), folder)

    refused({f"{Q}.lora_A.weight": down}, "lora_B of 'model.layers.0.self_attn.q_proj' is missing")
    refused({f"{Q}.weight": down}, "no part of a LoRA adapter")
    unknown = "base_model.model.lm_head"
    refused({f"{unknown}.lora_A.weight": down, f"{unknown}.lora_B.weight": up}, "no module 'lm_head' .* may target")
    refused({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up[1:]}, "expected")
    up[1, 1] = np.nan
    refused({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, "not finite")
    refused({}, "no tensors")


def test_experts_are_refused_by_name(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = open_model(tiny("mixtral").folder)
    path = write_lora(folder, tmp_path / "a", targets=("q_proj", "v_proj"))
    assert len(read_adapter(path, folder).parts) == 2 * len(folder.spec.layers)
    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    name = "base_model.model.model.layers.0.mlp.experts.0.w1"
    tensors = {f"{name}.lora_A.weight": np.zeros((4, 64)), f"{name}.lora_B.weight": np.zeros((96, 4))}
    with pytest.raises(ModelError, match=r"experts\.0\.w1.* an adapter"):
        read_adapter(write_adapter_files(tmp_path / "b", config, tensors), folder)


def test_an_encoder_takes_no_adapter(tiny: Callable[[str], Any], tiny_folder: Path, tmp_path: Path) -> None:
    path = write_lora(open_model(tiny_folder), tmp_path / "a")
    with pytest.raises(ModelError, match="Only decoders take adapters"):
        read_adapter(path, open_model(tiny("bert").folder))


def test_keys_and_values_that_a_layer_does_not_read_are_left_out(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = open_model(tiny("gemma3n").folder)
    assert [layer.shares for layer in folder.spec.layers] == [None, None, None, 1, 2]
    path = write_lora(folder, tmp_path / "a", targets=("q_proj", "k_proj", "v_proj"))
    expected = read_adapter(path, folder)
    file = SafetensorsFile.open(path / ADAPTER_FILE)
    tensors = {name: file.dense(name).to_f32() for name in file.tensors}
    owner = "base_model.model.model.layers.1.self_attn"
    for layer in (3, 4):
        for leaf in ("k_proj", "v_proj"):
            for side in ("A", "B"):
                name = f"{leaf}.lora_{side}.weight"
                tensors[f"{owner.replace('s.1', f's.{layer}')}.{name}"] = tensors[f"{owner}.{name}"]
    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    found = read_adapter(write_adapter_files(tmp_path / "b", config, tensors), folder)
    assert [part.module for part in found.parts] == [part.module for part in expected.parts]
    assert not any(re.search(r"layers\.[34]\..*[kv]_proj", part.module) for part in found.parts)
    tensors[f"{owner}.x_proj.lora_A.weight"] = tensors[f"{owner}.k_proj.lora_A.weight"]
    with pytest.raises(ModelError, match="has no module"):
        read_adapter(write_adapter_files(tmp_path / "c", config, tensors), folder)
