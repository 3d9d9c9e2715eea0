"""Builds tiny models with random weights in transformers, one or more per family.

Each uses its family's special features. Windows and trained contexts are short enough that 300 tokens exceed them, and
weights are large enough to keep logits apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import transformers.utils.logging
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.spec import ModelSpec
from tests.models import tiny_configs as configs
from tests.models.tiny_configs import SIZES, VOCAB
from tests.models.tiny_recurrent import RECURRENT

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Tiny:
    """How to make one tiny model."""

    architecture: str
    config: Callable[[], Any]
    # Of save_pretrained: `save_original_format=False` keeps experts fused, `max_shard_size` splits the file.
    save: dict[str, Any] = field(default_factory=dict[str, Any])
    encoder: bool = False
    pooling: dict[str, Any] | None = None
    normalise: bool = False
    reranker: bool = False
    brief: bool = False  # another form of an architecture that is there: only its logits are compared
    dense: tuple[tuple[int, str], ...] = ()  # outputs and activation of the Dense modules
    saved: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # changes config.json after it is saved


TINY: dict[str, Tiny] = {
    "llama": Tiny("LlamaForCausalLM", configs.llama),
    "llama-linear-tied": Tiny("LlamaForCausalLM", configs.llama_linear, save={"max_shard_size": "100KB"}),
    "mistral": Tiny("MistralForCausalLM", configs.mistral),
    "ministral": Tiny("MinistralForCausalLM", configs.ministral),
    "ministral3": Tiny("Ministral3ForCausalLM", configs.ministral3),
    "ministral3-vision": Tiny("Mistral3ForConditionalGeneration", configs.ministral3_vision, brief=True),
    "mistral3": Tiny("Mistral3ForConditionalGeneration", configs.mistral3),
    "seed-oss": Tiny("SeedOssForCausalLM", configs.seed_oss),
    "smollm3": Tiny("SmolLM3ForCausalLM", configs.smollm3),
    "qwen2": Tiny("Qwen2ForCausalLM", configs.qwen2),
    "qwen2-yarn": Tiny("Qwen2ForCausalLM", configs.qwen2_yarn),
    "qwen2-moe": Tiny("Qwen2MoeForCausalLM", configs.qwen2_moe),
    "qwen3": Tiny("Qwen3ForCausalLM", configs.qwen3),
    "qwen3-moe": Tiny("Qwen3MoeForCausalLM", configs.qwen3_moe),
    "qwen3-moe-fused": Tiny("Qwen3MoeForCausalLM", configs.qwen3_moe_sparse_step, save={"save_original_format": False}),
    "gemma": Tiny("GemmaForCausalLM", configs.gemma),
    "gemma2": Tiny("Gemma2ForCausalLM", configs.gemma2),
    "gemma3": Tiny("Gemma3ForCausalLM", configs.gemma3_text),
    "gemma3-vision": Tiny("Gemma3ForConditionalGeneration", configs.gemma3_vision),
    "gemma3n": Tiny("Gemma3nForCausalLM", configs.gemma3n),
    "gemma3n-untied": Tiny("Gemma3nForCausalLM", configs.gemma3n_plain, brief=True),
    "gemma4": Tiny("Gemma4ForCausalLM", configs.gemma4),
    "gemma4-experts": Tiny("Gemma4ForCausalLM", configs.gemma4_experts, saved=configs.published_gemma4_config),
    "gemma4-unified": Tiny("Gemma4UnifiedForCausalLM", configs.gemma4_unified, brief=True),
    "gemma4-vision": Tiny("Gemma4ForConditionalGeneration", configs.gemma4_vision, brief=True),
    "phi3": Tiny("Phi3ForCausalLM", configs.phi3),
    "phi3-window-tied": Tiny("Phi3ForCausalLM", configs.phi3_window),
    "olmo2": Tiny("Olmo2ForCausalLM", configs.olmo2),
    "olmo3": Tiny("Olmo3ForCausalLM", configs.olmo3),
    "olmoe": Tiny("OlmoeForCausalLM", configs.olmoe),
    "exaone4": Tiny("Exaone4ForCausalLM", configs.exaone4),
    "exaone4-tied": Tiny("Exaone4ForCausalLM", configs.exaone4_without_window),
    "granite": Tiny("GraniteForCausalLM", configs.granite),
    "granite-moe": Tiny("GraniteMoeForCausalLM", configs.granite_moe),
    "glm": Tiny("GlmForCausalLM", configs.glm),
    "glm4": Tiny("Glm4ForCausalLM", configs.glm4),
    "glm4-moe": Tiny("Glm4MoeForCausalLM", configs.glm4_moe),
    "cohere": Tiny("CohereForCausalLM", configs.cohere),
    "cohere2": Tiny("Cohere2ForCausalLM", configs.cohere2),
    "ernie": Tiny("Ernie4_5ForCausalLM", configs.ernie),
    "stablelm": Tiny("StableLmForCausalLM", configs.stablelm),
    "starcoder2": Tiny("Starcoder2ForCausalLM", configs.starcoder2),
    "nemotron": Tiny("NemotronForCausalLM", configs.nemotron),
    "arcee": Tiny("ArceeForCausalLM", configs.arcee),
    "gpt-oss": Tiny("GptOssForCausalLM", configs.gpt_oss),
    "deepseek-v2-lite": Tiny("DeepseekV2ForCausalLM", configs.deepseek_v2_lite, brief=True),
    "deepseek-v2": Tiny("DeepseekV2ForCausalLM", configs.deepseek_v2),
    "deepseek-v3": Tiny("DeepseekV3ForCausalLM", configs.deepseek_v3),
    "llama-dynamic": Tiny("LlamaForCausalLM", configs.llama_dynamic, brief=True),
    "minimax-m2": Tiny("MiniMaxM2ForCausalLM", configs.minimax_m2),
    "ernie-moe": Tiny("Ernie4_5_MoeForCausalLM", configs.ernie_moe),
    "command-r-plus": Tiny("CohereForCausalLM", configs.command_r_plus, brief=True),
    "stablelm-12b": Tiny("StableLmForCausalLM", configs.stablelm_12b, brief=True),
    "llama4": Tiny("Llama4ForCausalLM", configs.llama4),
    "phimoe": Tiny("PhimoeForCausalLM", configs.phimoe),
    "gpt2": Tiny("GPT2LMHeadModel", configs.gpt2),
    "gpt-bigcode": Tiny("GPTBigCodeForCausalLM", configs.gpt_bigcode),
    "gpt-bigcode-heads": Tiny("GPTBigCodeForCausalLM", configs.gpt_bigcode_heads, brief=True),
    "opt": Tiny("OPTForCausalLM", configs.opt),
    "pythia": Tiny("GPTNeoXForCausalLM", configs.gpt_neox, saved=configs.own_neox_config),
    "gpt-neox-in-turn": Tiny("GPTNeoXForCausalLM", configs.gpt_neox_in_turn, brief=True),
    "gptj": Tiny("GPTJForCausalLM", configs.gptj),
    "falcon": Tiny("FalconForCausalLM", configs.falcon),
    "falcon-groups": Tiny("FalconForCausalLM", configs.falcon_groups, brief=True),
    "falcon2": Tiny("FalconForCausalLM", configs.falcon2, brief=True),
    "falcon-in-turn": Tiny("FalconForCausalLM", configs.falcon_in_turn, brief=True),
    "bloom": Tiny("BloomForCausalLM", configs.bloom),
    "mpt": Tiny("MptForCausalLM", configs.mpt),
    "phi": Tiny("PhiForCausalLM", configs.phi),
    "mixtral": Tiny("MixtralForCausalLM", configs.mixtral),
    "mixtral-fused": Tiny("MixtralForCausalLM", configs.mixtral_window, save={"save_original_format": False}),
    "bert": Tiny("BertModel", configs.bert, encoder=True),
    "bert-cls": Tiny("BertModel", configs.bert, encoder=True, pooling={"pooling_mode_cls_token": True}, normalise=True),
    "bert-mlm-last": Tiny("BertForMaskedLM", configs.bert_tanh, encoder=True, pooling={"pooling_mode": "lasttoken"}),
    "bert-minilm": Tiny(
        "BertModel", configs.bert, encoder=True, pooling={"pooling_mode_mean_tokens": True}, normalise=True
    ),
    "roberta": Tiny("RobertaModel", configs.roberta, encoder=True, pooling={"pooling_mode_mean_tokens": True}),
    "roberta-mlm": Tiny("RobertaForMaskedLM", configs.roberta, encoder=True),
    "bge-m3": Tiny(
        "XLMRobertaModel", configs.xlm_roberta, encoder=True, pooling={"pooling_mode_cls_token": True}, normalise=True
    ),
    "mpnet": Tiny(
        "MPNetModel", configs.mpnet, encoder=True, pooling={"pooling_mode_mean_tokens": True}, normalise=True
    ),
    "modernbert": Tiny("ModernBertModel", configs.modernbert, encoder=True, pooling={"pooling_mode_cls_token": True}),
    "modernbert-mlm": Tiny("ModernBertForMaskedLM", configs.modernbert_biased, encoder=True),
    "nomic": Tiny(
        "NomicBertModel", configs.nomic, encoder=True, saved=configs.own_nomic_config, normalise=True, pooling={}
    ),
    "nomic-transformers": Tiny("NomicBertModel", configs.nomic, encoder=True, save={"save_original_format": False}),
    "embedding-gemma": Tiny(
        "Gemma3TextModel",
        configs.embedding_gemma,
        encoder=True,
        normalise=True,
        pooling={},
        dense=((200, "Identity"), (40, "Tanh"), (24, "GELU")),
    ),
    "eurobert": Tiny("EuroBertModel", configs.eurobert, encoder=True, pooling={"pooling_mode_mean_tokens": True}),
    "bert-max": Tiny("BertModel", configs.bert, encoder=True, pooling={"pooling_mode": "max"}),
    "bert-weighted": Tiny("BertModel", configs.bert, encoder=True, pooling={"pooling_mode": "weightedmean"}),
    "bert-sqrt": Tiny("BertModel", configs.bert, encoder=True, pooling={"pooling_mode_mean_sqrt_len_tokens": True}),
    # Decoders without a head, as embedders are saved.
    "qwen3-embedder": Tiny(
        "Qwen3Model", configs.qwen3, encoder=True, pooling={"pooling_mode": "lasttoken"}, normalise=True
    ),
    "mistral-embedder": Tiny(
        "MistralModel", configs.mistral_plain, encoder=True, pooling={"pooling_mode_mean_tokens": True}
    ),
    "qwen2-both-ways": Tiny("Qwen2Model", configs.qwen2_both_ways, encoder=True, pooling={"pooling_mode": "lasttoken"}),
    "gemma3-embedder": Tiny("Gemma3TextModel", configs.gemma3_text, encoder=True),
}
TINY |= {
    "bert-reranker": Tiny("BertForSequenceClassification", configs.bert, reranker=True),
    "roberta-reranker": Tiny("RobertaForSequenceClassification", configs.roberta, reranker=True),
    "bge-reranker": Tiny("XLMRobertaForSequenceClassification", configs.xlm_roberta, reranker=True),
    "mpnet-reranker": Tiny("MPNetForSequenceClassification", configs.mpnet, reranker=True),
    "modernbert-reranker": Tiny("ModernBertForSequenceClassification", configs.modernbert, reranker=True),
    "modernbert-reranker-mean": Tiny("ModernBertForSequenceClassification", configs.modernbert_mean, reranker=True),
    "qwen3-reranker": Tiny("Qwen3ForSequenceClassification", configs.qwen3_plain, reranker=True),
}
TINY |= {
    name: Tiny(architecture, partial(config, SIZES), brief=name.endswith("-plain"))
    for name, (architecture, config) in RECURRENT.items()
}
DECODERS = tuple(name for name, tiny in TINY.items() if not tiny.encoder and not tiny.reranker)
WHOLE = tuple(name for name in DECODERS if not TINY[name].brief)
# Those whose layers `headrace compress` computes.
UNCOMPRESSED = tuple(
    """
    ministral3 ministral3-vision gemma3n gemma3n-untied gemma4 gemma4-experts gemma4-unified
    gemma4-vision
    phimoe llama4 minimax-m2 ernie-moe command-r-plus stablelm-12b deepseek-v2-lite deepseek-v2 deepseek-v3
    gpt-oss gpt2 gpt-bigcode gpt-bigcode-heads opt pythia gpt-neox-in-turn gptj falcon falcon-groups falcon2
    falcon-in-turn bloom mpt phi qwen2-moe glm4-moe cohere cohere2 glm glm4 ernie granite-moe
    """.split()
)
COMPRESSIBLE = tuple(name for name in DECODERS if name not in UNCOMPRESSED and name not in RECURRENT)
ENCODERS = tuple(name for name, tiny in TINY.items() if tiny.encoder)
RERANKERS = tuple(name for name, tiny in TINY.items() if tiny.reranker)


def build(name: str, folder: Path) -> Any:
    """Write the model, its weights in f32, to the folder; returns it, ready to compare with."""
    tiny = TINY[name]
    torch.manual_seed(_seed_of(name))
    config = tiny.config()
    config._attn_implementation = "eager"
    if tiny.reranker:
        config.num_labels = 1
    model = getattr(transformers, tiny.architecture)(config).to(torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, **tiny.save)
    write_tokenizer(folder)
    if tiny.saved is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(tiny.saved(json.loads(path.read_text()))))
    if tiny.pooling is not None:
        _write_sentence_files(folder, tiny)
    return model


@dataclass(frozen=True)
class Reference:
    """A tiny model as transformers computes it: eager attention, f32."""

    name: str
    tiny: Tiny
    folder: Path
    model: Any

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Of every position."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()

    def rank(self, tokens: list[int], second_text: int = -1) -> float:
        """The logit of a reranker. `second_text`: where its token type begins, if it has another."""
        types = [int(0 <= second_text <= place) for place in range(len(tokens))]
        given = {"token_type_ids": torch.tensor([types])} if second_text >= 0 else {}
        with torch.no_grad():
            return float(self.model(input_ids=torch.tensor([tokens]), **given).logits[0, 0])

    def embedding(self, tokens: list[int]) -> NDArray[np.float32]:
        """As sentence-transformers pools the hidden states: the mean where nothing says otherwise."""
        with torch.no_grad():
            states = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        pooling = self.tiny.pooling or {}
        if pooling.get("pooling_mode_cls_token"):
            pooled = states[0]
        elif pooling.get("pooling_mode") == "lasttoken":
            pooled = states[-1]
        elif pooling.get("pooling_mode") == "max":
            pooled = states.max(0).values
        elif pooling.get("pooling_mode") == "weightedmean":
            places = torch.arange(1, len(states) + 1, dtype=torch.float32)[:, None]
            pooled = (states * places).sum(0) / places.sum()
        elif pooling.get("pooling_mode_mean_sqrt_len_tokens"):
            pooled = states.sum(0) / len(states) ** 0.5
        else:
            pooled = states.mean(0)
        for index, (_, kind) in enumerate(self.tiny.dense):
            weights = load_file(self.folder / f"{2 + index}_Dense" / "model.safetensors")
            pooled = weights["linear.weight"] @ pooled + weights["linear.bias"]
            pooled = getattr(torch.nn, kind)()(pooled)
        return (torch.nn.functional.normalize(pooled, dim=0) if self.tiny.normalise else pooled).numpy()


def saved_config(reference: Reference) -> dict[str, Any]:
    return json.loads((reference.folder / "config.json").read_text())


def spec_of(values: dict[str, Any], folder: Path = Path("model")) -> ModelSpec:
    return model_spec(ConfigJson(values, path=folder / "config.json"))


def _seed_of(name: str) -> int:
    """Return the seed of a model's weights. A new model gets one of its own here, so that no other changes."""
    later = (
        *("nemotron", "arcee", "falcon-h1", "falcon-h1-plain", "nemotron-h", "nemotron-h-plain"),
        *("ministral3", "ministral3-vision", "gemma3n", "gemma3n-untied"),
        *("gemma4", "gemma4-experts", "gemma4-vision", "gemma4-unified"),
    )
    if name in later:
        return 3000 + later.index(name)
    if name in RECURRENT:
        return 2000 + sorted(RECURRENT.keys() - set(later)).index(name)
    return 1000 + sorted(TINY.keys() - RECURRENT.keys() - set(later)).index(name)


def prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, VOCAB - 1, (length,), generator=generator).tolist()


def randomise(model: Any) -> None:
    """Every weight random, so that none can be left out unnoticed; norms stay near what they are made as."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name.lower() and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
    )
    text = "the mill turns the wheel and the water runs down the race past the stones where the grain becomes flour"
    tokenizer.train_from_iterator([text] * 8, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_sentence_files(folder: Path, tiny: Tiny) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * len(tiny.dense), *["Normalize"] * tiny.normalise]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": paths[index], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], **(tiny.pooling or {})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    inputs = SIZES["hidden_size"]
    for index, (outputs, kind) in enumerate(tiny.dense):
        path = folder / f"{2 + index}_Dense"
        path.mkdir()
        config = {"in_features": inputs, "out_features": outputs, "bias": True}
        (path / "config.json").write_text(
            json.dumps({**config, "activation_function": f"torch.nn.modules.activation.{kind}"})
        )
        tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.3, "linear.bias": torch.randn(outputs)}
        save_file(tensors, path / "model.safetensors")
        inputs = outputs
