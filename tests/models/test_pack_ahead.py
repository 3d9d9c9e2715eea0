"""Packing ahead: what a server would pack at its first start is there, once, and complete."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from msgspec.structs import replace

import headrace._core as _core
from headrace.errors import RequestError
from headrace.models.model_folder import find_model, open_model
from headrace.models.own_module import own_module
from headrace.models.pack_ahead import PackedWeights, pack_ahead
from headrace.models.packing import load_tensors
from headrace.models.synthetic.random_model import write_random_model
from headrace.models.weight_choice import choose_plan
from headrace.variant import Variant
from tests.models.text.test_text_splits import KINDS as SPLITS
from tests.support.models.prediction_modules import build_checkpoint


def with_qwen_words(path: Path) -> tokenizers.Tokenizer:
    """Give a tokenizer the words of a kind that has an index."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = SPLITS["qwen"]
    tokenizer.save(str(path))
    return tokenizer


def packed(cache: Path, *variants: Variant, check: bool = False) -> list[PackedWeights]:
    return list(pack_ahead(variants, cache, threads=1, check=check))


def test_a_start_maps_what_was_packed_ahead(tmp_path: Path) -> None:
    variant = Variant(model="draft", weights="int4")
    (missing,) = packed(tmp_path, variant, check=True)
    assert missing.state == "missing"
    assert not (tmp_path / "packed").exists()
    (first,) = packed(tmp_path, variant)
    (again,) = packed(tmp_path, variant)
    assert (first.state, again.state) == ("packed", "there")
    assert (first.model, first.weights, first.path) == ("draft", "int4-g32", missing.path)
    assert 0 < first.bytes <= Path(first.path).stat().st_size
    folder = open_model(find_model("draft"))
    loaded = load_tensors(folder, choose_plan(folder, "int4"), _core.Pool(1), cache=tmp_path)
    assert (loaded.mapped, loaded.bytes) == (True, first.bytes)
    assert [str(file) for file in (tmp_path / "packed").iterdir()] == [first.path]


def test_a_prediction_module_is_packed_too(tmp_path: Path) -> None:
    build_checkpoint("glm4-moe", tmp_path / "model")
    variant = Variant(model=str(tmp_path / "model"), weights="int8", speculation="mtp")
    found = packed(tmp_path / "cache", variant)
    assert [each.state for each in found] == ["packed", "packed"]
    module = own_module(open_model(tmp_path / "model"), variant)
    assert module is not None
    assert load_tensors(module.folder, module.plan, _core.Pool(1), cache=tmp_path / "cache").mapped
    assert {each.state for each in packed(tmp_path / "cache", variant, check=True)} == {"there"}


def test_a_damaged_file_is_missing_and_packed_again(tmp_path: Path) -> None:
    variant = Variant(model="draft", weights="int4")
    (first,) = packed(tmp_path, variant)
    Path(first.path).write_bytes(Path(first.path).read_bytes()[:-1])
    assert packed(tmp_path, variant, check=True)[0].state == "missing"
    assert packed(tmp_path, variant)[0].state == "packed"
    assert packed(tmp_path, variant, check=True)[0].state == "there"


def test_a_draft_model_is_packed_too_and_nothing_twice(tiny_folder: Path, tmp_path: Path) -> None:
    own = Variant(model=str(tiny_folder), weights="int4")
    drafting = replace(own, speculation="model", draft_model="draft", draft_weights="int8")
    found = packed(tmp_path, drafting, own, Variant(model="draft", weights="int8"))
    assert [(each.model, each.weights, each.state) for each in found] == [
        (tiny_folder.name, "int4-g32", "packed"),
        ("draft", "int8-g128", "packed"),
    ]
    shorter = Variant(model="draft", weights="int8", speculation="self", skip_layers=(1,), draft_weights="int4")
    assert [(each.weights, each.state) for each in packed(tmp_path, shorter, check=True)] == [
        ("int8-g128", "there"),
        ("int4-g32", "missing"),
    ]


def test_a_cache_that_may_not_hold_them_is_an_error_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_GIB", "0.0001")
    with pytest.raises(RequestError, match=r"the cache may hold 0\.00 GiB\. Raise HEADRACE_CACHE_GIB"):
        packed(tmp_path, Variant(model="draft", weights="int4"))
    assert not (tmp_path / "packed").exists()
    monkeypatch.delenv("HEADRACE_CACHE_GIB")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, free=2**31))
    with pytest.raises(RequestError, match=r"hold 0\.00 GiB\. Free disk space, or set HEADRACE_CACHE to"):
        packed(tmp_path, Variant(model="draft", weights="int4"))
    with pytest.raises(RequestError, match="cache = false"):
        packed(tmp_path, Variant(model="draft", cache=False))


def test_the_tokenizers_index_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model("tiny", tmp_path / "model", seed=1)
    tokenizer = with_qwen_words(tmp_path / "model" / "tokenizer.json")
    monkeypatch.setattr("headrace.models.text.index_cache._LEAST_BYTES", 0)
    variant = Variant(model=str(tmp_path / "model"), weights="int4")
    packed(tmp_path / "cache", variant, check=True)
    assert not (tmp_path / "cache" / "tokenizers").exists()
    packed(tmp_path / "cache", variant)
    (index,) = (tmp_path / "cache" / "tokenizers").iterdir()
    monkeypatch.setattr("headrace.models.text.tokenizer.read_encoder", None)  # a start needs none
    folder = open_model(tmp_path / "model")
    folder.tokenizer_cache = tmp_path / "cache"
    assert folder.tokenizer.encode("The water ran") == tokenizer.encode("The water ran").ids
    assert [index] == list((tmp_path / "cache" / "tokenizers").iterdir())
