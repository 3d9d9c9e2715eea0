"""Packed weights: equal with and without the cache, never stale; a broken cache never stops a start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import ModelError, RequestError
from headrace.models import packing
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.model_folder import open_model
from headrace.models.packing import LoadedTensors, load_tensors, packed_size
from headrace.models.precision import parse_plan

PROMPT = [1, 5, 9, 200, 3, 77]


def load(folder: Path, weights: str, cache: Path | None, keep: tuple[str, ...] = ()) -> LoadedTensors:
    return load_tensors(open_model(folder), parse_plan(weights, keep=keep), _core.Pool(2), cache=cache)


def answers(folder: Path, weights: str, cache: Path | None) -> NDArray[np.float32]:
    return logits(CpuExecutor.load(open_model(folder), weights=weights, cache=cache), [PROMPT])[0]


def rewrite(folder: Path, change: Callable[[str, NDArray[np.uint16]], NDArray[np.uint16]]) -> None:
    """Writes the model's only file again, each bf16 tensor passed through `change`."""
    path = folder / "model.safetensors"
    file = SafetensorsFile.open(path)
    changed = {name: change(name, file.dense(name).data.copy()) for name in file.tensors}

    def chunks(name: str) -> Callable[[], list[bytes]]:
        return lambda: [changed[name].tobytes()]

    write_safetensors(path, {name: ("BF16", changed[name].shape, chunks(name)) for name in file.tensors})


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8-g128", "int4", "int4-channel"])
def test_a_warm_start_maps_the_file_of_a_cold_start(weights: str, tiny_folder: Path, tmp_path: Path) -> None:
    cold = load(tiny_folder, weights, tmp_path)
    warm = load(tiny_folder, weights, tmp_path)
    assert (cold.mapped, warm.mapped) == (False, True)
    assert warm.bytes == cold.bytes
    assert len(list((tmp_path / "packed").glob("*.pack"))) == 1
    assert np.array_equal(answers(tiny_folder, weights, tmp_path), answers(tiny_folder, weights, None))


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4-g128", "int8-channel"])
def test_the_predicted_size_is_the_size(weights: str, tiny_folder: Path) -> None:
    folder = open_model(tiny_folder)
    assert packed_size(folder.spec, folder.shapes, parse_plan(weights)) == load(tiny_folder, weights, None).bytes


def test_each_plan_has_a_packed_file_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    load(tiny_folder, "int8", tmp_path)
    assert not load(tiny_folder, "int4", tmp_path).mapped
    assert not load(tiny_folder, "int4", tmp_path, keep=("layers.*.attn.o=bf16",)).mapped
    assert load(tiny_folder, "int4", tmp_path, keep=("layers.*.attn.o=bf16",)).mapped


def test_the_key_is_the_content_and_not_the_place(
    tiny_folder: Path, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    load(tiny_folder, "int8", tmp_path / "cache")
    assert load(copy_of(tiny_folder), "int8", tmp_path / "cache").mapped


def test_changed_weights_are_never_served_from_the_cache(
    tiny_folder: Path, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_folder)
    before = answers(folder, "int8", tmp_path / "cache")
    rewrite(folder, lambda name, data: data[::-1].copy() if "embed" in name else data)
    assert not load(folder, "int8", tmp_path / "cache").mapped
    assert not np.array_equal(answers(folder, "int8", tmp_path / "cache"), before)


@pytest.mark.parametrize("damage", ["truncate", "empty", "footer", "garbage"])
def test_a_damaged_packed_file_is_packed_again(damage: str, tiny_folder: Path, tmp_path: Path) -> None:
    good = answers(tiny_folder, "int8", tmp_path)
    (path,) = (tmp_path / "packed").glob("*.pack")
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = bytearray()
    elif damage == "footer":
        data[-100] ^= 0xFF
    else:
        data = bytearray(os.urandom(4096))
    path.write_bytes(data)
    assert not load(tiny_folder, "int8", tmp_path).mapped
    assert np.array_equal(answers(tiny_folder, "int8", tmp_path), good)


def test_a_cache_that_cannot_be_written_costs_only_time(tiny_folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert load(tiny_folder, "int8", blocked).tensors.keys() == load(tiny_folder, "int8", None).tensors.keys()


def test_the_cache_keeps_within_its_bound(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = load(tiny_folder, "bf16", None).bytes
    monkeypatch.setenv("HEADRACE_CACHE_GIB", str(1.2 * size / 2**30))
    load(tiny_folder, "bf16", tmp_path)
    (first,) = (tmp_path / "packed").glob("*.pack")
    os.utime(first, (1, 1))
    load(tiny_folder, "int8", tmp_path)  # both together pass the bound, so the older one goes
    assert not first.exists()
    monkeypatch.setenv("HEADRACE_CACHE_GIB", str(0.1 * size / 2**30))
    assert not load(tiny_folder, "bf16", tmp_path).mapped
    assert not load(tiny_folder, "bf16", tmp_path).mapped  # too large to be kept at all
    monkeypatch.setenv("HEADRACE_CACHE_GIB", "plenty")
    with pytest.raises(RequestError, match="plenty"):
        load(tiny_folder, "bf16", tmp_path)


def test_weights_are_packed_in_memory_when_another_process_needed_their_room(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_open_packed", lambda path: None)
    loaded = load(tiny_folder, "int8", tmp_path)
    assert loaded.tensors.keys() == load(tiny_folder, "int8", None).tensors.keys()


@pytest.mark.parametrize(("bits", "what"), [(0x7FC0, "NaN"), (0x7F80, "infinity")])
def test_weights_that_are_not_numbers_are_refused_by_name(
    bits: int, what: str, tiny_folder: Path, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_folder)

    def spoil(name: str, data: NDArray[np.uint16]) -> NDArray[np.uint16]:
        if name.endswith("layers.1.self_attn.o_proj.weight"):
            data.reshape(-1)[1234] = bits
        return data

    rewrite(folder, spoil)
    with pytest.raises(ModelError, match=what) as caught:
        load(folder, "int8", tmp_path / "cache")
    assert caught.value.tensor == "model.layers.1.self_attn.o_proj.weight"
    assert caught.value.path == str(folder / "model.safetensors")
    assert "1234" in str(caught.value)
    assert not list((tmp_path / "cache" / "packed").iterdir())  # nothing half-written is left


def test_a_kept_tensor_has_its_own_precision(tiny_folder: Path) -> None:
    plain = load(tiny_folder, "int4", None).tensors["layers.0.attn.o"]
    kept = load(tiny_folder, "int4", None, keep=("layers.*.attn.o=f32",)).tensors["layers.0.attn.o"]
    assert isinstance(plain, _core.Packed)
    assert isinstance(kept, _core.Packed)
    exact = open_model(tiny_folder).tensor("layers.0.attn.o").to_f32()
    assert np.array_equal(kept.unpack(), exact)
    error = np.abs(plain.unpack() - exact).max()
    assert 0 < error < np.abs(exact).max() / 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_packing_keeps_no_page_of_the_model_in_memory(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    folder = open_model(tmp_path / "model")
    (file,) = folder.weights.files
    folder.tensor("embed").data.sum()
    assert resident_bytes(file) > 0
    before = folder.tensor("embed").data.copy()
    load_tensors(folder, parse_plan("int4"), _core.Pool(1), cache=tmp_path / "cache")
    assert resident_bytes(file) == 0
    assert (folder.tensor("embed").data == before).all()  # read from the file again


def resident_bytes(path: Path) -> int:
    """Return the bytes of a mapped file that are in this process's memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total
