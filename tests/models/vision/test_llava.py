"""LLaVA-1.5, LLaVA-NeXT, Pixtral and Mistral 3 against transformers: pixels, prompts, features, logits and greedy
tokens, in f32."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.families.vision.towers import read_tower
from headrace.models.vision.image_layout import Size
from headrace.models.vision.pixels import measure, read_tiles
from headrace.models.vision.vision_folder import open_vision
from tests.support.models.tiny_vision import picture
from tests.support.models.vision_golden import (
    GoldenVision,
    relative_error,
    request_with_images,
    write_tokenizer,
    write_weights,
)
from tests.support.tiny_engine import one, open_tiny, run

pytest.importorskip("PIL.Image", reason="the extra vision is not installed")

SPECIAL = ("<s>", "</s>", "<image>", "[IMG_BREAK]", "[IMG_END]")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<image>' }}{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
NAMES = {"llava": "Llava", "next": "LlavaNext", "pixtral": "Llava", "mistral3": "Mistral3"}
TILE, PATCH = 16, 4  # pixels
TILINGS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
LONGEST = 40  # pixels of an edge of Pixtral's images
SIZES = ((100, 60), (10, 10), (13, 90), (90, 7))
PIXELS = 1_000_000


def write_llava(folder: Path, kind: str) -> Path:
    vocab = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {
        "model_type": "mistral" if kind in ("pixtral", "mistral3") else "llama",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": TILE,
        "patch_size": PATCH,
    }
    options: dict[str, Any] = {"image_token_index": SPECIAL.index("<image>"), "tie_word_embeddings": False}
    if kind in ("pixtral", "mistral3"):
        vision |= {"model_type": "pixtral", "head_dim": 16}
        text |= {"sliding_window": None, "head_dim": 16}
        options |= {"vision_feature_layer": -1}
    else:
        vision |= {"model_type": "clip_vision_model"}
    if kind == "pixtral":
        options |= {"vision_feature_select_strategy": "full"}
    if kind == "next":
        options |= {"image_grid_pinpoints": TILINGS}
    config = getattr(transformers, f"{NAMES[kind]}Config")(text_config=text, vision_config=vision, **options)
    write_weights(folder, getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")(config))
    preparation(kind).save_pretrained(folder)
    if kind in ("pixtral", "mistral3"):
        values = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "<image>"}
        (folder / "processor_config.json").write_text(json.dumps(values))
    return folder


def preparation(kind: str) -> Any:
    square = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
    if kind == "llava":
        return transformers.CLIPImageProcessorPil(**square)
    if kind == "next":
        return transformers.LlavaNextImageProcessorPil(**square, image_grid_pinpoints=TILINGS)
    return transformers.PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size=PATCH)


def in_lines(
    square: int, preparation: Any, tokenizer: Any, *, images: Any, text: list[str], return_tensors: str
) -> Any:
    """What Pixtral's processor gives, which cannot be made without torchvision."""
    found = preparation(images, patch_size={"height": square, "width": square}, return_tensors=return_tensors)
    whole, *pieces = text[0].split("<image>")
    for (height, width), piece in zip(found["image_sizes"].tolist(), pieces, strict=True):
        lines = ["<image>" * (width // square)] * (height // square)
        whole += "[IMG_BREAK]".join(lines) + "[IMG_END]" + piece
    found["input_ids"] = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GoldenVision]:
    known: dict[str, GoldenVision] = {}

    def get(kind: str) -> GoldenVision:
        if kind not in known:
            folder = write_llava(tmp_path_factory.mktemp(kind), kind)
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            if kind in ("pixtral", "mistral3"):
                processor = partial(in_lines, PATCH * (2 if kind == "mistral3" else 1), preparation(kind), tokenizer)
            else:
                processor = getattr(transformers, f"{NAMES[kind]}Processor")(
                    preparation(kind),
                    tokenizer,
                    patch_size=PATCH,
                    vision_feature_select_strategy="default",
                    num_additional_image_tokens=1,
                )
            model = getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")
            known[kind] = GoldenVision(folder, processor, model)
        return known[kind]

    return get


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", NAMES)
def test_pixels_and_features_are_those_of_transformers(
    kind: str, size: tuple[int, int], made: Callable[[str], GoldenVision]
) -> None:
    golden, image = made(kind), picture(*size)
    expected = golden.inputs("<image>", image)
    layout = golden.vision.layout
    tiles = read_tiles(image, layout, PIXELS)
    given = expected["pixel_values"].numpy()
    assert np.array_equal(tiles, given.reshape(-1, *given.shape[-3:]))
    sizes = {"image_sizes": expected["image_sizes"]} if "image_sizes" in expected else {}
    with torch.no_grad():
        found = golden.reference.model.get_image_features(expected["pixel_values"], **sizes)
    reference = torch.cat([each.reshape(-1, 64) for each in found.pooler_output]).numpy()
    grid = layout.grid(measure(image, PIXELS))
    assert grid.tokens == expected["input_ids"][0].tolist().count(SPECIAL.index("<image>"))
    assert relative_error(golden.encoder.encode(tiles, grid).reshape(-1, 64), reference) < 1e-4


@pytest.mark.parametrize("kind", NAMES)
def test_prompts_logits_and_greedy_tokens_are_those_of_transformers(
    kind: str, made: Callable[[str], GoldenVision]
) -> None:
    made(kind).check("one ", picture(70, 40, 1), " and two\n", picture(70, 40, 2), "end")


@pytest.mark.parametrize("kind", ["next", "mistral3"])
def test_answers_depend_on_no_batch_chunk_or_cache(kind: str, made: Callable[[str], GoldenVision]) -> None:
    golden = made(kind)
    first, second = (golden.chat("see ", picture(70, 40, seed), " this")[1] for seed in (1, 2))
    text = tuple(golden.tokenizer.encode("see nothing at all, or whatever there is", False))
    open_one = partial(open_tiny, golden.folder, context=512)
    alone = [one(open_one().engine, request_with_images("x", each)).tokens for each in (first, second)]
    assert alone[0] != alone[1]
    engine = open_one(max_rows=16).engine  # prompts are computed in chunks that cut images apart
    together = run(
        engine,
        [request_with_images("a", first), request_with_images("t", (text, ())), request_with_images("b", second)],
    )
    assert [together[id][0].tokens for id in "ab"] == alone
    again = one(engine, request_with_images("c", first))
    assert again.tokens == alone[0]
    assert again.ending is not None
    assert again.ending.usage.cached_tokens == len(first[0]) - 1


def test_an_image_far_from_square_is_refused(made: Callable[[str], GoldenVision]) -> None:
    with pytest.raises(RequestError, match="at most 100 times as long"):
        made("llava").vision.layout.grid(Size(1, 101))
    for kind in ("next", "pixtral"):
        grid = made(kind).vision.layout.grid(Size(1, 2000))
        assert grid.tokens == grid.runs * grid.tile_tokens > 0


PUBLISHED: dict[str, dict[str, Any]] = {
    "llava-1.5": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    },
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 1,
        "image_token_index": 10,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "is_composition": True,
            "max_position_embeddings": 1024000,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "silu",
            "image_size": 1024,
            "is_composition": True,
            "model_type": "pixtral",
            "patch_size": 16,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}


