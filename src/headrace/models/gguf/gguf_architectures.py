"""Lists the architectures of GGUF files that Headrace reads: their names in config.json, and what differs.

What a table of names cannot say is in the modules of `adjusting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from headrace.models.gguf.adjusting import attention, encoders, gemma, gpt, latent, mixtures, places, recurrent
from headrace.models.gguf.gguf_keys import GgufKeys
from headrace.models.gguf.gguf_names import GgufNames
from headrace.models.spec import ModelSpec

# Names in config.json -> names in a file, after its architecture's.
KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
LAYER_EPS: Final = "attention.layer_norm_epsilon"
_WINDOW: Final = {"sliding_window": "attention.sliding_window"}
_SOFTCAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS: Final = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SHARED: Final = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_LOCAL_EXPERTS: Final = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_SUM_OF_WEIGHTS: Final = {"norm_topk_prob": True}
_SHORT_CONVOLUTIONS: Final[GgufNames] = {
    "recurrent.in": (("shortconv.in_proj",),),
    "recurrent.conv": (("shortconv.conv",),),
    "recurrent.out": (("shortconv.out_proj",),),
}
_ONE_NORM: Final[GgufNames] = {"mlp.norm": (("attn_norm",),)}  # a layer has one sublayer
_TWO_NORMS: Final[GgufNames] = {"attn.norm": (("attn_norm_2",), ("attn_norm",)), "mlp.norm": (("attn_norm",),)}
_GRANITE: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


class Architecture(msgspec.Struct, frozen=True):
    """How a file of one architecture becomes a config of one of our families."""

    name: str  # the Hugging Face class
    keys: Mapping[str, str] = {}  # names in config.json -> names in a file, beside the common ones
    fixed: Mapping[str, object] = {}  # values of config.json that files do not say
    adjust: Callable[[GgufKeys], None] | None = None  # changes the values of config.json; it may change the class
    finish: Callable[[GgufKeys, ModelSpec], ModelSpec] | None = None  # changes the spec
    names: GgufNames = {}  # of tensors, beside the common ones
    fused: bool = False  # files that we write have q, k and v in one tensor, and gate and up in one
    pairs: bool = False  # rows of q and k are in the pairs that the rope rotates
    written: bool = False  # `headrace compress` writes such files


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        "LlamaForCausalLM", {**_WINDOW, **_LOCAL_EXPERTS}, adjust=mixtures.llama, pairs=True, written=True
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", written=True),
    "qwen3": Architecture("Qwen3ForCausalLM", written=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {**_EXPERTS, **_SHARED}, {"norm_topk_prob": False}, mixtures.plain),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _EXPERTS, _SUM_OF_WEIGHTS, mixtures.plain),
    "qwen2vl": Architecture("Qwen2ForCausalLM", finish=places.following),
    "qwen3vl": Architecture("Qwen3ForCausalLM", finish=places.in_turns),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", _EXPERTS, _SUM_OF_WEIGHTS, mixtures.plain, finish=places.in_turns
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", {**_WINDOW, **_SOFTCAPS}, adjust=gemma.scores, written=True),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {**_WINDOW, **_SOFTCAPS, "rope_local_base_freq": "rope.freq_base_swa"},
        adjust=gemma.scores,
        written=True,
    ),
    "gemma-embedding": Architecture(
        "Gemma3ForCausalLM",
        {**_WINDOW, "rope_local_base_freq": "rope.freq_base_swa"},
        {"use_bidirectional_attention": True},
        gemma.scores,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", {**_WINDOW, "rope_local_base_freq": "rope.freq_base_swa"}, adjust=gemma.third_n
    ),
    "gemma4": Architecture("Gemma4ForCausalLM", _WINDOW, adjust=gemma.fourth),
    "phi2": Architecture("PhiForCausalLM", {"layer_norm_eps": LAYER_EPS}),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {**_WINDOW, "original_max_position_embeddings": "rope.scaling.original_context_length"},
        fused=True,
        written=True,
    ),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        {
            **_WINDOW,
            **_LOCAL_EXPERTS,
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
        adjust=mixtures.head_bias,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs=True, written=True),
    "mistral3": Architecture(
        "MistralForCausalLM", _WINDOW, {"sliding_window": None}, attention.growing_queries, pairs=True
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _WINDOW, adjust=attention.windows_of_olmo, written=True),
    "olmoe": Architecture("OlmoeForCausalLM", _EXPERTS, {"norm_topk_prob": False}, mixtures.plain),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {**_WINDOW, **_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
        adjust=mixtures.gpt_oss,
    ),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", adjust=latent.deepseek),
    "glm4": Architecture("Glm4ForCausalLM", pairs=True),
    "glm4moe": Architecture("Glm4MoeForCausalLM", adjust=mixtures.glm),
    "granite": Architecture("GraniteForCausalLM", _GRANITE, adjust=attention.granite_positions, pairs=True),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", {**_GRANITE, **_LOCAL_EXPERTS}, adjust=mixtures.granite, pairs=True
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        {"layer_norm_eps": LAYER_EPS, "logit_scale": "logit_scale"},
        adjust=attention.normalised_heads("use_qk_norm"),
        pairs=True,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        {**_WINDOW, "layer_norm_eps": LAYER_EPS, "logit_scale": "logit_scale"},
        pairs=True,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", pairs=True),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", adjust=mixtures.ernie, pairs=True),
    "exaone4": Architecture("Exaone4ForCausalLM", _WINDOW, {"sliding_window": None}),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {**_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
        adjust=mixtures.sigmoid,
    ),
    "llama4": Architecture("Llama4ForCausalLM", adjust=mixtures.llama4, pairs=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {"norm_epsilon": LAYER_EPS}, {"sliding_window": 4096}),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {"layer_norm_eps": LAYER_EPS, "use_parallel_residual": "use_parallel_residual"},
        adjust=attention.normalised_heads("qk_layernorm"),
    ),
    "nemotron": Architecture("NemotronForCausalLM", {"norm_eps": LAYER_EPS}),
    "arcee": Architecture("ArceeForCausalLM", pairs=True),
    "lfm2": Architecture("Lfm2ForCausalLM", adjust=recurrent.lfm2, names=_SHORT_CONVOLUTIONS),
    "mamba2": Architecture("Mamba2ForCausalLM", adjust=recurrent.mamba2),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", _GRANITE, adjust=recurrent.granite_hybrid, pairs=True),
    "falcon-h1": Architecture("FalconH1ForCausalLM", adjust=recurrent.falcon_h1),
    "nemotron_h": Architecture("NemotronHForCausalLM", adjust=recurrent.nemotron_h, names=_ONE_NORM),
    "nemotron_h_moe": Architecture("NemotronHForCausalLM", adjust=recurrent.nemotron_h, names=_ONE_NORM),
    "qwen3next": Architecture("Qwen3NextForCausalLM", {**_EXPERTS, **_SHARED}, _SUM_OF_WEIGHTS, recurrent.qwen_next),
    "qwen35": Architecture("Qwen3_5ForCausalLM", adjust=recurrent.qwen_next),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", {**_EXPERTS, **_SHARED}, _SUM_OF_WEIGHTS, recurrent.qwen_next),
    "bert": Architecture("BertModel", {"layer_norm_eps": LAYER_EPS}, adjust=encoders.bert),
    "nomic-bert": Architecture("NomicBertModel", {"layer_norm_eps": LAYER_EPS}, adjust=encoders.nomic),
    "modern-bert": Architecture(
        "ModernBertModel",
        {"norm_eps": LAYER_EPS, "local_attention": _WINDOW["sliding_window"]},
        adjust=encoders.modern,
    ),
    "gpt2": Architecture("GPT2LMHeadModel", {"layer_norm_epsilon": LAYER_EPS}),
    "starcoder": Architecture("GPTBigCodeForCausalLM", {"layer_norm_epsilon": LAYER_EPS}),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", {"layer_norm_eps": LAYER_EPS, "use_parallel_residual": "use_parallel_residual"}
    ),
    "bloom": Architecture("BloomForCausalLM", {"layer_norm_epsilon": LAYER_EPS}),
    "mpt": Architecture("MptForCausalLM", {"layer_norm_epsilon": LAYER_EPS}, adjust=gpt.mpt),
    "falcon": Architecture("FalconForCausalLM", {"layer_norm_epsilon": LAYER_EPS}, adjust=gpt.falcon, names=_TWO_NORMS),
}
