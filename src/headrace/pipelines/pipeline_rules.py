"""Checks the rules of [pipelines.NAME] that types and ranges cannot express. Yields its findings; see config_checks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from headrace.config import Config
from headrace.config.pipeline_section import STAGE_ORDER, PipelineConfig
from headrace.config.toml_text import key_path, quoted
from headrace.config.value_types import Finding

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LATE: Final = {  # what each stage can do when it is late
    "embed": ("skip", "cached", "stop"),
    "search": ("skip", "cached", "stop"),
    "rerank": ("skip", "fewer", "cached", "stop"),
    "assemble": ("skip", "fewer", "stop"),
    "tools": ("skip", "fewer", "stop"),
    "generate": ("fewer", "cached", "stop"),
    "check": ("skip", "stop"),
}


def findings(config: Config, served: Sequence[str]) -> Iterator[Finding]:
    """`served`: the full names of all variants."""
    aliases = {alias for model in config.models.values() for alias in model.aliases}
    known = {*served, *aliases}
    for name, pipeline in config.pipelines.items():
        where = key_path("pipelines", name)
        if not _NAME.fullmatch(name):
            yield where, "expected a name of at most 64 letters, digits and . _ - that starts with a letter or digit"
        yield from _stages(pipeline, where)
        yield from _models(pipeline, where, known)
        yield from _times(pipeline, where)
        yield from _modes(pipeline, where)
        if "tools" in pipeline.stages:
            yield from _tools(pipeline, where, config)


def _stages(config: PipelineConfig, where: str) -> Iterator[Finding]:
    stages = config.stages
    if len(set(stages)) < len(stages):
        yield f"{where}.stages", "expected each stage once"
    if "generate" not in stages:
        yield f"{where}.stages", 'expected the stage "generate", which writes the answer'
        return
    order = [STAGE_ORDER.index(stage) for stage in stages]
    if order != sorted(order):
        right = ", ".join(quoted(each) for each in STAGE_ORDER)
        yield f"{where}.stages", f"expected the stages in this order: {right}"
    for stage, needs in (("rerank", "search"), ("assemble", "search"), ("embed", "search")):
        if stage in stages and needs not in stages:
            yield f"{where}.stages", f"{quoted(stage)} needs the stage {quoted(needs)}"
    default = PipelineConfig(stages=())
    for stage in STAGE_ORDER:
        section = getattr(config, stage)
        if stage not in stages and section != getattr(default, stage):
            yield f"{where}.{stage}", f"{quoted(stage)} is not in `stages`"
        if section.late not in _LATE[stage]:
            allowed = ", ".join(quoted(each) for each in _LATE[stage])
            yield f"{where}.{stage}.late", f"expected one of {allowed} for this stage, found {quoted(section.late)}"


def _models(config: PipelineConfig, where: str, known: Collection[str]) -> Iterator[Finding]:
    named = {
        "model": config.model,
        "generate.model": config.generate.model,
        "generate.small": config.generate.small,
    }
    if "tools" in config.stages:
        named["tools.model"] = config.tools.model
    if "rerank" in config.stages:
        named["rerank.model"] = config.rerank.model
        if config.rerank.model is None:
            yield f"{where}.rerank.model", "expected the name of a model"
    for key, model in named.items():
        if model is not None and model not in known:
            there = ", ".join(map(quoted, sorted(known)))
            yield f"{where}.{key}", f"unknown model or variant {quoted(model)}; known: {there}"


def _tools(pipeline: PipelineConfig, where: str, config: Config) -> Iterator[Finding]:
    for name in pipeline.tools.tools:
        if name not in config.tools:
            known = ", ".join(map(quoted, config.tools)) or "none"
            yield f"{where}.tools.tools", f"unknown tool {quoted(name)}; [tools.NAME] declares: {known}"


def _times(config: PipelineConfig, where: str) -> Iterator[Finding]:
    needed = sum(getattr(config, stage).budget_ms or 0.0 for stage in config.stages)
    if needed > config.deadline_ms:
        yield (
            f"{where}.deadline_ms",
            f"the stages' budgets add up to {needed:g} ms; expected at least that, found {config.deadline_ms:g}",
        )


def _modes(config: PipelineConfig, where: str) -> Iterator[Finding]:
    order = config.generate.order
    if not order or len(set(order)) < len(order):
        yield f"{where}.generate.order", "expected at least one way to answer, each once"
    elif order[-1] in ("cache", "extract"):
        yield f"{where}.generate.order", 'expected "small" or "large" at the end: the others may have no answer'
    if "small" in order and config.generate.small is None:
        yield f"{where}.generate.small", 'expected a model, because `order` has "small"'
    if config.assemble.order == "warm" and not config.assemble.warm:
        yield f"{where}.assemble.warm", 'expected at least 1, because `order` is "warm"'
    if config.prefetch > config.followups:
        yield f"{where}.prefetch", f"expected at most `followups` ({config.followups}), found {config.prefetch}"