@pytest.mark.parametrize(("name", "layers", "depth"), [("llava-1.5", 32, 23), ("pixtral-12b", 40, 24)])
def test_published_configs_that_leave_out_defaults_are_read(name: str, layers: int, depth: int) -> None:
    config = ConfigJson(PUBLISHED[name], path=Path("config.json"))
    spec = model_spec(config)
    assert (len(spec.layers), spec.heads, spec.kv_heads) == (layers, 32, 8 if "pixtral" in name else 32)
    assert not spec.tied
    assert len(read_tower(config).encoder.layers) == depth


def test_defaults_of_pixtral_towers_are_those_of_transformers() -> None:
    published = PUBLISHED["pixtral-12b"]
    left_out = {key: value for key, value in published.items() if key != "vision_feature_layer"}
    assert transformers.LlavaConfig().vision_feature_layer == -2
    assert len(read_tower(ConfigJson(left_out, path=Path("config.json"))).encoder.layers) == 23
    text = {"model_type": "ministral3", "hidden_size": 64}
    mistral3 = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "vision_config": published["vision_config"],
        "text_config": text,
    }
    tower = read_tower(ConfigJson(mistral3, path=Path("config.json")))
    assert tower.merge_eps == transformers.Ministral3Config().rms_norm_eps == 1e-5
    assert len(tower.encoder.layers) == transformers.PixtralVisionConfig().num_hidden_layers


@pytest.mark.parametrize(
    ("kind", "file", "key", "value", "why"),
    [
        ("llava", "preprocessor_config.json", "size", {"shortest_edge": 8}, "the image_size of config"),
        ("llava", "preprocessor_config.json", "do_center_crop", False, "crops images"),
        ("next", "preprocessor_config.json", "image_grid_pinpoints", [[16, 16]], "those of config"),
        ("next", "preprocessor_config.json", "do_sharpen", True, "does not know"),
        ("next", "config.json", "image_grid_pinpoints", [[16, 17]], "multiples of image_size"),
        ("next", "config.json", "vision_feature_select_strategy", "full", "no class"),
        ("llava", "config.json", "vision_feature_layer", [-2, -1], "the number of one layer"),
        ("llava", "config.json", "vision_feature_layer", 4, "of the 3 that the image part has"),
        ("llava", "config.json", "vision_config.model_type", "siglip_vision_model", "CLIP or Pixtral"),
        ("llava", "config.json", "text_config.model_type", "gemma", "must be one of"),
        ("pixtral", "config.json", "vision_config.sharpness", 3, "does not know"),
        ("pixtral", "config.json", "vision_config.head_dim", 8, "which is hidden_size"),
        ("pixtral", "preprocessor_config.json", "patch_size", 14, r"config\.json says 4"),
        ("mistral3", "config.json", "spatial_merge_size", 3, "Expected 48x432"),
    ],
)
def test_another_image_part_is_refused(
    kind: str, file: str, key: str, value: Any, why: str, made: Callable[[str], GoldenVision], tmp_path: Path
) -> None:
    for path in made(kind).folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    path = tmp_path / file
    changed = json.loads(path.read_text())
    *outer, last = key.split(".")
    inner = changed
    for name in outer:
        inner = inner[name]
    inner[last] = value
    path.unlink()
    path.write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=why):
        opened(tmp_path)


def opened(folder: Path) -> None:
    model_spec(ConfigJson.read(folder / "config.json"))
    open_vision(folder)
