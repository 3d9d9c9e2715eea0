"""Lists the public models whose shapes `headrace make-model` can copy: config.json, special tokens and chat markers.

Does not know weights or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from headrace.errors import RequestError

ShapeName = Literal[
    "tiny",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "llama-3.2-1b",
    "mistral-7b",
    "mixtral-tiny",
    "qwen3-moe-tiny",
    "minilm-l6",
]
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)

ConfigDict = dict[str, Any]

PLAIN_MARKS = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"})
"""Added tokens that are part of the text: decoding without special tokens keeps them."""


class TurnMarkers(msgspec.Struct, frozen=True):
    """The markers of one chat turn: `start` role `middle` content `end`."""

    start: str
    middle: str
    end: str


class PublicShape(msgspec.Struct, frozen=True, kw_only=True):
    name: ShapeName
    config: ConfigDict
    tokens: dict[str, int]  # ids of the special tokens; all other ids are ordinary tokens
    begin: str | None = None  # the tokenizer puts it before every text
    finish: str | None = None  # and this after it
    end_of_text: tuple[str, ...] = ()  # each ends a generation
    pad: str | None = None
    unknown: str | None = None
    mask: str | None = None
    turn: TurnMarkers | None = None  # None: not a chat model
    lower_case: bool = False

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])


CHATML = TurnMarkers("<|im_start|>", "\n", "<|im_end|>\n")

QWEN_TOKENS: Sequence[str] = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
QWEN3_TOKENS = [*QWEN_TOKENS, "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_FIRST = 151643
TINY_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TINY_VOCABULARY = 4096


def consecutive(first: int, names: Sequence[str]) -> dict[str, int]:
    return {name: first + index for index, name in enumerate(names)}


def llama_tokens() -> dict[str, int]:
    named = {
        128000: "<|begin_of_text|>",
        128001: "<|end_of_text|>",
        128004: "<|finetune_right_pad_id|>",
        128006: "<|start_header_id|>",
        128007: "<|end_header_id|>",
        128008: "<|eom_id|>",
        128009: "<|eot_id|>",
        128010: "<|python_tag|>",
    }
    reserved = (f"<|reserved_special_token_{index}|>" for index in range(248))
    return {named.get(token) or next(reserved): token for token in range(128000, 128256)}


def mistral_tokens() -> dict[str, int]:
    named = (
        "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
    ).split()
    return consecutive(0, [*named, *(f"[control_{index}]" for index in range(8, 769))])


def bert_tokens() -> dict[str, int]:
    named = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    unused = (f"[unused{index}]" for index in range(994))
    return {named.get(token) or next(unused): token for token in range(999)}


def decoder(model_type: str, architecture: str, **sizes: Any) -> ConfigDict:
    """Return the config keys that all decoders share; `sizes` adds or replaces keys."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": model_type,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    } | sizes


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **sizes: Any) -> ConfigDict:
    common = {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
    }
    return decoder("qwen2", "Qwen2ForCausalLM", **(common | sizes))


def tiny(model_type: str, architecture: str, **sizes: Any) -> ConfigDict:
    """Small in every direction, yet with what makes the arithmetic interesting: grouped heads, several layers."""
    common = {
        "bos_token_id": TINY_VOCABULARY - 5,
        "eos_token_id": TINY_VOCABULARY - 3,
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 384,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "vocab_size": TINY_VOCABULARY,
    }
    return decoder(model_type, architecture, **(common | sizes))


def chatml(name: ShapeName, config: ConfigDict, first: int, tokens: Sequence[str]) -> PublicShape:
    return PublicShape(
        name=name,
        config=config,
        tokens=consecutive(first, tokens),
        end_of_text=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        turn=CHATML,
    )


