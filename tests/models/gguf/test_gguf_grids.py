"""Models in GGUF types below 4 bits: their codes in memory give the logits of the weights that the reference
dequantises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.models.formats.gguf_grid_blocks import GRID_FORMATS
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.weight_choice import choose_plan, describe_choice
from tests.models.gguf.gguf_models import write_gguf
from tests.models.tiny_configs import CONTEXT, SIZES
from tests.models.tiny_models import prompt, randomise, write_tokenizer

HIDDEN = 256
TYPES = {
    "token_embd": "IQ2_XS",
    **dict.fromkeys(("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"), "IQ3_S"),
    "blk.0.attn_output": "IQ2_XXS",
    **dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up"), "IQ1_M"),
    "blk.0.ffn_down": "TQ2_0",
    **dict.fromkeys(("blk.1.attn_q", "blk.1.attn_k", "blk.1.attn_v"), "IQ1_S"),
    "blk.1.attn_output": "IQ3_XXS",
    **dict.fromkeys(("blk.1.ffn_gate", "blk.1.ffn_up"), "TQ1_0"),
    "blk.1.ffn_down": "IQ2_S",
}


def random_blocks(name: str, rows: int, inputs: int) -> NDArray[np.uint8]:
    """Any bytes are codes; the scales are those of weights of about 0.05."""
    random = np.random.default_rng(len(name) + rows)
    blocks = random.integers(0, 256, (rows * inputs // 256, GRID_FORMATS[name].bytes), dtype=np.uint8)
    set_scales(blocks, name, np.ones(len(blocks)))
    with np.errstate(all="ignore"):
        size = np.sqrt(np.mean(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]) ** 2))
    set_scales(blocks, name, random.uniform(0.5, 1.5, len(blocks)) * 0.05 / size)
    return blocks.reshape(rows, -1)


def set_scales(blocks: NDArray[np.uint8], name: str, scales: NDArray[np.float64]) -> None:
    halves = scales.astype("<f2")[:, None]
    at = GRID_FORMATS[name].scale
    if at is not None:
        blocks[:, at : at + 2] = halves.view(np.uint8)
        return
    parts = (halves.view(np.uint16) >> np.array([0, 4, 8, 12], dtype=np.uint16)) & np.uint16(15)
    blocks[:, 49:56:2] = blocks[:, 49:56:2] & np.uint8(15) | (parts.astype(np.uint8) << np.uint8(4))


def saved(folder: Path) -> Path:
    torch.manual_seed(3)
    sizes = {**SIZES, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2}
    config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM(config).to(torch.float32).eval()
    randomise(model)

    def change(writer: Any) -> None:
        for name, kind in TYPES.items():
            shape = writer.tensors[0].pop(f"{name}.weight").shape
            blocks = random_blocks(kind, *shape)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    write_tokenizer(folder)
    write_gguf(folder / "model.gguf", model, folder / "tokenizer.json", change=change)
    return folder / "model.gguf"


def computed(model: ModelFolder, weights: str) -> NDArray[np.float32]:
    executor = CpuExecutor.load(model, weights=weights, kv="f32", threads=2, context=CONTEXT, isa=None)
    try:
        return logits(executor, [prompt(24)])[0]
    finally:
        executor.close()


def test_codes_in_memory_give_the_logits_of_the_dequantised_weights(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = open_model(path)
    for tensor in gguf.GGUFReader(path).tensors:
        assert np.array_equal(
            model.weights.dense(tensor.name).to_f32(), gguf.dequantize(tensor.data, tensor.tensor_type)
        )
        codes = model.weights.codes(tensor.name)
        assert codes is None or np.array_equal(codes.dense(), model.weights.dense(tensor.name).to_f32())
    said = describe_choice(model, choose_plan(model))
    for precision, kind in (
        ("int4-g32", "IQ3_S"), ("int8-g32", "IQ2_XXS"), ("int4-g16", "IQ1_M"), ("int2-g128", "TQ2_0"),
        ("int2-g32", "IQ1_S"), ("int8-g32", "IQ3_XXS"), ("int2-g128", "TQ1_0"),
    ):  # fmt: skip
        assert f"{precision} from GGUF's {kind}, the codes in the file" in said
    for kind in ("IQ2_XS", "IQ2_S"):
        assert f"int8-g32 from GGUF's {kind}, repacked" in said
    expected = computed(model, "f32")
    most = np.abs(expected).max()
    assert np.abs(computed(model, "auto-a16") - expected).max() < 0.01 * most
    assert np.abs(computed(model, "auto") - expected).max() < 0.1 * most
