"""Lists the model families and chooses the one for a config.

A family is a module with `architectures`, `ignored`, `spec` and `sources` (see `family.Family`). To add one: write it,
add it to FAMILIES and give it a golden test.
"""

from __future__ import annotations

from msgspec.structs import replace

from headrace.errors import ModelError, similar_names
from headrace.models.config_json import ConfigJson
from headrace.models.families import (
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma1,
    gemma3n,
    gemma4,
    glm,
    gpt_oss,
    granite,
    llama,
    llama4,
    mixtral,
    nemotron,
    olmo,
    phi,
    qwen,
    stablelm,
    starcoder,
)
from headrace.models.families.config_keys import check_keys
from headrace.models.families.decoder import check_size
from headrace.models.families.encoders import bert, eurobert, modernbert, mpnet, nomic, roberta
from headrace.models.families.family import Family, TensorPart, TensorSources, architecture_of
from headrace.models.families.gpt import bloom, falcon, gpt2, gpt_neox
from headrace.models.families.recurrent import (
    bamba,
    falcon_h1,
    granite_hybrid,
    lfm2,
    mamba2,
    nemotron_h,
    qwen_next,
)
from headrace.models.families.rerankers import RERANKERS, base_of, head_sources, reranker_spec
from headrace.models.families.vision import idefics3, llava, qwen3_vl, qwen_vl
from headrace.models.sentence_files import read_max_tokens, read_pooling
from headrace.models.spec import ModelSpec

__all__ = [
    "FAMILIES",
    "HEADLESS",
    "RERANKERS",
    "Family",
    "TensorPart",
    "TensorSources",
    "family_of",
    "family_sources",
    "model_spec",
]

FAMILIES: tuple[Family, ...] = (
    llama,
    llama4,
    idefics3,
    llava,
    qwen,
    qwen_vl,
    qwen3_vl,
    qwen_next,
    gemma1,
    gemma,
    gemma3n,
    gemma4,
    phi,
    olmo,
    exaone,
    granite,
    glm,
    ernie,
    cohere,
    stablelm,
    nemotron,
    starcoder,
    mixtral,
    gpt_oss,
    deepseek,
    lfm2,
    mamba2,
    bamba,
    falcon_h1,
    nemotron_h,
    granite_hybrid,
    gpt2,
    gpt_neox,
    falcon,
    bloom,
    bert,
    roberta,
    mpnet,
    modernbert,
    nomic,
    eurobert,
)


# Decoders saved without their head, as embedders often are.
HEADLESS: dict[str, str] = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "SmolLM3Model": "SmolLM3ForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Qwen2MoeModel": "Qwen2MoeForCausalLM",
    "Qwen3MoeModel": "Qwen3MoeForCausalLM",
    "MixtralModel": "MixtralForCausalLM",
    "MinistralModel": "MinistralForCausalLM",
    "Ministral3Model": "Ministral3ForCausalLM",
    "SeedOssModel": "SeedOssForCausalLM",
    "GemmaModel": "GemmaForCausalLM",
    "Olmo3Model": "Olmo3ForCausalLM",
    "OlmoeModel": "OlmoeForCausalLM",
    "Exaone4Model": "Exaone4ForCausalLM",
    "GraniteModel": "GraniteForCausalLM",
    "GraniteMoeModel": "GraniteMoeForCausalLM",
    "GlmModel": "GlmForCausalLM",
    "Glm4Model": "Glm4ForCausalLM",
    "Glm4MoeModel": "Glm4MoeForCausalLM",
    "CohereModel": "CohereForCausalLM",
    "Cohere2Model": "Cohere2ForCausalLM",
    "Ernie4_5Model": "Ernie4_5ForCausalLM",
    "StableLmModel": "StableLmForCausalLM",
    "Starcoder2Model": "Starcoder2ForCausalLM",
    "DeepseekV2Model": "DeepseekV2ForCausalLM",
    "DeepseekV3Model": "DeepseekV3ForCausalLM",
    "MiniMaxM2Model": "MiniMaxM2ForCausalLM",
    "Ernie4_5_MoeModel": "Ernie4_5_MoeForCausalLM",
    "Llama4TextModel": "Llama4ForCausalLM",
    "PhimoeModel": "PhimoeForCausalLM",
    "Mamba2Model": "Mamba2ForCausalLM",
    "Qwen3NextModel": "Qwen3NextForCausalLM",
    "Qwen3_5TextModel": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeTextModel": "Qwen3_5MoeForCausalLM",
    "BambaModel": "BambaForCausalLM",
    "FalconH1Model": "FalconH1ForCausalLM",
    "NemotronHModel": "NemotronHForCausalLM",
    "NemotronModel": "NemotronForCausalLM",
    "ArceeModel": "ArceeForCausalLM",
    "GraniteMoeHybridModel": "GraniteMoeHybridForCausalLM",
    "Lfm2Model": "Lfm2ForCausalLM",
    "GptOssModel": "GptOssForCausalLM",
    "GPT2Model": "GPT2LMHeadModel",
    "GPTBigCodeModel": "GPTBigCodeForCausalLM",
    "OPTModel": "OPTForCausalLM",
    "GPTNeoXModel": "GPTNeoXForCausalLM",
    "GPTJModel": "GPTJForCausalLM",
    "FalconModel": "FalconForCausalLM",
    "BloomModel": "BloomForCausalLM",
    "MptModel": "MptForCausalLM",
    "PhiModel": "PhiForCausalLM",
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma3nTextModel": "Gemma3nForCausalLM",
    "Gemma4TextModel": "Gemma4ForCausalLM",
    "Gemma4UnifiedTextModel": "Gemma4UnifiedForCausalLM",
    "Phi3Model": "Phi3ForCausalLM",
    "Olmo2Model": "Olmo2ForCausalLM",
}


