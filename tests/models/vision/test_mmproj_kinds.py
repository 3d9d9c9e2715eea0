"""Image parts of Qwen-VL, Pixtral and Mistral 3 in a second GGUF file: features are those of the folder, and so are the
logits of the text part, whose ropes turn by places in images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.errors import ModelError
from headrace.models.model_folder import open_model
from headrace.models.vision.pixels import measure, read_tiles
from headrace.models.vision.vision_folder import open_vision
from tests.models.gguf.converted_weights import in_pairs
from tests.models.gguf.gguf_models import write_vocabulary
from tests.models.gguf.test_gguf_models import headrace_logits
from tests.models.tiny_models import prompt
from tests.models.vision.test_llava import LONGEST, write_llava
from tests.models.vision.test_qwen_vl import LEAST, MOST, write_qwen
from tests.support.models.tiny_vision import picture

pytest.importorskip("PIL.Image", reason="the extra vision is not installed")

PROJECTORS = {
    "qwen2": ("qwen2vl_merger", "qwen2vl"),
    "qwen2.5": ("qwen2.5vl_merger", "qwen2vl"),
    "qwen3": ("qwen3vl_merger", "qwen3vl"),
    "pixtral": ("pixtral", "llama"),
    "mistral3": ("pixtral", "llama"),
}
TABLE = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)


def write_folder(folder: Path, kind: str) -> Path:
    if kind in ("pixtral", "mistral3"):
        return write_llava(folder, kind)
    return write_qwen(folder, kind)


def write_text(path: Path, folder: Path, arch: str) -> None:
    """Write the text part of a folder."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if text.get("head_dim"):
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if arch == "qwen3vl":
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = "[IMG]" if token["content"] == "<image>" else token["content"]
    tokenizer["model"]["vocab"] = {
        "[IMG]" if token == "<image>" else token: id for token, id in tokenizer["model"]["vocab"].items()
    }
    write_vocabulary(writer, tokenizer)
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, text["num_hidden_layers"])
    for source, tensor in load_file(folder / "model.safetensors").items():
        name = source.replace("language_model.", "")
        name = name if name.startswith(("model.", "lm_head")) else f"model.{name}"
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None or "vision" in source or "visual" in source:
            continue
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(target.split(".")[-2])
        if arch == "llama" and heads is not None:
            tensor = in_pairs(tensor, text[heads])
        writer.add_tensor(target, np.ascontiguousarray(tensor.float().numpy()))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_image_part(path: Path, folder: Path, kind: str, change: Any = None) -> None:
    config = json.loads((folder / "config.json").read_text())
    vision, pixtral = config["vision_config"], kind in ("pixtral", "mistral3")
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(PROJECTORS[kind][0])
    hidden = vision.get("embed_dim", vision["hidden_size"])
    side = int(vision.get("num_position_embeddings", 36) ** 0.5) * vision["patch_size"]
    writer.add_vision_image_size(LONGEST if pixtral else side)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(hidden)
    # The converter of Qwen2-VL writes another size there.
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", vision["hidden_size"]))
    writer.add_vision_block_count(vision.get("depth") or vision["num_hidden_layers"])
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    writer.add_vision_projection_dim(64)
    writer.add_vision_attention_layernorm_eps(1e-5)
    layout = open_vision(folder).layout
    writer.add_vision_image_mean(list(layout.mean))
    writer.add_vision_image_std(list(layout.std))
    if not pixtral:
        writer.add_uint32("clip.vision.image_min_pixels", LEAST)
        writer.add_uint32("clip.vision.image_max_pixels", MOST)
    if kind == "qwen2.5":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(2)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
    if kind == "qwen3":
        writer.add_vision_use_gelu(True)
        stacked = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([layer in stacked for layer in range(vision["depth"])])
    if pixtral:
        writer.add_vision_use_gelu(True)
    if kind == "mistral3":
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    for source, tensor in load_file(folder / "model.safetensors").items():
        for target, values in image_tensors(source, tensor, vision, pixtral=pixtral):
            writer.add_tensor(target, np.ascontiguousarray(values.float().numpy()))
    if change is not None:
        change(writer)
    finish(writer)


def image_tensors(
    source: str, tensor: torch.Tensor, vision: dict[str, Any], *, pixtral: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    name = source.removeprefix("model.")
    if pixtral:
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            return
        if ".q_proj." in name or ".k_proj." in name:
            tensor = in_pairs(tensor, vision["num_attention_heads"])
        yield mapped(name), tensor
        return
    if not name.startswith("visual."):
        return
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif name.startswith("visual.deepstack_merger_list."):
        _, _, place, leaf, end = name.split(".")
        part = {"linear_fc1": "fc1", "linear_fc2": "fc2"}.get(leaf, leaf)
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(place)]}.{part}.{end}", tensor
    elif (name.startswith("visual.merger.") and "linear_fc" in name) or name.startswith("visual.merger.norm"):
        leaf, end = name.split(".")[2:]
        yield {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[leaf] + f".{end}", tensor
    elif ".qkv." in name and "deepstack_visual_indexes" not in vision:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield mapped(name.replace("qkv", part)), rows
    else:
        yield mapped(name), tensor


def mapped(name: str) -> str:
    found = TABLE.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@pytest.mark.parametrize("kind", PROJECTORS)
def test_features_and_logits_are_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(folder, kind)
    file = tmp_path / "model.gguf"
    write_text(file, folder, PROJECTORS[kind][1])
    write_image_part(tmp_path / "mmproj-f32.gguf", folder, kind)

    expected, found = open_vision(folder), open_vision(file)
    image = picture(60, 43)
    tiles = read_tiles(image, found.layout, 1_000_000)
    assert np.array_equal(tiles, read_tiles(image, expected.layout, 1_000_000))
    grid = found.layout.grid(measure(image, 1_000_000))
    features = [ImageEncoder(each, threads=2).encode(tiles, grid) for each in (expected, found)]
    assert np.abs(features[0] - features[1]).max() < 1e-5 * np.abs(features[0]).max()

    specs = [open_model(path).spec for path in (folder, file)]
    assert specs[0].ropes == specs[1].ropes
    assert specs[0].feature_layers == specs[1].feature_layers
    tokens = [token for token in prompt(30) if token < specs[0].vocab_size]
    logits = [headrace_logits(path, tokens) for path in (folder, file)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-5 * np.abs(logits[0]).max()


@pytest.mark.parametrize(
    ("kind", "key", "value", "reason"),
    [
        ("qwen2.5", "clip.use_silu", False, "another activation"),
        ("qwen2.5", "clip.vision.n_wa_pattern", 0, "n_wa_pattern': Expected an integer from 1"),
        ("qwen3", "clip.vision.patch_size", 0, "patch_size': Expected an integer from 1"),
        ("qwen3", "clip.vision.swiglu_clamp", 7, "swiglu_clamp': Headrace does not know this key"),
        ("mistral3", "clip.vision.spatial_merge_size", 65, "spatial_merge_size"),
        ("pixtral", "clip.vision.attention.head_count", 5, "num_attention_heads|head_count"),
    ],
)
def test_another_image_part_is_refused(kind: str, key: str, value: Any, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(folder, kind)
    write_text(tmp_path / "model.gguf", folder, PROJECTORS[kind][1])

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(key, value)

    write_image_part(tmp_path / "mmproj-f32.gguf", folder, kind, change)
    with pytest.raises(ModelError, match=reason):
        open_vision(tmp_path / "model.gguf")
