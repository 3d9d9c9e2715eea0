"""docs/reference/configuration.md has every key with its default, and examples/gateway.toml is valid."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from headrace.config import (
    PLAIN_SECTIONS,
    AdapterConfig,
    AdminConfig,
    AlertsConfig,
    AutoscaleConfig,
    BudgetConfig,
    CachesConfig,
    CollectionsConfig,
    Config,
    ConfigError,
    ExactConfig,
    FastConfig,
    KeyConfig,
    LadderConfig,
    LimitSet,
    ModelConfig,
    ObserveConfig,
    PinConfig,
    PipelineConfig,
    PriceConfig,
    ResultsConfig,
    RoutingConfig,
    SemanticConfig,
    ShapingConfig,
    SloConfig,
    SurfaceConfig,
    TenantConfig,
    ToolConfig,
    TracesConfig,
    UpstreamConfig,
    WorkersConfig,
    names_of,
)
from headrace.config import breaker_section as breaker
from headrace.config import managed_section as managed
from headrace.config import pipeline_section as pipelines
from headrace.config import routing_section as routing
from headrace.config import shaping_section as shaping
from headrace.config import upstream_section as upstreams
from headrace.config.catalogue_section import CatalogueConfig
from headrace.config.lab import canary_section as canary
from headrace.config.lab import drift_section as drift
from headrace.config.lab.recording_section import RecordingConfig
from headrace.config.loader import OPTIONS
from headrace.config.toml_text import config_toml, toml_value
from headrace.gateway.degradation.ladder.ladder_config import resolve_ladder
from headrace.surfaces import SURFACES
from headrace.variant import Variant
from tests.support.config_tables import sections_in, without_default
from tests.support.config_text import read

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "reference" / "configuration.md"
PAGE = PATH.read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "gateway.toml").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \|.*\| (.*?) \|$", re.MULTILINE)
DOCUMENTED: dict[str, type[msgspec.Struct]] = {
    "Top level": Config,
    "`[collections]`": CollectionsConfig,
    "`[workers]`": WorkersConfig,
    "`[models.NAME]`": ModelConfig,
    "`[models.NAME.autoscale]`": AutoscaleConfig,
    "`[[models.NAME.pins]]`": PinConfig,
    "`[models.NAME.adapters.ADAPTER]`": AdapterConfig,
    "`[models.NAME.options]`": Variant,
    "`[models.NAME.upstream]`": UpstreamConfig,
    "`[models.NAME.upstream.timeouts]`": upstreams.UpstreamTimeouts,
    "`[models.NAME.upstream.retries]`": upstreams.UpstreamRetries,
    "`[models.NAME.upstream.breaker]`": breaker.UpstreamBreakerConfig,
    "`[models.NAME.upstream.health]`": upstreams.UpstreamHealthConfig,
    "`[models.NAME.upstream.managed]`": managed.ManagedConfig,
    "`[models.NAME.upstream.takes]`": upstreams.UpstreamFeatures,
    "`[surfaces.NAME]`": SurfaceConfig,
    "`[surfaces.NAME.ladder]`": LadderConfig,
    "`[[surfaces.NAME.ladder.steps]]`": shaping.LadderStepConfig,
    "`[profiles.fast]`": shaping.ProfileConfig,
    "`[[keys]]`": KeyConfig,
    "`[tenants.NAME]`": TenantConfig,
    "`[tenants.NAME.limits]`": LimitSet,
    "`[[tenants.NAME.budgets]]`": BudgetConfig,
    "`[tenants.NAME.caches]`": CachesConfig,
    "`[prices.NAME]`": PriceConfig,
    "`[cache.exact]`": ExactConfig,
    "`[cache.semantic]`": SemanticConfig,
    "`[cache.results]`": ResultsConfig,
    "`[catalogues.NAME]`": CatalogueConfig,
    "`[routing]`": RoutingConfig,
    "`[[routing.rules]]`": routing.RuleConfig,
    "`[routing.rules.when]`": routing.RuleConditions,
    "`[routing.splits.NAME]`": routing.SplitConfig,
    "`[routing.cascades.NAME]`": routing.CascadeConfig,
    "`[routing.openings.NAME]`": routing.OpeningConfig,
    "`[routing.rewrites.NAME]`": routing.RewriteConfig,
    "`[routing.chains.NAME]`": routing.ChainConfig,
    "`[[routing.chains.NAME.steps]]`": routing.StepConfig,
    "`[routing.hedges.VARIANT]`": routing.HedgeConfig,
    "`[routing.golden]`": routing.GoldenConfig,
    "`[drift]`": drift.DriftConfig,
    "`[canary]`": canary.CanaryConfig,
    "`[routing.shadows.NAME]`": routing.ShadowConfig,
    "`[routing.breaker]`": breaker.BreakerConfig,
    "`[routing.health]`": routing.VariantHealthConfig,
    "`[shaping]`": ShapingConfig,
    "`[fast]`": FastConfig,
    "`[admin]`": AdminConfig,
    "`[observe]`": ObserveConfig,
    "`[observe.alerts]`": AlertsConfig,
    "`[observe.traces]`": TracesConfig,
    "`[recording]`": RecordingConfig,
    "`[slo.NAME]`": SloConfig,
    "`[pipelines.NAME]`": PipelineConfig,
    "`[pipelines.NAME.embed]`": pipelines.EmbedStage,
    "`[pipelines.NAME.search]`": pipelines.SearchStage,
    "`[pipelines.NAME.rerank]`": pipelines.RerankStage,
    "`[pipelines.NAME.assemble]`": pipelines.AssembleStage,
    "`[pipelines.NAME.tools]`": pipelines.ToolsStage,
    "`[tools.NAME]`": ToolConfig,
    "`[pipelines.NAME.generate]`": pipelines.GenerateStage,
    "`[pipelines.NAME.check]`": pipelines.CheckStage,
    **{f"`[{name}]`": kind for name, kind in PLAIN_SECTIONS.items()},
}


def documented(heading: str) -> dict[str, str]:
    """Each key of a section with what stands for its default."""
    _, found, after = PAGE.partition(f"# {heading}\n")
    assert found
    return dict(ROW.findall(re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]))


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_every_key_is_documented_with_its_default(heading: str) -> None:
    kind = DOCUMENTED[heading]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if kind is Variant:
        fields = {name: field for name, field in fields.items() if name in OPTIONS}
    rows = documented(heading)
    assert list(rows) == list(fields)
    for name, field in fields.items():
        if field.required:
            assert rows[name] == "required", name
        elif without_default(field):
            assert not rows[name].startswith("`") or (kind, name) == (Config, "models"), name
        else:
            assert rows[name].startswith(f"`{toml_value(field.default)}`"), name


def test_every_kind_of_table_is_documented() -> None:
    def has_keys(kind: type[msgspec.Struct]) -> bool:
        """Other than further tables of its own, which have their headings."""
        return not all(field.type in DOCUMENTED.values() for field in msgspec.structs.fields(kind))

    assert {kind for kind in sections_in(Config) if has_keys(kind)} <= set(DOCUMENTED.values())


def test_the_documented_surfaces_have_the_engines_numbers() -> None:
    rows = documented("`[surfaces.NAME]`")
    order = [SURFACES[name] for name in ("chat", "voice", "agent", "embedded", "batch")]

    def spelled(values: list[float], scale: float) -> str:
        return ", ".join("none" if value == float("inf") else f"{value * scale:g}" for value in values)

    assert rows["ttft_ms"] == spelled([surface.ttft for surface in order], 1e3)
    assert rows["itl_ms"] == spelled([surface.itl for surface in order], 1e3)
    assert rows["weight"] == spelled([surface.weight for surface in order], 1)
    assert rows["patience_s"] == spelled([surface.patience for surface in order], 1)


def variables_of(example: str) -> dict[str, str]:
    """A value for each that the file needs."""
    return {name: f"value-of-{name.lower()}" for name in re.findall(r'^key_env = "(\w+)"', example, re.MULTILINE)}


def test_the_whole_gateway_of_the_examples_is_fine() -> None:
    config = read(EXAMPLE, **variables_of(EXAMPLE))
    assert list(config.tenants) == ["ferries", "atelier", "townhall"]
    assert all(tenant.budgets for tenant in config.tenants.values())
    assert {key.tenant or key.name for key in config.keys} == {*config.tenants, "ops"}
    assert names_of(config) == ["mini", "mini@fast", "mini@int8-channel", "minilm", "large", "large@hosted"]
    assert (config.cache.exact.mode, config.cache.semantic.mode) == ("on", "record")
    chain = config.routing.chains["large-somewhere"]
    assert [step.variant for step in chain.steps] == ["large", "large@hosted", "mini"]
    assert config.routing.cascades["mini-then-large"].threshold == 0.85
    ladders = {name: resolve_ladder(name, surface) for name, surface in config.surfaces.items()}
    assert {name: [step.step for step in ladder.steps] for name, ladder in ladders.items()} == {
        "chat": ["trim", "max_tokens", "variant", "stale", "extract", "refuse"],
        "voice": ["max_tokens", "variant", "refuse"],
    }
    assert read(config_toml(config), **variables_of(EXAMPLE)) == config


def test_the_whole_gateway_names_its_variables_and_has_no_secret() -> None:
    comments, _, _ = EXAMPLE.partition("\ndefault_model")
    assert all(name in comments for name in variables_of(EXAMPLE))
    assert not re.search(r"^(key|key_sha256) =", EXAMPLE, re.MULTILINE)
    with pytest.raises(ConfigError) as raised:
        read(EXAMPLE)
    assert len(raised.value.mistakes) == len(variables_of(EXAMPLE)) == 7
