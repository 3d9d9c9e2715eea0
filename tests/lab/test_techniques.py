"""Every technique is declared, defaults use no lossy one, and `lossless_only` turns all of them off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.config import Config
from headrace.lab.techniques import TECHNIQUES, explain, turned_off, without_lossy
from headrace.server.config_checks import check_config, load_config, read_declared

ALL = """
[models.mini]
[models.mini.options]
weights = "int8"
keep = ["*.attn.o=bf16"]
kv = "int8"
[models.mini.variants.fast]
weights = "int4"
group = 64
[models.mini.variants.golden]
weights = "bf16"
kv = "bf16"
[models.minilm]
path = "mini"

[cache.semantic]
mode = "record"
embedder = "minilm"
[cache.exact]
mode = "on"
stale = "1h"

[catalogues.shop]
file = "shop.jsonl"

[surfaces.chat.ladder]
steps = [
  { step = "max_tokens", queue_ms = [100, 50] },
  { step = "refuse", queue_ms = [900, 500] },
]
[surfaces.voice.ladder]
preset = true

[shaping]
overflow = "drop"
[fast]
max_tokens = 64
[slo.chat]
ttft_p99_ms = 500.0
fast_mode = true

[tenants.acme]
budgets = [{ limit_micros = 1000, period = "day", then = "mini@fast" }]
[[keys]]
name = "acme"
key = "secret"

[[routing.rules]]
name = "one"
when = { tenants = ["acme"] }
cascade = "small-first"
[[routing.rules]]
name = "two"
when = { surfaces = ["voice"] }
split = "halves"
[[routing.rules]]
name = "three"
chain = "elsewhere"
[[routing.rules]]
name = "four"
opening = "quick"
[routing.rewrites.steady]
surfaces = ["chat"]
[routing.openings.quick]
small = "mini@fast"
large = "mini@golden"
[routing.cascades.small-first]
small = "mini@fast"
large = "mini@golden"
threshold = 0.5
[routing.splits.halves]
percent = { "mini@fast" = 40, "mini" = 60 }
[routing.chains.elsewhere]
steps = [{ variant = "mini@golden" }, { variant = "mini@fast" }]
"""


def declared(folder: Path, more: str = "") -> Path:
    path = folder / "headrace.toml"
    path.write_text(ALL + more)
    return path


def everything(folder: Path) -> Config:
    return read_declared(declared(folder), environ={}, check=lambda config, environ: iter(()))


def test_defaults_use_no_lossy_technique() -> None:
    assert turned_off(Config()) == []
    assert without_lossy(Config()) == Config()


def test_every_lossy_technique_of_a_configuration_is_found_and_turned_off(tmp_path: Path) -> None:
    config = everything(tmp_path)
    found = {technique.name for technique, _ in turned_off(config)}
    lossy = {each.name for each in TECHNIQUES if not each.lossless and each.area != "by the caller"}
    # Compressed models are in a model's files, and canaries begin through the admin API.
    assert found == lossy - {"compressed models", "canaries"}
    safe = without_lossy(config)
    assert turned_off(safe) == []
    assert without_lossy(safe) == safe


def test_what_is_left_serves_the_same_names_without_loss(tmp_path: Path) -> None:
    safe = without_lossy(everything(tmp_path))
    assert safe.models["mini"].options == {"keep": ("*.attn.o=bf16",)}
    assert safe.models["mini"].variants == {"fast": {}, "golden": {"weights": "bf16", "kv": "bf16"}}
    assert [rule.variant for rule in safe.routing.rules] == ["mini@golden", "mini", "mini@golden", "mini@golden"]
    routing = safe.routing
    assert (routing.cascades, routing.splits, routing.chains, routing.openings) == ({}, {}, {}, {})
    assert routing.rewrites == {}
    assert [step.step for step in safe.surfaces["chat"].ladder.steps] == ["refuse"]
    assert [step.step for step in safe.surfaces["voice"].ladder.steps] == ["refuse"]
    assert not safe.surfaces["voice"].ladder.preset
    assert safe.cache.exact.mode == "on"  # lossless
    assert (safe.cache.exact.stale, safe.cache.semantic.mode, safe.shaping.overflow) == (None, "off", "refuse")
    assert [budget.then for budget in safe.tenants["acme"].budgets] == [""]
    assert [str(finding) for finding in check_config(safe, {}) if "embedder" not in str(finding)] == []


def test_a_tenants_own_semantic_cache_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[models.mini]\n[cache.semantic]\nembedder = 'minilm'\n[tenants.acme.caches]\nsemantic = 'on'\n")
    config = read_declared(path, environ={}, check=lambda config, environ: iter(()))
    [(technique, keys)] = turned_off(config)
    assert (technique.name, keys) == ("semantic cache", ["tenants.acme.caches.semantic"])
    safe = without_lossy(config)
    assert (safe.tenants["acme"].caches.semantic, safe.cache.semantic.embedder) == (None, "")
    declared_only = replace(config, tenants={})  # an administrator can turn it on for a tenant
    assert [keys for _, keys in turned_off(declared_only)] == [["cache.semantic.embedder"]]


def test_what_managed_engines_round_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(
        "[models.big.upstream]\nkind = 'vllm'\n"
        "managed = { model = 'a/b', kv_dtype = 'fp8', quantisation = 'fp8' }\n"
        "[models.big.upstreams.exact]\nkind = 'vllm'\nmanaged = { model = 'a/b', kv_dtype = 'bfloat16' }\n"
    )
    config = read_declared(path, environ={}, check=lambda config, environ: iter(()))
    where = "models.big.upstream.managed"
    assert [keys for _, keys in turned_off(config)] == [[f"{where}.quantisation"], [f"{where}.kv_dtype"]]
    safe = without_lossy(config)
    assert turned_off(safe) == []
    exact = safe.models["big"].upstreams["exact"].managed
    assert exact is not None
    assert exact.kv_dtype == "bfloat16"


def test_the_switch_applies_when_a_configuration_is_loaded(tmp_path: Path) -> None:
    path = declared(tmp_path, "[safety]\nlossless_only = true\n")
    loaded = load_config(path, environ={}, check=lambda config, environ: iter(()))
    assert turned_off(loaded) == []
    path = declared(tmp_path)
    assert turned_off(load_config(path, environ={}, check=lambda config, environ: iter(()))) != []


def test_names_are_unique_and_lossless_ones_have_nothing_to_turn_off() -> None:
    assert len({each.name for each in TECHNIQUES}) == len(TECHNIQUES)
    config = Config()
    assert all(each.off(config) == config for each in TECHNIQUES if each.lossless)
    assert {each.lossless for each in TECHNIQUES} == {True, False}


def test_config_check_explains_what_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("headrace.toml").write_text('[shaping]\noverflow = "drop"\n[safety]\nlossless_only = true\n')
    assert main(["config", "check", "--file-only"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == explain(read_declared(environ={}))[0]
    assert first.startswith("safety.lossless_only turns off conversation overflow (shaping.overflow): ")
    assert last == "headrace.toml is valid"
    assert main(["config", "show"]) == 0
    assert 'overflow = "refuse"' in capsys.readouterr().out


def test_the_command_lists_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("headrace.toml").write_text('[shaping]\noverflow = "drop"\n')
    assert main(["techniques", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert len(found) == len(TECHNIQUES)
    assert found["conversation overflow"]["keys"] == ["shaping.overflow"]
    assert main(["techniques"]) == 0
    assert "may change" in capsys.readouterr().out
