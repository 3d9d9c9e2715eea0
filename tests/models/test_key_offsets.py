"""Files of key offsets: what was measured is what transformers' keys average to, and a wrong file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.engine.executors.key_means import measure_key_offsets
from headrace.errors import ModelError, RequestError
from headrace.gateway.serving.fingerprint import of_model
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.key_offsets import KeyOffsets, key_shapes, offsets_of, open_key_offsets, write_key_offsets
from headrace.models.model_folder import BUNDLED, open_model
from headrace.variant import Variant
from tests.models.tiny_models import Reference, prompt

Tiny = Callable[[str], Reference]


def some(folder: Path, value: float = 0.5) -> KeyOffsets:
    shapes = key_shapes(open_model(folder).spec)
    return KeyOffsets({layer: np.full(shape, value, np.float32) for layer, shape in shapes.items()})


def test_measured_offsets_are_the_means_of_transformers_keys(tiny: Tiny) -> None:
    reference = tiny("llama")
    texts = [prompt(40), prompt(23)[5:]]
    found = measure_key_offsets(open_model(reference.folder), texts, weights="f32", threads=2)
    with torch.no_grad():
        caches = [reference.model(torch.tensor([each]), use_cache=True).past_key_values for each in texts]
    for layer, offsets in found.layers.items():
        keys = np.concatenate([cache.layers[layer].keys[0].transpose(0, 1).numpy() for cache in caches])
        assert len(keys) == sum(map(len, texts))
        np.testing.assert_allclose(offsets, keys.mean(axis=0), atol=1e-4)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, spec = tmp_path / "offsets.safetensors", open_model(BUNDLED / "draft").spec
    offsets = some(BUNDLED / "draft")
    write_key_offsets(path, offsets, {"model": "draft"})
    found = open_key_offsets(path, spec)
    assert found.digest == offsets.digest != some(BUNDLED / "draft", 0.25).digest
    assert {name: values.ndim for name, values in found.tensors().items()} == {
        f"layers.{layer}.attn.key_offsets": 1 for layer in key_shapes(spec)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers.pop("layers.0.key_offsets"), "no such tensor"),
        (
            lambda layers: layers.update({"layers.99.key_offsets": np.zeros((1, 1), np.float32)}),
            "the file is of another model",
        ),
        (lambda layers: layers.update({"layers.0.key_offsets": np.zeros(4, np.float32)}), "Has shape 4. This model's"),
        (lambda layers: layers["layers.0.key_offsets"].fill(np.nan), "not within"),
        (lambda layers: layers["layers.0.key_offsets"].fill(1e5), "not within"),
    ],
)
def test_offsets_of_another_model_are_refused(
    change: Callable[[dict[str, np.ndarray]], object], message: str, tmp_path: Path
) -> None:
    path, spec = tmp_path / "offsets.safetensors", open_model(BUNDLED / "draft").spec
    layers = {f"layers.{place}.key_offsets": each for place, each in some(BUNDLED / "draft").layers.items()}
    change(layers)
    write_safetensors(path, {name: ("F32", each.shape, lambda each=each: [each]) for name, each in layers.items()})
    with pytest.raises(ModelError, match=message):
        open_key_offsets(path, spec)


def test_a_missing_file_names_the_option_and_the_command(tmp_path: Path) -> None:
    spec = open_model(BUNDLED / "draft").spec
    variant = Variant(model="draft", kv="int4", kv_offsets=str(tmp_path / "none"))
    with pytest.raises(RequestError, match=r"no such file of key offsets.*headrace kv-offsets MODEL FILE") as caught:
        offsets_of(spec, variant)
    assert caught.value.parameter == "kv_offsets"
    for kv in ("bf16", "fp8", "f32"):  # which have no use for offsets
        assert offsets_of(spec, Variant(model="draft", kv=kv, kv_offsets="none")) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpt-oss", "attention sinks"), ("gemma2", "caps its attention scores"), ("deepseek-v3", "latent_kv = false")],
)
def test_models_whose_answers_offsets_would_change_are_refused(name: str, message: str, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match=message):
        key_shapes(open_model(tiny(name).folder).spec)


def test_offsets_count_in_the_fingerprint_and_in_the_name_where_they_are_used(tmp_path: Path) -> None:
    folder = open_model(BUNDLED / "draft")
    paths = [tmp_path / name for name in ("one", "same", "other")]
    for path, value in zip(paths, (0.5, 0.5, 0.25), strict=True):
        write_key_offsets(path, some(BUNDLED / "draft", value), {})

    def found(kv: str) -> list[str]:
        files = [None, *map(str, paths)]
        return [of_model(folder, Variant(model="draft", kv=kv, kv_offsets=each)) for each in files]

    none, one, same, other = found("int4")
    assert one == same
    assert len({none, one, other}) == 3
    assert len(set(found("bf16"))) == 1
    assert Variant(model="draft", kv="int4", kv_offsets="one").name == "auto/kv-int4-offsets"
    assert Variant(model="draft", kv="bf16", kv_offsets="one").name == "auto/kv-bf16"
