"""Checks memory: what the configured models need against what is available, and transparent huge pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.cli.doctor.check_result import CheckResult, fail, ok, warn
from headrace.config import Config, variants_of
from headrace.engine.executors.cgroups import read_lines
from headrace.engine.executors.cpu_executor import memory_of
from headrace.engine.executors.memory import SETTING, gib, usable_memory
from headrace.errors import HeadraceError, RequestError
from headrace.models.model_folder import local_model, open_model
from headrace.variant import Variant

_TIGHT: Final = 0.9  # share of the available memory above which there is a warning


class ConfiguredMemory(msgspec.Struct):
    """Memory of all configured variants, in bytes. Replicas share packed weights, but not KV memory."""

    weights: int = 0
    kv: int = 0
    variants: int = 0
    unknown: list[str] = []  # models that are still to be downloaded or cannot be read

    @property
    def total(self) -> int:
        return self.weights + self.kv


def configured_memory(config: Config) -> ConfiguredMemory:
    result = ConfiguredMemory(unknown=[])
    shared: set[str] = set()  # packed weights that several variants map
    for name, model in config.models.items():
        try:
            variants = variants_of(name, model, {})
        except RequestError:
            result.unknown.append(name)
            continue
        for full, variant in variants.items():
            try:
                for each in _with_draft(variant):
                    _add(result, each, model.local_replicas(plain=full == name) + model.standby, shared)
                result.variants += 1
            except (HeadraceError, OSError):
                result.unknown.append(full)
    return result


def _with_draft(variant: Variant) -> Iterator[Variant]:
    yield variant
    if variant.speculation == "model" and variant.draft_model is not None:
        weights = variant.draft_weights or variant.weights
        yield msgspec.structs.replace(variant, model=variant.draft_model, weights=weights, group=None, keep=())
    if variant.speculation == "self":  # its KV, and its weights if they have another precision
        yield msgspec.structs.replace(variant, weights=variant.draft_weights or variant.weights)


def _add(result: ConfiguredMemory, variant: Variant, replicas: int, shared: set[str]) -> None:
    path = local_model(variant.model)
    if path is None:
        raise HeadraceError(f"{variant.model} is not on this machine")
    need = memory_of(open_model(path), variant)
    result.kv += need.kv * replicas
    result.weights += (need.drafts + need.scratch) * replicas
    if (images := f"{path} images") not in shared:
        shared.add(images)
        result.weights += need.images
    packed = f"{path} {variant.weights} {variant.group} {variant.keep} {variant.latent_kv}"
    if not variant.cache:
        result.weights += need.weights * replicas
    elif packed not in shared:
        shared.add(packed)
        result.weights += need.weights


def check_memory_of(config: Config | None) -> Iterator[CheckResult]:
    """Compare the memory that the models need with what the system and the container's limit leave."""
    try:
        available = usable_memory()
    except RequestError as error:
        yield fail("memory", str(error), f"Unset {SETTING}, or set it to a number of GiB.")
        return
    has = f"{gib(available)} available" if available else "available memory unknown"
    if config is None:
        yield ok("memory", has)
        return
    need = configured_memory(config)
    found = f"{has}, {gib(need.total)} needed ({gib(need.weights)} weights, {gib(need.kv)} KV cache)"
    smaller = "Use smaller weights (int8, int4), a shorter context or fewer replicas, or raise the memory limit."
    if available and need.total > available:
        yield fail("memory", found, smaller)
    elif available and need.total > _TIGHT * available:
        yield warn("memory", found, f"Little is left for requests and other programs. {smaller}")
    else:
        yield ok("memory", found)
    if need.unknown:
        names = ", ".join(need.unknown)
        yield warn(
            "models",
            f"memory unknown, not on this machine or not readable: {names}",
            "Run headrace pull with their names.",
        )


def check_huge_pages(root: Path = Path("/")) -> Iterator[CheckResult]:
    name = "huge pages"
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", " ".join(read_lines(root / file.lstrip("/"))))
    if chosen is None:
        yield ok(name, "set by the host: the system shows no setting")
    elif chosen[1] == "always":
        yield ok(name, "transparent huge pages: always")
    else:
        found = f"transparent huge pages: {chosen[1]}; the KV cache gets small pages"
        yield warn(name, found, f"Run as root: echo always > {file}")
