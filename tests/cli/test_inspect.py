"""`headrace inspect`: the tables name what a user needs, and the JSON holds the same facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import WRONG_USAGE, main


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.machine._RUNS", 1)


def test_the_json_holds_sizes_floors_and_what_fits(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_folder), "--json", "--threads", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] > 0
    assert [entry["precision"] for entry in facts["precisions"]] == [
        *("f32", "bf16", "int8-g128", "int4-g32", "int3-g32", "int2-g32")
    ]
    sizes = [entry["weight_bytes"] for entry in facts["precisions"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(entry["decode_ms"] > 0 and entry["prefill_ms"] > entry["decode_ms"] for entry in facts["precisions"])
    kv = facts["kv_bytes_per_token"]
    assert kv["f32"] == 2 * kv["bf16"] > 2 * kv["int8"]
    fits = facts["tokens_that_fit"]["int8-g128"]
    expected = (facts["machine"]["memory"] - facts["precisions"][2]["weight_bytes"]) // kv["bf16"]
    assert fits["bf16"] == pytest.approx(expected, abs=1)


def test_the_tables_name_model_machine_and_floors(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_folder)]) == 0
    out = capsys.readouterr().out
    for word in ("LlamaForCausalLM", "million parameters", "int4-g32", "tok/s", "KV type", "Machine"):
        assert word in out


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == WRONG_USAGE
    assert "config.json" in capsys.readouterr().err


def test_a_profile_shows_each_component_against_the_floor(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny_folder), "--profile", "--precision", "int8", "--threads", "1", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    assert profile["precision"].startswith("int8")
    assert [phase["phase"] for phase in profile["phases"]] == ["prefill", "decode"]
    assert all(phase["bytes_per_s"] > 0 and phase["operations_per_s"] > 0 for phase in profile["phases"])
    assert main(["inspect", str(tiny_folder), "--profile", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("decode of 1 token", "attention", "ms per layer", "GB/s", "The floor is"):
        assert word in out
