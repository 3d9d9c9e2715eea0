"""Writes a tiny model in each scheme of quantised checkpoints, with its weights as the format defines them.

The dequantisers here are written from the definitions, in torch and the slow way: AutoGPTQ's and GPTQModel's torch
layer for GPTQ, AutoAWQ's `dequantize_gemm` for AWQ, `functional.dequantize_blockwise` and `dequantize_4bit` of
bitsandbytes. For compressed-tensors the package itself writes and reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationScheme

from tests.models.tiny_configs import SIZES
from tests.models.tiny_models import randomise, write_tokenizer

Tensors = dict[str, torch.Tensor]
Layer = tuple[Tensors, torch.Tensor]  # a layer's stored tensors, and its weights as defined
GROUP = 32
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
    -0.0, -0.0052083333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    config: dict[str, Any]  # quantization_config
    quantise: Callable[[torch.Tensor], Layer]


@dataclass(frozen=True)
class Quantised:
    """A tiny model on disk, and in transformers with the weights that the format defines."""

    folder: Path
    model: Any
    weights: dict[str, torch.Tensor]  # of the quantised layers

    def logits(self, tokens: list[int]) -> Any:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()


Built = Callable[[str], Quantised]  # the fixture `built`


def bits_to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Write each row as one stream of bits, lowest first, and cut it into words of 32 bits."""
    each = np.unpackbits(codes.numpy().astype(np.uint8)[..., None], axis=2, bitorder="little")[:, :, :bits]
    stream = each.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32))


