"""Lists the model families and chooses the one for a config.

A family is a module with `architectures`, `spec` and `sources` (see `family.Family`). To add one: write it, add it to
FAMILIES and give it a golden test.
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
    raise ModelError(f"Unknown architecture {architecture[:80]!r}. Headrace supports {supported}.", path=config.path)


def model_spec(config: ConfigJson) -> ModelSpec:
    """Return the spec of the model that this config describes, with its sizes checked."""
    config.refuse_quantised()
    return check_size(family_of(config).spec(config), config)
