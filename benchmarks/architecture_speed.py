"""Speed of newer architectures beside llama.cpp and transformers, on random weights in the shape of a public model.

`python benchmarks/architectures.py --speed` prints the table. A shape keeps the public model's widths, heads, experts
and kinds of layers; it has fewer layers and a smaller vocabulary, so that three engines hold it at once. Speeds do not
depend on what the weights are. Engines take turns, and the table has medians.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from benchmarks.llama_server import LlamaServer, llama_server
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy
from headrace.models.model_folder import open_model

VOCABULARY: Final = 32_768
CONTEXT: Final = 1024
PREFILL: Final = 256  # tokens
DECODED: Final = 32
PAUSE_S: Final = 0.3  # between turns: threads of the one before stop spinning


@dataclass(frozen=True)
class Shape:
    """A public model's shape. `layers` and `whole` are those that are measured and those of the model."""

    model: str
    layers: int
    whole: int
    build: Callable[[int, bool], Any]  # of layers, and whether it only has to run: the model of transformers
    kind: gguf.MODEL_ARCH
    facts: Callable[[gguf.GGUFWriter, Any], None]  # writes the metadata that not every architecture has


def _qwen3_vl(layers: int, small: bool) -> Any:
    hidden, inner = (256, 512) if small else (2048, 6144)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "pad_token_id": 0,
    }
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=1, video_token_id=2, tie_word_embeddings=True
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_sections([24, 20, 20, 0])
    writer.add_num_deepstack_layers(3)


def _lfm2(layers: int, small: bool) -> Any:
    hidden, inner = (256, 512) if small else (2048, 8192)
    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=CONTEXT,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        layer_types=["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)],
        tie_word_embeddings=True,
    )
    return transformers.Lfm2ForCausalLM(config)


def _lfm2_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_shortconv_l_cache(config.conv_L_cache)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])


def _gpt_oss(layers: int, small: bool) -> Any:
    hidden, inner, experts = (256, 256, 4) if small else (2880, 2880, 32)
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
        pad_token_id=0,
    )
    return transformers.GptOssForCausalLM(config)


def _gpt_oss_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


SHAPES: Final = {
    "qwen3-vl": Shape("Qwen3-VL-2B, text part", 8, 28, _qwen3_vl, gguf.MODEL_ARCH.QWEN3VL, _qwen3_vl_facts),
    "lfm2": Shape("LFM2-1.2B", 9, 16, _lfm2, gguf.MODEL_ARCH.LFM2, _lfm2_facts),
    "gpt-oss": Shape("gpt-oss-20b", 2, 24, _gpt_oss, gguf.MODEL_ARCH.GPT_OSS, _gpt_oss_facts),
}


