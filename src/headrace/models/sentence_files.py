"""Reads the files of sentence-transformers that say how a text becomes one embedding.

    modules.json                         [Transformer, Pooling, Dense*, Normalize?]
    <path>/config.json                   of the Pooling module: which tokens are pooled; of a Dense module: its sizes
    sentence_bert_config.json            the maximum tokens of the embedder, if below the model's
    config_sentence_transformers.json    prompts, such as the instruction before a query

Other modules are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from headrace.errors import ModelError, RequestError
from headrace.models.config_json import MAX_CONTEXT, MAX_HIDDEN, ConfigJson
from headrace.models.formats.json_file import parse_json_object, read_text
from headrace.models.spec import PooledActivation, PooledLayer, Pooling

_EXPECTED = "Transformer, Pooling, [Dense ...], [Normalize]"
_POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "weightedmean": "weighted",
    "mean_sqrt_len_tokens": "mean_sqrt",
}
_ACTIVATIONS: dict[str, PooledActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
# Older configs have one flag per mode instead of `pooling_mode`.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Prompts(msgspec.Struct, frozen=True):
    """Texts that an embedder puts before its input, by name."""

    texts: Mapping[str, str] = {}
    default: str | None = None

    def text(self, name: str | None) -> str:
        """Return the prompt of a name, or the default one. RequestError for an unknown name."""
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.texts:
            known = f"Its prompts are {', '.join(sorted(self.texts))}." if self.texts else "It has no prompts."
            raise RequestError(f"The model has no prompt '{name[:80]}'. {known}", parameter="prompt_name")
        return self.texts[name]


def read_prompts(folder: Path) -> Prompts:
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return Prompts()
    config = ConfigJson.read(path)
    prompts = config.optional_sub("prompts")
    texts = {} if prompts is None else {name: prompts.text(name) for name in prompts.names()}
    default = config.text("default_prompt_name") if config.has("default_prompt_name") else None
    if default is not None and default not in texts:
        raise config.mismatch("default_prompt_name", f"one of {', '.join(sorted(texts)) or 'no prompts'}")
    return Prompts(texts, default)


class EmbeddingSteps(msgspec.Struct, frozen=True):
    """What makes one embedding of a text's hidden states."""

    pooling: Pooling
    dense: tuple[PooledLayer, ...]
    dense_folders: tuple[Path, ...]
    normalise: bool  # to unit length


def read_pooling(folder: Path) -> EmbeddingSteps | None:
    """Return the steps after the model; None if nothing says."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    pooling: Pooling | None = None
    normalise = False
    dense: list[PooledLayer] = []
    folders: list[Path] = []
    for position, module in enumerate(_modules(path)):
        kind = module.text("type").rsplit(".", 1)[-1]
        if kind == "Transformer" and position == 0:
            continue
        if kind == "Pooling" and pooling is None and not normalise:
            pooling = _pooling(ConfigJson.read(_inside(folder, module) / "config.json"))
        elif kind == "Dense" and pooling is not None and not normalise:
            folders.append(_inside(folder, module))
            dense.append(_dense(ConfigJson.read(folders[-1] / "config.json")))
        elif kind == "Normalize" and pooling is not None:
            normalise = True
        else:
            raise module.error(
                "type",
                f"Module {kind[:60]!r} is not supported here. Expected {_EXPECTED}.",
            )
    if pooling is None:
        raise ModelError(f"The Pooling module is missing. Expected {_EXPECTED}.", path=path)
    return EmbeddingSteps(pooling, tuple(dense), tuple(folders), normalise)


def _dense(config: ConfigJson) -> PooledLayer:
    for key in ("module_input_name", "module_output_name"):
        config.refuse(key, "a Dense module must work on embeddings", unless=("sentence_embedding",))
    name = config.text("activation_function", default="torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise config.mismatch("activation_function", f"one of {', '.join(_ACTIVATIONS)} of torch.nn")
    return PooledLayer(
        inputs=config.size("in_features", maximum=MAX_HIDDEN),
        outputs=config.size("out_features", maximum=MAX_HIDDEN),
        bias=config.flag("bias", default=True),
        activation=_ACTIVATIONS[name],
    )


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


def read_max_tokens(folder: Path) -> int | None:
    """Return the most tokens of the embedder."""
    path = folder / "sentence_bert_config.json"
    return ConfigJson.read(path).optional_size("max_seq_length", maximum=MAX_CONTEXT) if path.exists() else None