def affine(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Round [outputs, inputs] to codes with a scale (of f16) and a zero for each group of inputs."""
    outputs, inputs = weight.shape
    parts = weight.reshape(outputs, inputs // group, group)
    top = (1 << bits) - 1
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if symmetric:
        scales = (parts.abs().amax(2) * 2 / top).half().float()
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(1, top)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.reshape(outputs, inputs).int(), scales, zeros.int()


def gptq(
    bits: int, *, symmetric: bool = False, version: int = 1, act_order: bool = False, group: int = GROUP
) -> Scheme:
    def quantise(weight: torch.Tensor) -> Layer:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs + outputs))
        codes, scales, zeros = affine(weight[:, order], bits, size, symmetric=symmetric)
        inverse = torch.argsort(order)
        codes, g_idx = codes[:, inverse], (torch.arange(inputs) // size)[inverse].int()
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": bits_to_words(codes, bits).T.contiguous(),
            "qzeros": bits_to_words(stored.T, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": g_idx,
        }
        # TorchQuantLinear: scales[g_idx] * (weight - zeros[g_idx]), transposed.
        defined = scales.T[g_idx.long()] * (codes.T - zeros.T[g_idx.long()])
        return tensors, defined.T.contiguous()

    return Scheme(
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": symmetric,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            "damp_percent": 0.1,
            "meta": {"quantizer": "tests"},
        },
        quantise,
    )


def awq(group: int = GROUP) -> Scheme:
    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        rows, columns = codes.shape
        return bits_to_words(codes.reshape(rows, columns // 8, 8)[:, :, AWQ_ORDER].reshape(rows, columns), 4)

    def quantise(weight: torch.Tensor) -> Layer:
        codes, scales, zeros = affine(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": interleaved(codes.T),
            "qzeros": interleaved(zeros.T),
            "scales": scales.T.half().contiguous(),
        }
        spread = scales.repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
        return tensors, (codes - spread[1]) * spread[0]

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Scheme(config, quantise)


def compressed(kind: str, weights: dict[str, Any], compressor: Any) -> Scheme:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)  # pyright: ignore[reportArgumentType]

    def quantise(weight: torch.Tensor) -> Layer:
        outputs, inputs = weight.shape
        bits, strategy = weights["num_bits"], weights["strategy"]
        top = 448.0 if weights["type"] == "float" else float((1 << (bits - 1)) - 1)
        zeros = None
        if strategy == "group":
            parts = weight.reshape(outputs, -1, weights["group_size"])
        elif strategy == "block":
            height, width = weights["block_structure"]
            parts = weight.reshape(outputs // height, height, inputs // width, width).transpose(1, 2).flatten(2)
        else:
            parts = weight[:, None] if strategy == "channel" else weight.reshape(1, 1, -1)
        if weights["symmetric"]:
            scales = parts.abs().amax(2) / top
        else:
            low = parts.amin(2)
            scales = (parts.amax(2) - low) / (2 * top + 1)
            zeros = (-(1 << (bits - 1)) - low / scales).round().clamp(-top - 1, top).to(torch.int8)
        scales = scales.bfloat16().float().clamp(min=1e-6)  # in f32, so that the package computes in f32
        if strategy == "tensor":
            scales = scales.reshape(1)
        state = {"weight": weight, "weight_scale": scales}
        if zeros is not None:
            state["weight_zero_point"] = zeros
        tensors = compressor.compress(state, scheme)
        defined = compressor.decompress(tensors, scheme)["weight"].float()
        return {name: each.contiguous() for name, each in tensors.items()}, defined

    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }
    return Scheme(config, quantise)


def integers(bits: int, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    group = {"group_size": GROUP} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **group}


def floats(strategy: str) -> dict[str, Any]:
    block = {"block_structure": [16, 32]} if strategy == "block" else {}
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **block}


def fp8(
    blocks: tuple[int, int] | None = None, dtype: torch.dtype = torch.float8_e4m3fn, *, rows: bool = False
) -> Scheme:
    def quantise(weight: torch.Tensor) -> Layer:
        outputs, inputs = weight.shape
        height, width = blocks or ((1, inputs) if rows else (outputs, inputs))
        top = torch.finfo(dtype).max
        spread = torch.zeros_like(weight)
        scales = torch.zeros(-(-outputs // height), -(-inputs // width))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                scales[row, column] = spread[block] = weight[block].abs().max() / top
        codes = (weight / spread).to(dtype)
        name = "weight_scale_inv" if blocks else "weight_scale"
        stored = scales if blocks or rows else scales.reshape(())
        return {"weight": codes, name: stored}, codes.float() * spread

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if blocks:
        config["weight_block_size"] = list(blocks)
    return Scheme(config, quantise)


def four_bits(table: tuple[float, ...], kind: str, *, nested: bool, block: int = 64) -> Scheme:
    def quantise(weight: torch.Tensor) -> Layer:
        values = torch.tensor(table)
        flat = weight.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
        sizes = padded.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        tensors: Tensors = {"weight.quant_map": values}
        if nested:
            offset = float(sizes.mean())
            steps = torch.linspace(-1, 1, 256)
            blocks = torch.nn.functional.pad(sizes - offset, (0, -len(sizes) % 4)).reshape(-1, 4)
            largest = blocks.abs().amax(1).clamp(min=1e-6)
            codes = (blocks / largest[:, None]).reshape(-1, 1).sub(steps).abs().argmin(1)[: len(sizes)]
            sizes = steps[codes] * largest.repeat_interleave(4)[: len(sizes)] + offset
            state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": steps}
            tensors["weight.absmax"] = codes.to(torch.uint8)
        else:
            tensors["weight.absmax"] = sizes
        codes = (padded / sizes[:, None].clamp(min=1e-9)).reshape(-1, 1).sub(values).abs().argmin(1)
        pairs = codes[: len(flat)].reshape(-1, 2)
        tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        defined = values[codes].reshape(-1, block) * sizes[:, None]
        return tensors, defined.reshape(-1)[: len(flat)].reshape(weight.shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "float32",
    }
    return Scheme(config, quantise)


def eight_bits() -> Scheme:
    def quantise(weight: torch.Tensor) -> Layer:
        sizes = weight.abs().amax(1)
        codes = (weight * 127 / sizes[:, None]).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": sizes, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes * sizes[:, None] * 7.874015718698502e-3  # int8_vectorwise_dequant

    return Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, quantise)


SCHEMES: dict[str, Scheme] = {
    **{f"gptq-{bits}": gptq(bits) for bits in (2, 3, 4, 8)},
    "gptq-4-symmetric": gptq(4, symmetric=True),
    "gptq-4-v2": gptq(4, version=2),
    "gptq-3-v2-act-order": gptq(3, version=2, act_order=True),
    "gptq-4-act-order": gptq(4, act_order=True),
    "gptq-8-rows": gptq(8, group=-1),
    "awq": awq(),
    "ct-w4a16": compressed("pack-quantized", integers(4, "group"), PackedQuantizationCompressor),
    "ct-w4a16-asymmetric": compressed(
        "pack-quantized", integers(4, "group", symmetric=False), PackedQuantizationCompressor
    ),
    "ct-w3a16": compressed("pack-quantized", integers(3, "group"), PackedQuantizationCompressor),
    "ct-w8a16-channel": compressed("pack-quantized", integers(8, "channel"), PackedQuantizationCompressor),
    "ct-w8a8": compressed("int-quantized", integers(8, "channel"), IntQuantizationCompressor),
    "ct-w8a8-tensor": compressed("int-quantized", integers(8, "tensor"), IntQuantizationCompressor),
    "ct-fp8": compressed("float-quantized", floats("channel"), FloatQuantizationCompressor),
    "ct-fp8-tensor": compressed("float-quantized", floats("tensor"), FloatQuantizationCompressor),
    "ct-fp8-block": compressed("float-quantized", floats("block"), FloatQuantizationCompressor),
    "fp8-tensor": fp8(),
    "fp8-rows": fp8(rows=True),
    "fp8-blocks": fp8((40, 28)),
    "fp8-e5m2": fp8(dtype=torch.float8_e5m2),
    "bnb-nf4": four_bits(NF4, "nf4", nested=False),
    "bnb-nf4-nested": four_bits(NF4, "nf4", nested=True),
    "bnb-fp4": four_bits(FP4, "fp4", nested=False),
    "bnb-int8": eight_bits(),
}


def build_quantised(scheme: Scheme, folder: Path) -> Quantised:
    """Write a tiny Llama with its linear layers quantised; embedding and head stay in f32."""
    torch.manual_seed(29)
    config = transformers.LlamaConfig(
        **{**SIZES, "num_hidden_layers": 2}, attention_bias=True, head_dim=24, tie_word_embeddings=False
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    randomise(model)
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, module in model.model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            layer = f"model.{name}"
            stored, defined = scheme.quantise(module.weight.data)
            del tensors[f"{layer}.weight"]
            tensors |= {f"{layer}.{part}": each.contiguous() for part, each in stored.items()}
            module.weight.copy_(defined)
            weights[f"{layer}.weight"] = defined
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": scheme.config}))
    write_tokenizer(folder)
    return Quantised(folder, model, weights)
