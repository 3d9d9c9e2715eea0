"""Reads adapter_config.json of a LoRA adapter in PEFT's layout, and rejects by name what Headrace does not compute."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_json

ADAPTER_CONFIG: Final = "adapter_config.json"
MOST_RANK: Final = 1024
_MOST_PATTERNS: Final = 4096
_PATTERN_CHARACTERS: Final = 256
_PATTERN_WILDCARDS: Final = 4  # quantifiers and groups of a pattern: each one more multiplies the time to match
_WILD_PATTERNS: Final = 64  # patterns that have any
# Keys that change what the adapter computes, and the values at which they do not.
_PLAIN: Final[Mapping[str, tuple[object, ...]]] = {
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
# Other ways to start, such as PiSSA, change the base model too.
_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")


T = TypeVar("T")


class PeftConfig(msgspec.Struct, frozen=True):
    rank: int
    alpha: float
    rank_of_root: bool  # rsLoRA: the scale is alpha / sqrt(rank)
    weight_decomposed: bool  # DoRA
    ranks: dict[str, int]  # by pattern
    alphas: dict[str, float]
    base: str = ""  # name of the model that it was trained for, for messages

    def rank_of(self, module: str) -> int:
        return _matched(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _matched(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_of_root else rank)


def _matched(values: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_adapter_config(folder: Path) -> PeftConfig:
    path = folder / ADAPTER_CONFIG
    if not folder.is_dir():
        raise ModelError("There is no such adapter folder. Pass one in PEFT's layout.", path=folder)
    if not path.is_file():
        raise ModelError(
            f"The folder has no {ADAPTER_CONFIG}. Pass the folder of a LoRA adapter in PEFT's layout.", path=folder
        )
    keys = read_json(path)
    kind = keys.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"'peft_type' is {str(kind)[:40]!r}. Only LORA adapters can be served.", path=path)
    for key, plain in _PLAIN.items():
        if not any(keys.get(key) == value for value in plain):
            raise ModelError(f"'{key}' is set to {str(keys[key])[:80]!r}, which cannot be served.", path=path)
    start = keys.get("init_lora_weights", True)
    if start not in _STARTS:
        raise ModelError(
            f"'init_lora_weights' is {str(start)[:40]!r}, which changes the base model too. Convert the adapter to a "
            "plain LoRA first.",
            path=path,
        )
    rank = _number(keys.get("r"), "r", path)
    return PeftConfig(
        rank=_whole_rank(rank, "r", path),
        alpha=_number(keys.get("lora_alpha", 8), "lora_alpha", path),
        rank_of_root=_flag(keys, "use_rslora", path),
        weight_decomposed=_flag(keys, "use_dora", path),
        ranks={name: _whole_rank(value, "rank_pattern", path) for name, value in _patterns(keys, "rank_pattern", path)},
        alphas=dict(_patterns(keys, "alpha_pattern", path)),
        base=str(keys.get("base_model_name_or_path") or "")[:500],
    )


def _patterns(keys: Mapping[str, object], key: str, path: Path) -> list[tuple[str, float]]:
    value: object = keys.get(key) or {}
    patterns = cast("dict[str, object]", value) if isinstance(value, dict) else None
    if patterns is None or len(patterns) > _MOST_PATTERNS:
        raise ModelError(f"'{key}' must be an object of patterns and numbers.", path=path)
    found: list[tuple[str, float]] = []
    wild = 0
    for pattern, number in patterns.items():
        wildcards = len(re.findall(r"[*+?{(]", pattern))
        wild += wildcards > 0
        # A quantifier after a group can take for ever to match.
        nested = re.search(r"\)[*+{?]", pattern)
        if nested or len(pattern) > _PATTERN_CHARACTERS or wildcards > _PATTERN_WILDCARDS:
            raise ModelError(f"'{key}' has a pattern that is too complex: {pattern[:80]!r}.", path=path)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(f"'{key}' has an invalid pattern {pattern[:80]!r}: {error}.", path=path) from None
        found.append((pattern, _number(number, key, path)))
    if wild > _WILD_PATTERNS:
        raise ModelError(
            f"'{key}' has {wild} patterns with wildcards or groups. At most {_WILD_PATTERNS} can be served.", path=path
        )
    return found


def _number(value: object, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"'{key}' must be a number, not {str(value)[:40]!r}.", path=path)
    return float(value)


def _whole_rank(value: float, key: str, path: Path) -> int:
    if value != int(value) or not 1 <= value <= MOST_RANK:
        raise ModelError(f"'{key}' must be a rank of 1 to {MOST_RANK}, not {value:g}.", path=path)
    return int(value)


def _flag(keys: Mapping[str, object], key: str, path: Path) -> bool:
    value = keys.get(key, False)
    if value not in (None, True, False):
        raise ModelError(f"'{key}' must be true or false, not {str(value)[:40]!r}.", path=path)
    return bool(value)
