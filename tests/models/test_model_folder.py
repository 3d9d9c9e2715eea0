"""Opening a model folder: errors name path and tensor; hub ids are downloaded from the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError, RequestError
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.model_folder import find_model, open_model

Shapes = dict[str, tuple[int, ...]]


def change_shapes(folder: Path, change: Callable[[Shapes], None]) -> None:
    """Writes the model's file again with other tensors: zeros of the changed shapes."""
    path = folder / "model.safetensors"
    shapes: Shapes = {name: entry.shape for name, entry in SafetensorsFile.open(path).tensors.items()}
    change(shapes)

    def zeros(shape: tuple[int, ...]) -> Callable[[], list[bytes]]:
        count = 1
        for size in shape:
            count *= size
        return lambda: [bytes(2 * count)]

    write_safetensors(path, {name: ("BF16", shape, zeros(shape)) for name, shape in shapes.items()})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_model_folder_opens_with_every_tensor_in_place(tiny_folder: Path) -> None:
    folder = open_model(tiny_folder)
    for name, shape in folder.shapes.items():
        assert folder.tensor(name).data.shape == shape


def test_a_missing_tensor_is_named(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_folder)
    change_shapes(folder, lambda shapes: shapes.pop("model.layers.1.mlp.down_proj.weight") and None)
    with pytest.raises(ModelError) as caught:
        open_model(folder)
    assert caught.value.tensor == "model.layers.1.mlp.down_proj.weight"


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_folder)
    change_shapes(folder, lambda shapes: shapes.update({"model.layers.0.self_attn.o_proj.weight": (8, 24)}))
    with pytest.raises(ModelError, match="8x24") as caught:
        open_model(folder)
    assert caught.value.tensor == "model.layers.0.self_attn.o_proj.weight"


def test_a_tensor_with_too_few_rows_is_named(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    change_shapes(folder, lambda shapes: shapes.update({name: (shapes[name][0] - 16, shapes[name][1])}))
    with pytest.raises(ModelError, match="Expected") as caught:
        open_model(folder)
    assert caught.value.tensor == name


def test_a_config_that_promises_more_than_the_weights_hold_is_refused(
    tiny_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_folder)
    change_config(folder, vocab_size=1 << 20)
    with pytest.raises(ModelError, match="1048576") as caught:
        open_model(folder)
    assert caught.value.tensor == "model.embed_tokens.weight"


def test_pickles_are_refused_by_name(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Pickle") as caught:
        open_model(folder)
    assert str(caught.value.path).endswith("pytorch_model.bin")


def test_an_unknown_architecture_is_rejected_with_the_supported_ones(
    tiny_folder: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_folder)
    change_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        open_model(folder)


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_path_that_is_not_a_folder_is_rejected(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    if place == "file":
        path.write_text("")
    with pytest.raises(ModelError, match="folder"):
        open_model(path)


def test_an_existing_path_wins_over_the_hub(tiny_folder: Path) -> None:
    assert find_model(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize("name", ["../nowhere", "/nowhere/at/all", "a/b/c", "x", "own er/name", "owner/"])
def test_a_name_that_is_neither_path_nor_hub_id_is_rejected(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        find_model(name)
    assert caught.value.parameter == "model"


@pytest.mark.parametrize("name", ["owner/some-model", "owner/some-model:Q4_0", "pypi:some-model"])
def test_a_model_that_is_not_here_says_how_to_download_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match=f"run: headrace pull {name}") as caught:
        find_model(name)
    assert caught.value.parameter == "model"
