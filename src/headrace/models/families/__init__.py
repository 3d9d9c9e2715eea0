"""The families of models that Headrace knows, and the choice among them.

Owns the list of families. A family is a module with `architectures`, `spec` and `sources` (see `family.Family`): to add
one, write it, list it here and give it a golden test.
"""

from __future__ import annotations

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.families import bert, gemma, llama, mixtral, olmo, phi, qwen
from headrace.models.families.decoder import check_size
from headrace.models.families.family import Family, TensorPart, TensorSources, architecture_of
from headrace.models.spec import ModelSpec

__all__ = ["FAMILIES", "Family", "TensorPart", "TensorSources", "family_of", "model_spec"]

FAMILIES: tuple[Family, ...] = (llama, qwen, gemma, phi, olmo, mixtral, bert)


def family_of(config: ConfigJson) -> Family:
    architecture = architecture_of(config)
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"unknown architecture {architecture[:80]!r}; supported are {supported}", path=config.path)


def model_spec(config: ConfigJson) -> ModelSpec:
    """What the model of this config is."""
    config.refuse_quantised()
    return check_size(family_of(config).spec(config), config)
