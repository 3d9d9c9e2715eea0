"""A tiny SmolVLM or Idefics3 with random weights and all that it is served with, and images for it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TILES = 4  # rows and columns of tiles that have a token
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SPECIAL = [
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, TILES + 1) for column in range(1, TILES + 1)),
]


def write_vision_model(folder: Path, *, kind: str = "smolvlm", image_size: int = 32, splits: bool = True) -> Path:
    """Write the model to the folder, in f32. `kind`: "smolvlm" or "idefics3"."""
    folder.mkdir(parents=True, exist_ok=True)
    patch, scale, wide = (8, 2, 48) if kind == "smolvlm" else (4, 4, 36)
    vocab = _write_tokenizer(folder)
    named = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[kind]
    config: dict[str, Any] = {
        "architectures": [f"{named}ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": SPECIAL.index("<image>"),
        "scale_factor": scale,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": f"{kind}_vision",
            "hidden_size": wide,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": image_size,
            "patch_size": patch,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    preparation = {
        "image_processor_type": f"{named}ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": splits,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.45, 0.4],
        "image_std": [0.5, 0.4, 0.3],
        "max_image_size": {"longest_edge": image_size},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 3 * image_size},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
    tokens = (image_size // patch // scale) ** 2
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": f"{named}Processor", "image_seq_len": tokens})
    )
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    save_file(_weights(vocab, wide, patch, image_size, scale), folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_tokenizer(folder: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {text: id for id, text in enumerate([*SPECIAL, *alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(tokens, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(tokens)


def _weights(vocab: int, wide: int, patch: int, image_size: int, scale: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray[Any, Any]:
        return (generator.standard_normal(shape) * 0.2).astype(np.float32)

    def norm(size: int) -> np.ndarray[Any, Any]:
        return (1 + generator.standard_normal(size) * 0.2).astype(np.float32)

    tower, text = "model.vision_model.", "model.text_model."
    found = {
        f"{tower}embeddings.patch_embedding.weight": matrix(wide, 3, patch, patch),
        f"{tower}embeddings.patch_embedding.bias": matrix(wide),
        f"{tower}embeddings.position_embedding.weight": matrix((image_size // patch) ** 2, wide),
        f"{tower}post_layernorm.weight": norm(wide),
        f"{tower}post_layernorm.bias": matrix(wide),
        "model.connector.modality_projection.proj.weight": matrix(HIDDEN, wide * scale**2),
        f"{text}embed_tokens.weight": matrix(vocab, HIDDEN),
        f"{text}norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(vocab, HIDDEN),
    }
    for layer in range(2):
        stem = f"{tower}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{stem}self_attn.{name}.weight"] = matrix(wide, wide)
            found[f"{stem}self_attn.{name}.bias"] = matrix(wide)
        for name in ("layer_norm1", "layer_norm2"):
            found[f"{stem}{name}.weight"], found[f"{stem}{name}.bias"] = norm(wide), matrix(wide)
        found[f"{stem}mlp.fc1.weight"], found[f"{stem}mlp.fc1.bias"] = matrix(80, wide), matrix(80)
        found[f"{stem}mlp.fc2.weight"], found[f"{stem}mlp.fc2.bias"] = matrix(wide, 80), matrix(wide)
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        stem = f"{text}layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{stem}self_attn.{name}_proj.weight"] = matrix(rows * head, HIDDEN)
        found[f"{stem}self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            found[f"{stem}mlp.{name}_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{stem}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        found[f"{stem}input_layernorm.weight"] = norm(HIDDEN)
        found[f"{stem}post_attention_layernorm.weight"] = norm(HIDDEN)
    return found


def picture(width: int, height: int, seed: int = 0, format: str = "PNG", **options: Any) -> bytes:
    """Return a file of smooth random colours."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8), "RGB")
    buffer = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(buffer, format, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