def speed_table(names: list[str], *, rounds: int, threads: int, small: bool) -> str:
    """Return the table of these shapes. `small`: only to see that it runs."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    lines = [
        "# Newer architectures beside llama.cpp and transformers",
        "",
        "Random weights in the shape of the public model, with fewer layers and a vocabulary of "
        f"{VOCABULARY:,} tokens, on{cpu.split(':')[1]}, {threads} threads. Headrace in int8 with KV in bf16; llama.cpp "
        f"in Q8_0, from xllamacpp {version('xllamacpp')}, which is no build for this machine; transformers "
        f"{transformers.__version__} in bf16. Tokens per second of wall time, medians of {rounds} rounds in turn, from "
        f"least to most: prefill of {PREFILL} tokens, decode of {DECODED} after them, one sequence.",
        "",
        *(
            ["**Small models, to see that it runs: these speeds say nothing of the public models.**", ""]
            if small
            else []
        ),
        "| model | layers | measured | Headrace | llama.cpp | ratio | transformers | ratio |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        print(f"\r\x1b[K{name}", end="", file=sys.stderr)
        lines += rows(SHAPES[name], rounds=rounds, threads=threads, small=small)
    print("\r\x1b[K", end="", file=sys.stderr)
    lines += ["", f"Load average at the end: {Path('/proc/loadavg').read_text().split()[0]} on {os.cpu_count()} cores."]
    return "\n".join(lines) + "\n"


def rows(shape: Shape, *, rounds: int, threads: int, small: bool) -> list[str]:
    torch.manual_seed(3)
    torch.set_num_threads(threads)
    layers = min(shape.layers, 4) if small else shape.layers
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        model = shape.build(layers, small).to(torch.bfloat16).eval()
        model.save_pretrained(folder)
        file = folder / "model.gguf"
        write_gguf(file, model, shape)
        file = file.rename(folder.parent / f"{folder.name}.gguf")
        try:
            return _measured(shape, folder, file, model, layers, rounds=rounds, threads=threads)
        finally:
            file.unlink()
            del model
            gc.collect()


def _measured(
    shape: Shape, folder: Path, file: Path, model: Any, layers: int, *, rounds: int, threads: int
) -> list[str]:
    tokens = [int(token) for token in np.random.default_rng(1).integers(300, VOCABULARY, PREFILL)]
    executor = CpuExecutor.load(open_model(folder), weights="int8", threads=threads, context=CONTEXT)
    found: dict[str, list[tuple[float, float]]] = {"headrace": [], "llama.cpp": [], "transformers": []}
    with llama_server(file, threads) as theirs:
        turns = {
            "headrace": lambda: _timed(lambda count: greedy(executor, [tokens], count)),
            "llama.cpp": lambda: llama_speeds(theirs, tokens),
            "transformers": lambda: _timed(lambda count: _generate(model, tokens, count)),
        }
        for number in range(rounds + 1):  # the first one warms up
            for name, turn in turns.items():
                time.sleep(PAUSE_S)
                speeds = turn()
                if number:
                    found[name].append(speeds)
    executor.close()
    lines: list[str] = []
    for place, measured in enumerate(("prefill", "decode")):
        ours, llama, hugging = ([pair[place] for pair in found[name]] for name in found)
        cells = [_spread(ours)]
        for others in (llama, hugging):
            cells += [_spread(others), f"{statistics.median(ours) / statistics.median(others):.2f}"]
        lines.append(f"| {shape.model} | {layers} of {shape.whole} | {measured} | {' | '.join(cells)} |")
    return lines


def _timed(run: Callable[[int], object]) -> tuple[float, float]:
    """Return the speeds of prefill and decode."""
    times = [time.perf_counter()]
    for count in (1, 1 + DECODED):
        run(count)
        times.append(time.perf_counter())
    first, both = times[1] - times[0], times[2] - times[1]
    return PREFILL / first, DECODED / max(both - first, 1e-9)


def _generate(model: Any, tokens: list[int], count: int) -> None:
    prompt = torch.tensor([tokens])
    with torch.no_grad():
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def llama_speeds(server: LlamaServer, tokens: list[int]) -> tuple[float, float]:
    """Return the speeds of prefill and decode, by llama.cpp's own clock."""
    timings = server.complete(tokens, 1 + DECODED, cache_prompt=False, ignore_eos=True)["timings"]
    return timings["prompt_n"] * 1e3 / timings["prompt_ms"], timings["predicted_n"] * 1e3 / timings["predicted_ms"]


def write_gguf(path: Path, model: Any, shape: Shape) -> None:
    """Write a model for llama.cpp: its matrices in Q8_0. Weights may be in another order than a converter's."""
    config = model.config.get_text_config()
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[shape.kind])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(size)
    shape.facts(writer, config)
    if shape.kind != gguf.MODEL_ARCH.LFM2:
        writer.add_head_count_kv(config.num_key_value_heads)
    _write_vocabulary(writer)
    names = gguf.get_tensor_name_map(shape.kind, config.num_hidden_layers)
    for source, tensor in model.state_dict().items():
        if ".visual." in source or (source == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        for name, part in _parts(source.replace("model.language_model.", "model."), tensor.float().numpy()):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise SystemExit(f"The package gguf has no name for '{name}'.")
            _add(writer, target, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of transformers under names that the package gguf knows, cut and turned as llama.cpp takes it."""
    if ".conv.conv." in name:
        yield name, values.squeeze(1)
    elif name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        end = ".bias" if name.endswith("_bias") else ".weight"
        stem = name.removesuffix("_bias").removesuffix("gate_up_proj")
        for place, leaf in enumerate(("gate_proj", "up_proj")):
            part = values[..., place::2]
            yield f"{stem}{leaf}{end}", part if end == ".bias" else part.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values.swapaxes(1, 2)
    elif name.endswith("experts.down_proj_bias"):
        yield f"{name.removesuffix('_bias')}.bias", values
    elif name.endswith(".sinks"):
        yield f"{name}.weight", values
    else:
        yield name, values


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    exact = values.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or "shortconv.conv" in name
    kind = Type.F32 if exact or values.shape[-1] % 32 else Type.Q8_0
    data = gguf.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    letters = [chr(256 + each) for each in range(256)]  # stand for bytes that no text here has
    tokens = [*letters, *(f"w{number}" for number in range(VOCABULARY - len(letters)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(0)
