"""Gemma 3 with images against transformers: pixels, prompts, features, logits and greedy tokens, in f32."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest
from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.vision.pixels import read_tiles
from headrace.models.vision.vision_folder import has_vision, open_vision
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

SPECIAL = (
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}"
    "{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TOKENS = 16  # of an image
WINDOW = 9  # of sliding layers: less than an image
PIXELS = 1_000_000


def write_gemma3(folder: Path) -> Path:
    vocab = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        boi_token_index=SPECIAL.index("<start_of_image>"),
        eoi_token_index=SPECIAL.index("<end_of_image>"),
        image_token_index=SPECIAL.index("<image_soft_token>"),
    )
    write_weights(folder, transformers.Gemma3ForConditionalGeneration(config))
    preparation = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.5, 0.45, 0.4])
    preparation.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenVision:
    folder = write_gemma3(tmp_path_factory.mktemp("gemma3"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        extra_special_tokens={"boi_token": SPECIAL[4], "eoi_token": SPECIAL[5], "image_token": SPECIAL[6]},
    )
    preparation = transformers.Gemma3ImageProcessorPil.from_pretrained(folder)
    processor = transformers.Gemma3Processor(preparation, tokenizer, image_seq_length=TOKENS)
    return GoldenVision(folder, processor, transformers.Gemma3ForConditionalGeneration)


@pytest.mark.parametrize("size", [(100, 60), (10, 10), (7, 300)])
def test_pixels_and_features_are_those_of_transformers(size: tuple[int, int], golden: GoldenVision) -> None:
    image = picture(*size)
    expected = golden.inputs("<start_of_image>", image)
    tiles = read_tiles(image, golden.vision.layout, PIXELS)
    assert np.array_equal(tiles, expected["pixel_values"].numpy())
    with torch.no_grad():
        found = golden.reference.model.get_image_features(expected["pixel_values"])
    reference = getattr(found, "pooler_output", found)
    assert relative_error(golden.encoder.encode(tiles), reference.numpy().reshape(1, TOKENS, -1)) < 1e-4


CHATS: tuple[tuple[str | bytes, ...], ...] = (
    (picture(70, 40, 1), "what is this?"),  # line ends around the image join those of the template
    ("one ", picture(70, 40, 1), " and two\n", picture(20, 60, 2), "end"),
    (picture(9, 9), picture(9, 8)),
)


@pytest.mark.parametrize("chat", CHATS)
def test_prompts_logits_and_greedy_tokens_are_those_of_transformers(
    chat: tuple[str | bytes, ...], golden: GoldenVision
) -> None:
    golden.check(*chat)


def test_an_image_in_the_users_text_is_text(golden: GoldenVision) -> None:
    _, (tokens, rows) = golden.chat("a <start_of_image> ", picture(9, 9), " <image_soft_token>")
    assert len(rows) == 1
    assert tokens.count(SPECIAL.index("<start_of_image>")) == 1
    assert tokens.count(SPECIAL.index("<image_soft_token>")) == TOKENS


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
def test_answers_depend_on_no_batch_chunk_or_cache(kv: str, golden: GoldenVision) -> None:
    first, second = (golden.chat("see ", picture(70, 40, seed), " this")[1] for seed in (1, 2))
    both = golden.chat("see ", picture(70, 40, 1), " this", picture(70, 40, 2))[1]
    text = tuple(golden.tokenizer.encode("see nothing at all, or whatever there is", False))
    open_one = partial(open_tiny, golden.folder, context=512, kv=kv)
    alone = [one(open_one().engine, request_with_images("x", each)).tokens for each in (first, second, both)]
    assert alone[0] != alone[1]
    # Chunks are a little larger than an image, and streams take some of their rows.
    engine = open_one(max_rows=1, max_sequences=4).engine
    assert engine.executor.capacity.max_rows == TOKENS + 4
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
    # Only the blocks up to the middle of the image are found again, and its other tokens see them.
    start = first[1][0].start
    part = request_with_images("g", (first[0][: start + TOKENS] + text, first[1]))
    assert one(engine, part).tokens == one(open_one().engine, part).tokens


def test_results_of_prompts_with_images_are_refused(golden: GoldenVision) -> None:
    tokens, rows = golden.chat("see ", picture(70, 40))[1]
    engine = open_tiny(golden.folder).engine
    with pytest.raises(RequestError, match="gives no results of prompts with images"):
        engine.submit(GenerationRequest(id="a", prompt=tokens, images=rows, prompt_logprobs=1))
    large = ImageRows(0, TOKENS + 1, b"", bytes(4 * 64 * (TOKENS + 1)))
    with pytest.raises(RequestError, match="more than the model's 16 tokens"):
        engine.submit(GenerationRequest(id="a", prompt=tokens, images=(large,)))


@pytest.mark.parametrize(
    ("file", "key", "value", "why"),
    [
        ("preprocessor_config.json", "do_pan_and_scan", True, "each image as a whole"),
        ("preprocessor_config.json", "size", {"height": 32, "width": 64}, "squares of image_size"),
        ("preprocessor_config.json", "do_sharpen", True, "does not know"),
        ("config.json", "mm_tokens_per_image", 17, "square of a divisor"),
        ("config.json", "vision_config", {"patch_size": 7, "image_size": 32}, "divisor of image_size"),
    ],
)
def test_another_image_part_is_refused(
    file: str, key: str, value: Any, why: str, golden: GoldenVision, tmp_path: Path
) -> None:
    for path in golden.folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    path = tmp_path / file
    changed = json.dumps(json.loads(path.read_text()) | {key: value})
    path.unlink()
    path.write_text(changed)
    assert has_vision(tmp_path)
    with pytest.raises(ModelError, match=why):
        open_vision(tmp_path)


def test_a_gemma3_without_an_image_part_reads_text(golden: GoldenVision) -> None:
    config = json.loads((golden.folder / "config.json").read_text())
    assert model_spec(ConfigJson(config, path=golden.folder)).image_span == TOKENS
    del config["vision_config"]
    assert model_spec(ConfigJson(config, path=golden.folder)).image_span == 0