def family_of(config: ConfigJson) -> Family:
    architecture = architecture_of(config)
    architecture = RERANKERS.get(architecture) or HEADLESS.get(architecture, architecture)
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    close = similar_names(architecture[:80], known, most=6, cutoff=0.5)
    named = ", ".join(dict.fromkeys((*close, "LlamaForCausalLM", "Qwen3ForCausalLM", "BertModel")))
    raise ModelError(
        f"Unknown architecture {architecture[:80]!r}. Headrace supports {len(known)} others, such as {named}; "
        "docs/reference/models.md lists them.",
        path=config.path,
    )


def model_spec(config: ConfigJson) -> ModelSpec:
    """Return the spec of the model that this config describes, with its sizes and keys checked."""
    config.quantisation()  # the weights read it
    config.refuse("is_encoder_decoder", "the model must have one part", unless=(False,))
    family, architecture = family_of(config), architecture_of(config)
    base = base_of(config, architecture)
    if base is not None:
        spec = reranker_spec(family.spec(config.with_value("architectures", [base])), config, architecture)
        check_keys(config, family.ignored)
        return check_size(spec, config)
    headed = HEADLESS.get(architecture)
    spec = family.spec(config if headed is None else config.with_value("architectures", [headed]))
    if headed is not None:
        spec = replace(spec, architecture=architecture, kind="encoder")
    spec = _as_embedder(spec, config)
    check_keys(config, family.ignored)
    return check_size(spec, config)


def family_sources(family: Family, spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    """Map every tensor of a spec to its parts in the files."""
    return {**family.sources(spec, names), **head_sources(spec, names)}


def _as_embedder(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return a spec with what its config and the files of sentence-transformers say about embeddings."""
    if spec.causal and config.has("is_causal") and not config.flag("is_causal"):
        if any(layer.window for layer in spec.layers):
            raise config.error("is_causal", "Headrace does not support a sliding window without a causal mask.")
        spec = replace(spec, kind="encoder", causal=False)
    found = read_pooling(config.folder)
    if found is None and spec.kind == "decoder":
        return spec
    spec = replace(spec, context=min(spec.context, read_max_tokens(config.folder) or spec.context))
    if found is None:
        return spec
    width = spec.hidden_size
    for module, layer in zip(found.dense_folders, found.dense, strict=True):
        if layer.inputs != width:
            raise ModelError(f"'in_features' is {layer.inputs}. Expected {width}.", path=module / "config.json")
        width = layer.outputs
    return replace(spec, pooling=found.pooling, normalise_embedding=found.normalise, pooled_layers=found.dense)
