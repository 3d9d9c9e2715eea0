"""Reads BERT encoders and the sentence embedders built on them: MiniLM, BGE, E5 and others.

Also reads the files of sentence-transformers that say how hidden states become one embedding:

    modules.json                 [Transformer, Pooling, Normalize?]; without it, the mean, as in sentence-transformers
    <path>/config.json           of the Pooling module: which tokens are pooled
    sentence_bert_config.json    the maximum tokens of the embedder, if below the model's
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from headrace.errors import ModelError
from headrace.models.config_json import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families.decoder import (
    ACTIVATIONS,
    TensorNames,
    find_prefix,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.formats.json_file import parse_json_object, read_text
from headrace.models.spec import LayerSpec, ModelSpec, Pooling

architectures: tuple[str, ...] = ("BertModel", "BertForMaskedLM", "BertForPreTraining")

_NAMES: TensorNames = {
    "embed": ("embeddings.word_embeddings",),
    "positions": ("embeddings.position_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "embed_norm": ("embeddings.LayerNorm",),
    "attn.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.o": ("attention.output.dense",),
    "attn.residual_norm": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "mlp.residual_norm": ("output.LayerNorm",),
}
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Older configs have one flag per mode instead of `pooling_mode`.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def spec(config: ConfigJson) -> ModelSpec:
    config.refuse("position_embedding_type", "positions must be absolute", unless=("absolute",))
    config.refuse("is_decoder", "the model must be an encoder", unless=(False,))
    config.refuse("add_cross_attention", "the model must be an encoder", unless=(False,))
    size = head_size(config)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    positions = config.size("max_position_embeddings", maximum=1 << 20)
    pooling, normalise = read_pooling(config.folder)
    return ModelSpec(
        family="bert",
        architecture=architecture_of(config),
        kind="encoder",
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=config.size("hidden_size", maximum=MAX_HIDDEN),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=(LayerSpec(rope=None),) * layer_count(config),
        context=min(positions, _max_tokens(config.folder) or positions),
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", maximum=1.0, default=1e-12),
        pre_norm=False,
        residual_norm=True,
        final_norm=False,
        activation=config.choice("hidden_act", ACTIVATIONS, default="gelu"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=size**-0.5,
        learned_positions=positions,
        token_types=config.size("type_vocab_size", maximum=1 << 16, default=2),
        embedding_norm=True,
        pooling=pooling,
        normalise_embedding=normalise,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("", "bert."), "embeddings.word_embeddings.weight")
    table = named_sources(spec, _NAMES, names, prefix=prefix, layer="encoder.layer")
    return {name: tuple(_old_or_new(part, names) for part in parts) for name, parts in table.items()}


def _old_or_new(part: TensorPart, names: frozenset[str]) -> TensorPart:
    """Use gamma and beta, the names of a norm's weight and bias in early checkpoints, if the files have them."""
    stem, _, end = part.name.rpartition(".")
    old = f"{stem}.{'gamma' if end == 'weight' else 'beta'}"
    return TensorPart(old) if stem.endswith("LayerNorm") and part.name not in names and old in names else part


def read_pooling(folder: Path) -> tuple[Pooling, bool]:
    """Return the pooling of hidden states, and whether the embedding is normalised to unit length."""
    path = folder / "modules.json"
    if not path.exists():
        return "mean", False
    pooling: Pooling | None = None
    normalise = False
    for position, module in enumerate(_modules(path)):
        kind = module.text("type").rsplit(".", 1)[-1]
        if kind == "Transformer" and position == 0:
            continue
        if kind == "Pooling" and pooling is None and not normalise:
            pooling = _pooling(ConfigJson.read(_inside(folder, module) / "config.json"))
        elif kind == "Normalize" and pooling is not None:
            normalise = True
        else:
            raise module.error(
                "type",
                f"Module {kind[:60]!r} is not supported here. Expected Transformer, Pooling, [Normalize].",
            )
    if pooling is None:
        raise ModelError("The Pooling module is missing. Expected Transformer, Pooling, [Normalize].", path=path)
    return pooling, normalise


def _modules(path: Path) -> tuple[ConfigJson, ...]:
    # This file has a list at its top level; wrapped in an object, the strict reader accepts it.
    values = parse_json_object(f'{{"modules": {read_text(path)}}}'.encode(), path=path)
    if len(values) > 1:
        raise ModelError("Expected a list of modules.", path=path)
    return ConfigJson(values, path=path).subs("modules", max_items=16)


def _inside(folder: Path, module: ConfigJson) -> Path:
    relative = PurePosixPath(module.text("path"))
    if relative.is_absolute() or ".." in relative.parts or "\0" in str(relative):
        raise module.mismatch("path", "a folder inside the model folder")
    return folder / relative


def _pooling(config: ConfigJson) -> Pooling:
    config.refuse("include_prompt", "Headrace pools every token", unless=(True,))
    if config.has("pooling_mode"):
        return config.choice("pooling_mode", _POOLINGS)
    modes = [mode for key, mode in _POOLING_FLAGS.items() if config.flag(key, default=False)] or ["mean"]
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"Pooling {' and '.join(modes)} is not supported. Expected one of {', '.join(_POOLINGS)}.", path=config.path
        )
    return _POOLINGS[modes[0]]


def _max_tokens(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    return ConfigJson.read(path).optional_size("max_seq_length", maximum=MAX_CONTEXT) if path.exists() else None
