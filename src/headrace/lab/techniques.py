"""The catalogue of techniques: each is declared lossless or lossy, and `lossless_only` turns the lossy ones off.

Lossless: the answer is the one that the model's own weights give, bit for bit on one instruction set. Lossy: it may
differ. A lossy technique has `used`, the keys of a configuration that switch it on, and `off`, the configuration
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.config import Config, FastConfig, Options
from headrace.config.managed_section import ManagedConfig
from headrace.config.routing_section import RoutingConfig, RuleConfig
from headrace.config.toml_text import key_path
from headrace.config.upstream_section import UpstreamConfig
from headrace.gateway.degradation.ladder.ladder_config import resolve_ladder

_LOSSLESS_WEIGHTS: Final = frozenset({"auto", "f32", "bf16"})
_LOSSLESS_KV: Final = frozenset({"f32", "bf16"})
# By the names of vLLM, SGLang, llama.cpp and OpenVINO.
_LOSSLESS_MANAGED_KV: Final = frozenset("auto bf16 bfloat16 f16 fp16 float16 f32 fp32 float32".split())
_HARMLESS_STEPS: Final = frozenset({"refuse"})  # of a ladder: no answer is changed


def _unused(_: Config) -> list[str]:
    return []


def _same(config: Config) -> Config:
    return config


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    area: str  # of the product
    lossless: bool
    about: str
    switch: str  # the key, command or parameter that turns it on
    used: Callable[[Config], list[str]] = _unused  # key paths that turn it on in a configuration
    off: Callable[[Config], Config] = _same


# Weights and KV


def _options(config: Config) -> Iterator[tuple[str, Options]]:
    for name, model in config.models.items():
        yield key_path("models", name, "options"), model.options
        for variant, options in model.variants.items():
            yield key_path("models", name, "variants", variant), options


def _is_lossy_weight(key: str, value: Any) -> bool:
    if key == "weights":
        return str(value) not in _LOSSLESS_WEIGHTS
    if key == "group":
        return value is not None  # of integers
    if key == "keep":
        return any(str(rule).rpartition("=")[2] not in _LOSSLESS_WEIGHTS for rule in value)
    return False


def _managed(config: Config) -> Iterator[tuple[str, ManagedConfig]]:
    """The engines of others that Headrace runs, which round by settings of their own."""
    for name, model in config.models.items():
        if model.upstream is not None and model.upstream.managed is not None:
            yield f"{key_path('models', name)}.upstream.managed", model.upstream.managed
        for variant, upstream in model.upstreams.items():
            if upstream.managed is not None:
                yield f"{key_path('models', name, 'upstreams', variant)}.managed", upstream.managed


def _rounds_kv(managed: ManagedConfig) -> bool:
    return managed.kv_dtype is not None and managed.kv_dtype.lower() not in _LOSSLESS_MANAGED_KV


def _lossy_weights(config: Config) -> list[str]:
    found = [
        f"{where}.{key}"
        for where, options in _options(config)
        for key in options
        if _is_lossy_weight(key, options[key])
    ]
    return found + [f"{where}.quantisation" for where, each in _managed(config) if each.quantisation is not None]


def _weights_off(config: Config) -> Config:
    return _managed_without(_without(config, _is_lossy_weight), lambda each: replace(each, quantisation=None))


def _lossy_kv(config: Config) -> list[str]:
    found = [f"{where}.kv" for where, options in _options(config) if options.get("kv", "bf16") not in _LOSSLESS_KV]
    return found + [f"{where}.kv_dtype" for where, each in _managed(config) if _rounds_kv(each)]


def _kv_off(config: Config) -> Config:
    config = _without(config, lambda key, value: key == "kv" and value not in _LOSSLESS_KV)
    return _managed_without(config, lambda each: replace(each, kv_dtype=None) if _rounds_kv(each) else each)


def _managed_without(config: Config, change: Callable[[ManagedConfig], ManagedConfig]) -> Config:
    def changed(upstream: UpstreamConfig) -> UpstreamConfig:
        return upstream if upstream.managed is None else replace(upstream, managed=change(upstream.managed))

    models = {
        name: replace(
            model,
            upstream=None if model.upstream is None else changed(model.upstream),
            upstreams={variant: changed(upstream) for variant, upstream in model.upstreams.items()},
        )
        for name, model in config.models.items()
    }
    return replace(config, models=models)


def _without(config: Config, is_lossy: Callable[[str, Any], bool]) -> Config:
    def kept(options: Options) -> Options:
        return {key: value for key, value in options.items() if not is_lossy(key, value)}

    models = {
        name: replace(
            model,
            options=kept(model.options),
            variants={variant: kept(options) for variant, options in model.variants.items()},
        )
        for name, model in config.models.items()
    }
    return replace(config, models=models)


# Caches, degradation and budgets


def _semantic_used(config: Config) -> list[str]:
    """With an embedder, an administrator may turn the cache on for a tenant."""
    found = [] if config.cache.semantic.mode == "off" else ["cache.semantic.mode"]
    found += [
        f"{key_path('tenants', name)}.caches.semantic"
        for name, tenant in config.tenants.items()
        if tenant.caches.semantic not in (None, "off")
    ]
    return found or (["cache.semantic.embedder"] if config.cache.semantic.embedder else [])


def _semantic_off(config: Config) -> Config:
    tenants = {
        name: replace(tenant, caches=replace(tenant.caches, semantic=None)) for name, tenant in config.tenants.items()
    }
    semantic = replace(config.cache.semantic, mode="off", embedder="")
    return replace(config, cache=replace(config.cache, semantic=semantic), tenants=tenants)


def _lossy_steps(config: Config) -> list[str]:
    found: list[str] = []
    for name, surface in config.surfaces.items():
        steps = resolve_ladder(name, surface).steps
        if any(step.step not in _HARMLESS_STEPS for step in steps):
            found.append(key_path("surfaces", name, "ladder"))
    return found


def _ladders_off(config: Config) -> Config:
    surfaces = dict(config.surfaces)
    for name, surface in surfaces.items():
        steps = tuple(step for step in resolve_ladder(name, surface).steps if step.step in _HARMLESS_STEPS)
        surfaces[name] = replace(surface, ladder=replace(surface.ladder, preset=False, steps=steps))
    return replace(config, surfaces=surfaces)


def _fallback_budgets(config: Config) -> list[str]:
    return [
        key_path("tenants", name, "budgets")
        for name, tenant in config.tenants.items()
        if any(budget.then for budget in tenant.budgets)
    ]


def _budgets_off(config: Config) -> Config:
    tenants = {
        name: replace(tenant, budgets=tuple(replace(budget, then="", allowance_micros=0) for budget in tenant.budgets))
        for name, tenant in config.tenants.items()
    }
    return replace(config, tenants=tenants)


def _fast_off(config: Config) -> Config:
    slo = {name: replace(each, fast_mode=False) for name, each in config.slo.items()}
    return replace(config, fast=FastConfig(), slo=slo)


def _fast_used(config: Config) -> list[str]:
    found = [] if config.fast == FastConfig() else ["fast"]
    return found + [f"{key_path('slo', name)}.fast_mode" for name, each in config.slo.items() if each.fast_mode]


# Routing: every request goes to the variant that it would have without the technique


def _retarget(routing: RoutingConfig, kind: str, target: Callable[[str], str]) -> RoutingConfig:
    def changed(rule: RuleConfig) -> RuleConfig:
        named: str | None = getattr(rule, kind)
        return rule if named is None else replace(rule, variant=target(named), **{kind: None})

    return replace(routing, rules=tuple(changed(rule) for rule in routing.rules))


def _cascades_off(config: Config) -> Config:
    cascades = config.routing.cascades
    routing = _retarget(config.routing, "cascade", lambda name: cascades[name].large)
    return replace(config, routing=replace(routing, cascades={}))


def _openings_off(config: Config) -> Config:
    openings = config.routing.openings
    routing = _retarget(config.routing, "opening", lambda name: openings[name].large)
    return replace(config, routing=replace(routing, openings={}))


def _chains_off(config: Config) -> Config:
    chains = config.routing.chains
    routing = _retarget(config.routing, "chain", lambda name: chains[name].steps[0].variant)
    return replace(config, routing=replace(routing, chains={}))


def _splits_off(config: Config) -> Config:
    splits = config.routing.splits

    def largest(name: str) -> str:
        percent: Mapping[str, float] = splits[name].percent
        return max(percent, key=lambda variant: percent[variant])

    routing = _retarget(config.routing, "split", largest)
    return replace(config, routing=replace(routing, splits={}))


def _names(where: str, table: Mapping[str, Any]) -> list[str]:
    return [f"{where}.{key_path(name)}" for name in table]


def _lossless(name: str, area: str, about: str, switch: str) -> Technique:
    return Technique(name=name, area=area, lossless=True, about=about, switch=switch)


TECHNIQUES: Final = (
    _lossless("continuous batching", "engine", "requests share steps; rows do not affect each other", "always"),
    _lossless("chunked prefill", "engine", "a prompt is computed in parts, with the same bits", "always"),
    _lossless("prefix cache", "engine", "KV of a shared beginning is computed once", "options.prefix_cache"),
    _lossless("KV tiers", "engine", "evicted KV waits in host memory or on disk, as it was", "options"),
    _lossless("preemption", "engine", "a sequence waits and continues with the same bits", "always"),
    _lossless("n-gram drafts", "engine", "drafts are verified; the output is that without them", "options.speculation"),
    _lossless("draft model", "engine", "the same, with a small model's drafts", 'options.speculation = "model"'),
    _lossless("draft heads", "engine", "the same, with Medusa's or EAGLE's drafts", 'options.speculation = "heads"'),
    _lossless(
        "prediction module", "engine", "the same, with the checkpoint's own module", 'options.speculation = "mtp"'
    ),
    _lossless("packed weights", "engine", "weights in the kernels' layout, kept on disk", "options.cache"),
    _lossless("constrained decoding", "engine", "only tokens of the grammar that the caller sent", "response_format"),
    _lossless("exact cache", "caches", "the response of an identical request", "cache.exact.mode"),
    _lossless("in-flight sharing", "caches", "identical requests share one generation", "cache.exact.joins"),
    _lossless("hedged requests", "routing", "a second request to a replica of the same variant", "routing.hedges"),
    _lossless("continuation", "routing", "a stream goes on, byte for byte, on another replica", "always"),
    _lossless("golden fallback", "routing", "the golden variant answers where a check fails", "routing.golden"),
    _lossless("shadows", "routing", "copies whose answers no client sees", "routing.shadows"),
    Technique(
        name="integer weights",
        area="weights",
        lossless=False,
        about="int8, int4, int3 and int2 weights, keep rules that name them, and a managed engine's `quantisation`",
        switch="options.weights",
        used=_lossy_weights,
        off=_weights_off,
    ),
    Technique(
        name="compressed models",
        area="weights",
        lossless=False,
        about="GPTQ, AWQ, SmoothQuant, NF4 and pruned files: what the file holds is served as it is",
        switch="headrace compress",
    ),
    Technique(
        name="rounded KV cache",
        area="KV cache",
        lossless=False,
        about="keys and values in int8, fp8 or int4, and a managed engine's `kv_dtype`",
        switch="options.kv",
        used=_lossy_kv,
        off=_kv_off,
    ),
    Technique(
        name="semantic cache",
        area="caches",
        lossless=False,
        about="the response of a similar question, or one primed with it",
        switch="cache.semantic.mode",
        used=_semantic_used,
        off=_semantic_off,
    ),
    Technique(
        name="catalogues",
        area="caches",
        lossless=False,
        about="approved texts answer the questions that they were written for, before a model is asked",
        switch="catalogues",
        used=lambda config: _names("catalogues", config.catalogues),
        off=lambda config: replace(config, catalogues={}),
    ),
    Technique(
        name="stale responses",
        area="caches",
        lossless=False,
        about="expired responses of the exact cache, under pressure",
        switch="cache.exact.stale",
        used=lambda config: [] if config.cache.exact.stale is None else ["cache.exact.stale"],
        off=lambda config: replace(config, cache=replace(config.cache, exact=replace(config.cache.exact, stale=None))),
    ),
    Technique(
        name="ladder",
        area="degradation",
        lossless=False,
        about="under pressure: shorter history and answers, smaller variants, quotes from sources. `refuse` stays",
        switch="surfaces.NAME.ladder",
        used=_lossy_steps,
        off=_ladders_off,
    ),
    Technique(
        name="fast mode",
        area="degradation",
        lossless=False,
        about="smaller variants, shorter prompts and answers, hidden tools, while it is on",
        switch="fast",
        used=_fast_used,
        off=_fast_off,
    ),
    Technique(
        name="conversation overflow",
        area="degradation",
        lossless=False,
        about="old turns of a conversation that is too long are dropped or summarised",
        switch="shaping.overflow",
        used=lambda config: [] if config.shaping.overflow == "refuse" else ["shaping.overflow"],
        off=lambda config: replace(config, shaping=replace(config.shaping, overflow="refuse")),
    ),
    Technique(
        name="fallback variant of a budget",
        area="budgets",
        lossless=False,
        about="another variant answers once the budget is spent; without it, requests are rejected",
        switch="budgets.then",
        used=_fallback_budgets,
        off=_budgets_off,
    ),
    Technique(
        name="cascades",
        area="routing",
        lossless=False,
        about="a small variant answers where it is confident; without them, the large one answers",
        switch="routing.cascades",
        used=lambda config: _names("routing.cascades", config.routing.cascades),
        off=_cascades_off,
    ),
    Technique(
        name="openings",
        area="routing",
        lossless=False,
        about="a small variant begins the answer and a large one continues it; without them, the large one answers",
        switch="routing.openings",
        used=lambda config: _names("routing.openings", config.routing.openings),
        off=_openings_off,
    ),
    Technique(
        name="rewrites",
        area="routing",
        lossless=False,
        about="a sampled answer is rewritten at temperature 0; without them, it is served as it was sampled",
        switch="routing.rewrites",
        used=lambda config: _names("routing.rewrites", config.routing.rewrites),
        off=lambda config: replace(config, routing=replace(config.routing, rewrites={})),
    ),
    Technique(
        name="fallback chains",
        area="routing",
        lossless=False,
        about="other variants answer where the first fails; without them, the first one's error is returned",
        switch="routing.chains",
        used=lambda config: _names("routing.chains", config.routing.chains),
        off=_chains_off,
    ),
    Technique(
        name="splits",
        area="routing",
        lossless=False,
        about="a share of conversations goes to other variants; without them, all go to the largest",
        switch="routing.splits",
        used=lambda config: _names("routing.splits", config.routing.splits),
        off=_splits_off,
    ),
    Technique(
        name="canaries",
        area="routing",
        lossless=False,
        about="a share of conversations goes to a candidate; without them, all go to the control",
        switch="headrace canary",
    ),
    Technique(
        name="fast profile",
        area="by the caller",
        lossless=False,
        about="shorter answers and cooler sampling, for requests that ask for it",
        switch="profile: fast",
    ),
    Technique(
        name="caps on sources",
        area="by the caller",
        lossless=False,
        about="a request's sources beyond the caps are cut or left out, and named in x-headrace-shaped",
        switch="sources",
    ),
)


def turned_off(config: Config) -> list[tuple[Technique, list[str]]]:
    """Return the lossy techniques that a configuration uses, with their keys."""
    found = ((technique, technique.used(config)) for technique in TECHNIQUES)
    return [(technique, keys) for technique, keys in found if keys]


def without_lossy(config: Config) -> Config:
    """Return the configuration with every lossy technique off that it switches on."""
    for technique, _ in turned_off(config):
        config = technique.off(config)
    return config


def explain(config: Config) -> list[str]:
    """Say what `safety.lossless_only` turns off in a configuration, one line for each technique."""
    return [
        f"safety.lossless_only turns off {technique.name} ({', '.join(keys)}): {technique.about}"
        for technique, keys in turned_off(config)
    ]