def find_shape(name: str) -> PublicShape:
    tiny_first = TINY_VOCABULARY - len(TINY_TOKENS)
    match name:
        case "tiny":
            config = tiny(
                "llama",
                "LlamaForCausalLM",
                attention_bias=False,
                mlp_bias=False,
                rope_scaling=None,
                tie_word_embeddings=True,
            )
            return chatml(name, config, tiny_first, TINY_TOKENS)
        case "qwen2.5-0.5b":
            config = qwen2(896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True, max_window_layers=21)
            return chatml(name, config, QWEN_FIRST, QWEN_TOKENS)
        case "qwen2.5-1.5b":
            config = qwen2(1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True, max_window_layers=21)
            return chatml(name, config, QWEN_FIRST, QWEN_TOKENS)
        case "qwen2.5-7b":
            return chatml(name, qwen2(3584, 18944, 28, 28, 4, vocab_size=152064), QWEN_FIRST, QWEN_TOKENS)
        case "qwen3-0.6b":
            config = decoder(
                "qwen3",
                "Qwen3ForCausalLM",
                attention_bias=False,
                bos_token_id=151643,
                eos_token_id=151645,
                head_dim=128,
                hidden_size=1024,
                intermediate_size=3072,
                max_position_embeddings=40960,
                max_window_layers=28,
                num_attention_heads=16,
                num_hidden_layers=28,
                num_key_value_heads=8,
                rope_scaling=None,
                rope_theta=1000000,
                sliding_window=None,
                tie_word_embeddings=True,
                use_sliding_window=False,
                vocab_size=151936,
            )
            return chatml(name, config, QWEN_FIRST, QWEN3_TOKENS)
        case "qwen3-moe-tiny":
            config = tiny(
                "qwen3_moe",
                "Qwen3MoeForCausalLM",
                attention_bias=False,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                moe_intermediate_size=64,
                norm_topk_prob=True,
                num_experts=16,
                num_experts_per_tok=4,
                num_hidden_layers=4,
                rope_scaling=None,
                rope_theta=1000000.0,
                sliding_window=None,
                use_sliding_window=False,
            )
            return chatml(name, config, tiny_first, TINY_TOKENS)
        case "mixtral-tiny":
            config = tiny(
                "mixtral",
                "MixtralForCausalLM",
                intermediate_size=256,
                num_experts_per_tok=2,
                num_hidden_layers=4,
                num_local_experts=8,
                output_router_logits=False,
                rms_norm_eps=1e-05,
                rope_theta=1000000.0,
                sliding_window=None,
            )
            return chatml(name, config, tiny_first, TINY_TOKENS)
        case "llama-3.2-1b":
            return llama_3_2_1b()
        case "mistral-7b":
            return mistral_7b()
        case "minilm-l6":
            return minilm_l6()
        case _:
            raise RequestError(f"no shape is called '{name}'; there are {', '.join(SHAPE_NAMES)}", parameter="like")


def llama_3_2_1b() -> PublicShape:
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = decoder(
        "llama",
        "LlamaForCausalLM",
        attention_bias=False,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        head_dim=64,
        hidden_size=2048,
        intermediate_size=8192,
        max_position_embeddings=131072,
        mlp_bias=False,
        num_attention_heads=32,
        num_hidden_layers=16,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_scaling=scaling,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        vocab_size=128256,
    )
    return PublicShape(
        name="llama-3.2-1b",
        config=config,
        tokens=llama_tokens(),
        begin="<|begin_of_text|>",
        end_of_text=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        pad="<|finetune_right_pad_id|>",
        turn=TurnMarkers("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    )


def mistral_7b() -> PublicShape:
    config = decoder(
        "mistral",
        "MistralForCausalLM",
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        vocab_size=32768,
    )
    return PublicShape(
        name="mistral-7b",
        config=config,
        tokens=mistral_tokens(),
        begin="<s>",
        end_of_text=("</s>",),
        unknown="<unk>",
        turn=TurnMarkers("[INST]", "[/INST]", "</s>"),
    )


def minilm_l6() -> PublicShape:
    config: ConfigDict = {
        "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 384,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 30522,
    }
    return PublicShape(
        name="minilm-l6",
        config=config,
        tokens=bert_tokens(),
        begin="[CLS]",
        finish="[SEP]",
        pad="[PAD]",
        unknown="[UNK]",
        mask="[MASK]",
        lower_case=True,
    )
