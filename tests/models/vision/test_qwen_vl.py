"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers: pixels, prompts, features, logits and tokens, in f32."""

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
from safetensors.torch import load_file, save_file

from headrace.engine.executors.image_batch import places_of
from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.engine.interface.image_rows import ImageRows
from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.families.vision.towers import read_tower
from headrace.models.model_folder import open_model
from headrace.models.vision.image_layout import Size
from headrace.models.vision.patch_layout import PatchLayout
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

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {"qwen2": "Qwen2VL", "qwen2.5": "Qwen2_5_VL", "qwen3": "Qwen3VL", "qwen3-moe": "Qwen3VLMoe"}
TOWERS = ("qwen2", "qwen2.5", "qwen3")
SIZES = ((100, 60), (10, 10), (13, 200), (61, 59), (900, 6))  # of pictures: one is scaled down, most are scaled up
LEAST, MOST = 32 * 32, 96 * 96  # pixels
PIXELS = 1_000_000


def write_qwen(folder: Path, kind: str) -> Path:
    vocab = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 3, "patch_size": 4}
    if kind.startswith("qwen3"):
        vision |= {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
        text |= {"num_hidden_layers": 3, "head_dim": 16}
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
        if kind == "qwen3-moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    elif kind == "qwen2":
        vision |= {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64}
        vision |= {"window_size": 24, "fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{NAMES[kind]}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=SPECIAL.index("<|image_pad|>"),
        video_token_id=SPECIAL.index("<|video_pad|>"),
        vision_start_token_id=2,
        vision_end_token_id=3,
    )
    write_weights(folder, getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")(config))
    if kind == "qwen3-moe":
        turn_experts(folder)
    preparation = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": LEAST, "longest_edge": MOST}
    )
    preparation.save_pretrained(folder)
    return folder


def turn_experts(folder: Path) -> None:
    """Store experts as [inputs, outputs], as published files do; transformers saves them the other way around."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def processed(preparation: Any, tokenizer: Any, *, images: Any, text: list[str], return_tensors: str) -> Any:
    """What the processor of transformers gives, which cannot be made without torchvision: it reads videos too."""
    found = preparation(images, return_tensors=return_tensors)
    pieces = text[0].split("<|image_pad|>")
    marks = ["<|image_pad|>" * (int(grid.prod()) // 4) for grid in found["image_grid_thw"]]
    whole = "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True))
    found["input_ids"] = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["mm_token_type_ids"] = (found["input_ids"] == SPECIAL.index("<|image_pad|>")).int()
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GoldenVision]:
    known: dict[str, GoldenVision] = {}

    def get(kind: str) -> GoldenVision:
        if kind not in known:
            folder = write_qwen(tmp_path_factory.mktemp(kind), kind)
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            preparation = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
            processor = partial(processed, preparation, tokenizer)
            model = getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")
            known[kind] = GoldenVision(folder, processor, model)
        return known[kind]

    return get


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", TOWERS)
def test_pixels_and_features_are_those_of_transformers(
    kind: str, size: tuple[int, int], made: Callable[[str], GoldenVision]
) -> None:
    golden, image = made(kind), picture(*size)
    expected = golden.inputs("<|image_pad|>", image)
    (tile,) = read_tiles(image, golden.vision.layout, PIXELS)
    channels, height, width = tile.shape
    cut = tile.reshape(channels, height // 8, 2, 4, width // 8, 2, 4).transpose(1, 4, 2, 5, 0, 3, 6)
    patches = np.repeat(cut[:, :, :, :, :, None], 2, axis=5).reshape(-1, 96)  # each is there as two frames
    assert np.array_equal(patches, expected["pixel_values"].numpy())
    with torch.no_grad():
        found = golden.reference.model.get_image_features(expected["pixel_values"], expected["image_grid_thw"])
    levels = [found.pooler_output, *getattr(found, "deepstack_features", [])]
    reference = torch.cat([torch.cat(list(level)) for level in levels], dim=1).numpy()
    assert relative_error(golden.encoder.encode(tile[None])[0], reference) < 1e-4


CHATS: tuple[tuple[str | bytes, ...], ...] = (
    (picture(70, 40, 1), "what is this?"),
    ("one ", picture(70, 40, 1), " and two\n", picture(20, 60, 2), "end"),
    (picture(9, 9), picture(9, 8)),
)


@pytest.mark.parametrize(
    ("kind", "chat"),
    [*((kind, chat) for kind in TOWERS[:2] for chat in CHATS), *((kind, CHATS[1]) for kind in ("qwen3", "qwen3-moe"))],
)
def test_prompts_logits_and_greedy_tokens_are_those_of_transformers(
    kind: str, chat: tuple[str | bytes, ...], made: Callable[[str], GoldenVision]
) -> None:
    made(kind).check(*chat)


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_answers_depend_on_no_batch_chunk_or_cache(kind: str, made: Callable[[str], GoldenVision]) -> None:
    golden = made(kind)
    first, second = (golden.chat("see ", picture(70, 40, seed), " this")[1] for seed in (1, 2))
    both = golden.chat("see ", picture(70, 40, 1), " this", picture(70, 140, 2), "and that")[1]
    text = tuple(golden.tokenizer.encode("see nothing at all, or whatever there is", False))
    open_one = partial(open_tiny, golden.folder, context=512)
    alone = [one(open_one().engine, request_with_images("x", each)).tokens for each in (first, second, both)]
    assert alone[0] != alone[1]
    engine = open_one(max_rows=16).engine  # prompts are computed in chunks that cut images apart
    together = run(
        engine,
        [
            request_with_images("a", first),
            request_with_images("t", (text, ())),
            request_with_images("b", second),
            request_with_images("c", both),
        ],
    )
    assert [together[id][0].tokens for id in "abc"] == alone
    for id, prompt, tokens in (("d", first, alone[0]), ("e", second, alone[1]), ("f", both, alone[2])):
        again = one(engine, request_with_images(id, prompt))
        assert again.tokens == tokens
        assert again.ending is not None
        assert again.ending.usage.cached_tokens == len(prompt[0]) - 1


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3-moe"])
def test_text_without_images_is_that_of_transformers(kind: str, made: Callable[[str], GoldenVision]) -> None:
    golden = made(kind)
    tokens = golden.tokenizer.encode("no image is here", False)
    with torch.no_grad():
        expected = golden.reference(input_ids=torch.tensor([tokens])).logits[0].numpy()
    assert relative_error(golden.logits((tuple(tokens), ())), expected) < 1e-4


def test_features_depend_on_no_thread_count_and_no_other_image(made: Callable[[str], GoldenVision]) -> None:
    golden = made("qwen2.5")
    small, large = (read_tiles(picture(*size), golden.vision.layout, PIXELS) for size in ((30, 30), (200, 200)))
    single = ImageEncoder(golden.vision, threads=1)
    before = single.encode(small)
    assert np.array_equal(single.encode(large), golden.encoder.encode(large))
    assert np.array_equal(single.encode(small), before)  # in the memory of a larger one
    single.close()


def test_places_of_tokens_go_on_behind_an_image() -> None:
    images = (ImageRows(2, 6, b"", b"", (2, 3)), ImageRows(9, 4, b"", b"", (4, 1)))
    expected = [
        *((0, 0, 0), (1, 1, 1)),
        *((2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)),
        (5, 5, 5),
        *((6, 6, 6), (6, 7, 6), (6, 8, 6), (6, 9, 6)),
        *((10, 10, 10), (11, 11, 11)),
    ]
    for start in range(len(expected)):
        for end in range(start + 1, len(expected) + 1):
            positions = np.arange(start, end, dtype=np.int32)
            assert [tuple(row) for row in places_of(images, positions).tolist()] == expected[start:end]


def test_a_flat_config_and_its_names_are_read(made: Callable[[str], GoldenVision]) -> None:
    folder = made("qwen2.5").folder
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
    }
    flat["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4, "tokens_per_second": 2}
    nested = model_spec(ConfigJson.read(folder / "config.json"))
    assert model_spec(ConfigJson(flat, path=folder / "config.json")) == nested
    assert nested.ropes[0].axes == (0, 0, 1, 1, 1, 2, 2, 2)


def test_experts_are_read_either_way_around(made: Callable[[str], GoldenVision], tmp_path: Path) -> None:
    folder = made("qwen3-moe").folder
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    turn_experts(tmp_path)
    one_way, other = open_model(folder), open_model(tmp_path)
    for leaf in ("gate_up", "down"):
        name = f"layers.2.mlp.experts.3.{leaf}"
        assert one_way.tensor(name).shape == one_way.shapes[name]
        assert np.array_equal(one_way.tensor(name).data, other.tensor(name).data)


def test_the_published_config_of_qwen3_is_read() -> None:
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "initializer_range": 0.02,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }
    spec = model_spec(ConfigJson(config, path=Path("config.json")))
    assert spec.feature_size == 4 * 2560
    assert spec.tied
    assert [spec.ropes[0].axes.count(axis) for axis in range(3)] == [24, 20, 20]
    assert spec.ropes[0].axes[:6] == (0, 1, 2, 0, 1, 2)
    assert spec.ropes[0].axes[60:] == (0, 0, 0, 0)
    tower = read_tower(ConfigJson(config, path=Path("config.json")))
    assert [place for place, layer in enumerate(tower.encoder.layers) if layer.kept] == [5, 11, 17]


def test_an_image_far_from_square_is_refused(made: Callable[[str], GoldenVision]) -> None:
    layout = made("qwen2").vision.layout
    with pytest.raises(RequestError, match="at most 200 times as long"):
        layout.grid(Size(1, 201))
    assert layout.grid(measure(picture(200, 1), PIXELS)).tile_tokens > 1


def test_a_long_thin_image_stays_within_a_small_bound(made: Callable[[str], GoldenVision]) -> None:
    layout = made("qwen2.5").vision.layout
    assert isinstance(layout, PatchLayout)
    for squares in (1, 3, 40):
        small = layout.within(squares * layout.square**2)
        for size in (Size(1, 200), Size(2000, 10), Size(333, 2)):
            scaled = small.grid(size).size
            assert scaled.height * scaled.width <= small.most_pixels
            assert min(scaled) >= layout.square


@pytest.mark.parametrize(
    ("kind", "file", "key", "value", "why"),
    [
        ("qwen2.5", "preprocessor_config.json", "patch_size", 14, r"config\.json says 4"),
        ("qwen2.5", "preprocessor_config.json", "max_pixels", 8, "at least min_pixels"),
        ("qwen2.5", "preprocessor_config.json", "do_sharpen", True, "does not know"),
        (
            "qwen2.5",
            "config.json",
            "text_config.rope_parameters",
            {"rope_type": "default", "mrope_section": [2, 2, 2]},
            "sum 8",
        ),
        ("qwen2.5", "config.json", "vision_config.out_hidden_size", 65, "65 values, and the text part takes 64"),
        ("qwen2.5", "config.json", "vision_config.temporal_patch_size", 3, "two equal frames"),
        ("qwen2.5", "config.json", "vision_config.window_size", 7, "at least one square"),
        ("qwen2.5", "config.json", "vision_config.num_heads", 5, "a divisor of 48"),
        ("qwen2.5", "config.json", "vision_config.rope_parameters", {"rope_type": "yarn"}, "rows and columns"),
        ("qwen2.5", "config.json", "vision_config.sharpness", 3, "does not know"),
        ("qwen3", "config.json", "vision_config.deepstack_visual_indexes", [1, 2], "below the last one"),
        ("qwen3", "config.json", "vision_config.num_position_embeddings", 35, "the square of a number"),
        ("qwen3", "config.json", "text_config.num_hidden_layers", 2, "fewer than the 2 layers"),
        ("qwen3", "config.json", "text_config.rope_parameters.mrope_interleaved", False, "take turns"),
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
