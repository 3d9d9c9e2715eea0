"""Image parts in a second GGUF file: features, prompts and answers are those of the folder they were made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.open_engine import open_variant
from headrace.errors import ModelError
from headrace.gateway.serving.fingerprint import of_model
from headrace.models.model_folder import open_model
from headrace.models.pack_ahead import pack_ahead
from headrace.models.vision.pixels import measure, read_tiles
from headrace.models.vision.vision_folder import has_vision, open_vision, tower_bytes
from headrace.variant import Variant
from tests.models.gguf.gguf_models import write_gguf
from tests.models.vision.test_gemma3_vision import write_gemma3
from tests.support.models.tiny_vision import picture, write_vision_model
from tests.support.models.vision_golden import prompt_of
from tests.support.tiny_engine import one, open_tiny

pytest.importorskip("PIL.Image", reason="the extra vision is not installed")

KNOWN = {
    "model.connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}


def write_mmproj(path: Path, folder: Path, *, change: Callable[[Any], None] | None = None, kind: str = "F32") -> Path:
    """Write the image part of a folder, with names from the package gguf."""
    config = transformers.AutoConfig.from_pretrained(folder)
    vision = config.vision_config
    gemma = "Gemma" in config.architectures[0]
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("gemma3" if gemma else "idefics3")
    writer.add_vision_use_gelu(True)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    preparation = open_vision(folder).layout
    writer.add_vision_image_mean(list(preparation.mean))
    writer.add_vision_image_std(list(preparation.std))
    if gemma:
        side = vision.image_size // vision.patch_size
        writer.add_vision_projector_scale_factor(side // int(config.mm_tokens_per_image**0.5))
    else:
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(preparation.longest_edge)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    for source, tensor in load_file(folder / "model.safetensors").items():
        name = source.replace("vision_tower.encoder", "vision_tower.vision_model.encoder")
        name = name.replace("vision_tower.embeddings", "vision_tower.vision_model.embeddings")
        name = name.replace("vision_tower.post_layernorm", "vision_tower.vision_model.post_layernorm")
        if "vision_tower.head." in name:  # converters leave it out
            continue
        if "vision" not in name and "connector" not in name and "multi_modal" not in name:
            continue
        target = table.get_name(name.replace("_weight", ".weight"), try_suffixes=(".weight", ".bias"))
        target = target or next((name.replace(a, b) for a, b in KNOWN.items() if a in name), None)
        assert target is not None, name
        values = tensor.float().numpy() + (1 if "soft_emb_norm" in name else 0)
        chosen = gguf.GGMLQuantizationType[kind if values.ndim == 2 and ".blk." in target else "F32"]
        writer.add_tensor(target, gguf.quantize(values, chosen), raw_dtype=chosen)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text_part(folder: Path, kind: str) -> Any:
    """The text part of a folder as a model of its own."""
    config = transformers.AutoConfig.from_pretrained(folder).text_config
    named = "Gemma3ForCausalLM" if kind == "gemma3" else "LlamaForCausalLM"
    model = getattr(transformers, named)(config).to(torch.float32)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for start, to in (("model.text_model.", "model."), ("language_model.model.", "model."), ("lm_head", "lm_head")):
            if name.startswith(start):
                found[to + name.removeprefix(start)] = tensor
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    known: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            (write_gemma3 if kind == "gemma3" else write_vision_model)(folder)
            if kind == "gemma3":  # a GGUF file does not say which layers are sliding: of six, all but the last are
                config = json.loads((folder / "config.json").read_text())
                config["text_config"]["layer_types"] = ["sliding_attention"] * 3
                (folder / "config.json").write_text(json.dumps(config))
            place = tmp_path_factory.mktemp(f"{kind}-gguf")
            template = (folder / "chat_template.jinja") if kind == "gemma3" else (folder / "chat_template.json")
            text = template.read_text() if kind == "gemma3" else json.loads(template.read_text())["chat_template"]

            def change(writer: Any) -> None:
                writer.add_chat_template(text)
                writer.add_bos_token_id(0)
                writer.add_eos_token_id(1)

            write_gguf(place / "model.gguf", text_part(folder, kind), folder / "tokenizer.json", change=change)
            write_mmproj(place / "mmproj-model-f32.gguf", folder)
            known[kind] = folder, place / "model.gguf"
        return known[kind]

    return get


@pytest.mark.parametrize("kind", ["smolvlm", "gemma3"])
def test_features_prompts_and_answers_are_the_same(kind: str, made: Callable[[str], tuple[Path, Path]]) -> None:
    folder, file = made(kind)
    assert has_vision(file)
    expected, found = open_vision(folder), open_vision(file)
    assert tower_bytes(file) == tower_bytes(folder)
    image = picture(100, 60)
    tiles = read_tiles(image, found.layout, 100_000)
    assert np.array_equal(tiles, read_tiles(image, expected.layout, 100_000))
    grid = found.layout.grid(measure(image, 100_000))
    features = [ImageEncoder(each, threads=2).encode(tiles, grid) for each in (expected, found)]
    assert np.abs(features[0] - features[1]).max() < 1e-5 * np.abs(features[0]).max()
    assert open_model(file).spec.image_span == open_model(folder).spec.image_span
    answers: list[list[int]] = []
    for path, vision in ((folder, expected), (file, found)):
        tokens, rows = prompt_of(path, vision, "see ", image, " this")
        engine = open_tiny(path, weights="f32", kv="f32", context=512).engine
        asked = GenerationRequest(
            id="a", prompt=tokens, images=rows, max_tokens=24, min_tokens=24, stop_ids=frozenset({1})
        )
        answers.append([*tokens, *one(engine, asked).tokens])
    assert answers[0] == answers[1]


def test_an_image_part_in_f16_is_read(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, file = made("gemma3")
    (tmp_path / "model.gguf").symlink_to(file)
    write_mmproj(tmp_path / "mmproj-f16.gguf", folder, kind="F16")
    tiles = read_tiles(picture(50, 50), open_vision(folder).layout, 100_000)
    exact, found = (
        ImageEncoder(open_vision(path), threads=2).encode(tiles) for path in (file, tmp_path / "model.gguf")
    )
    assert 0 < np.abs(exact - found).max() < 0.01 * np.abs(exact).max()


def without(key: str) -> Callable[[Any], None]:
    return lambda writer: writer.kv_data[0].pop(key)


def having(method: str, *values: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        if values and values[0] in writer.kv_data[0]:
            del writer.kv_data[0][values[0]]
        getattr(writer, method)(*values)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("clip.vision.block_count"), "The key is missing"),
        (having("add_string", "clip.projector_type", "ldp"), "Headrace reads these from GGUF files: idefics3, gemma3"),
        (having("add_string", "clip.projector_type", "idefics3"), "belongs to a model of the kind llama"),
        (having("add_string", "general.architecture", "llama"), "Expected 'clip'"),
        (having("add_uint32", "clip.vision.n_wa_pattern", 8), "does not know this key"),
        (having("add_bool", "clip.use_silu", True), "clip.use_silu': The tower of this projector has another"),
        (having("add_bool", "clip.use_gelu", False), "has another activation"),
        (having("add_uint32", "clip.vision.patch_size", 7), "divisor of image_size"),
        (having("add_uint32", "clip.vision.patch_size", 0), "an integer from 1 to"),
        (having("add_string", "clip.vision.patch_size", "14"), "clip.vision.patch_size': Expected an integer"),
        (having("add_string", "clip.vision.image_size", "896"), "clip.vision.image_size': Expected an integer"),
        (having("add_array", "clip.vision.image_size", [1, 2]), "clip.vision.image_size': Expected an integer"),
        (having("add_string", "clip.vision.projector.scale_factor", "4"), "scale_factor': Expected an integer"),
        (lambda writer: writer.tensors[0].pop("v.blk.0.ln1.weight"), "no such tensor"),
        (lambda writer: writer.tensors[0].pop("mm.soft_emb_norm.weight"), "no such tensor"),
    ],
)
def test_another_image_part_is_refused_and_texts_are_read(
    change: Callable[[Any], None], why: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, file = made("gemma3")
    (tmp_path / "model.gguf").symlink_to(file)
    write_mmproj(tmp_path / "mmproj.gguf", folder, change=change)
    with pytest.raises(ModelError, match=why):
        open_vision(tmp_path / "model.gguf")
    assert tower_bytes(tmp_path / "model.gguf") == 0
    open_model(tmp_path / "model.gguf")


def test_a_malformed_size_of_split_images_is_refused(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, file = made("smolvlm")
    (tmp_path / "model.gguf").symlink_to(file)
    change = having("add_string", "clip.vision.preproc_image_size", "x")
    write_mmproj(tmp_path / "mmproj.gguf", folder, change=change)
    with pytest.raises(ModelError, match="preproc_image_size': Expected an integer"):
        open_vision(tmp_path / "model.gguf")
    assert tower_bytes(tmp_path / "model.gguf") == 0


def test_several_image_parts_are_refused(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, file = made("gemma3")
    (tmp_path / "model.gguf").symlink_to(file)
    for name in ("mmproj-a.gguf", "b.mmproj.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert has_vision(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"several image parts: b\.mmproj\.gguf, mmproj-a\.gguf"):
        open_vision(tmp_path / "model.gguf")
    variants = [Variant(model=str(tmp_path / "model.gguf"), weights="int8"), Variant(model="draft", weights="int8")]
    states = [(each.model, each.state) for each in pack_ahead(variants, tmp_path / "cache", threads=1, check=True)]
    assert states == [("model.gguf", "unread"), ("model.gguf", "missing"), ("draft", "missing")]


def negated(folder: Path, copy: Path) -> Path:
    """Copy a folder with another connector of its image part."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    changed = {name: -tensor if "connector" in name else tensor for name, tensor in tensors.items()}
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_replaced_image_part_reuses_no_kv_and_no_answers(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, file = made("smolvlm")
    model, image_part = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    model.symlink_to(file)

    def ask(disk: Path | None) -> tuple[str, tuple[bytes, ...], tuple[int, ...], int]:
        tokens, rows = prompt_of(model, open_vision(model), "see ", picture(100, 60), " this")
        options = {} if disk is None else {"kv_disk_bytes": 1 << 26, "kv_disk_folder": str(disk)}
        variant = Variant.of(
            str(model), weights="f32", kv="f32", context=512, threads=1, cache=False, **cast("Any", options)
        )
        opened = open_variant(variant)
        asked = GenerationRequest(
            id="a", prompt=tokens, images=rows, max_tokens=8, min_tokens=8, stop_ids=frozenset({1})
        )
        found = one(opened.engine, asked)
        opened.engine.close()
        assert found.ending is not None
        cached = found.ending.usage.cached_tokens
        return of_model(opened.folder, variant), tuple(row.digest for row in rows), tuple(found.tokens), cached

    write_mmproj(image_part, folder)
    first = ask(tmp_path / "kv")
    again = ask(tmp_path / "kv")
    assert again[:3] == first[:3]
    assert (first[3], again[3] > 0) == (0, True)
    image_part.unlink()
    write_mmproj(image_part, negated(folder, tmp_path / "other"))
    fresh, replaced = ask(None), ask(tmp_path / "kv")
    assert replaced == fresh
    assert replaced[3] == 0
    assert replaced[0] != first[0]
    assert not set(replaced[1]) & set(first[1])
