"""The image part in other precisions: close to f32, smaller, and never mixed with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import headrace._core as _core
from headrace.engine.executors.cpu_executor import memory_of
from headrace.engine.executors.image_encoder import ImageEncoder
from headrace.errors import RequestError
from headrace.gateway.serving import fingerprint
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors
from headrace.models.vision.encoding_memory import encoding_bytes
from headrace.models.vision.pixels import read_tiles
from headrace.models.vision.vision_folder import VisionFolder, open_vision, tower_bytes
from headrace.variant import Variant
from tests.support.models.tiny_vision import picture, write_vision_model

pytest.importorskip("PIL.Image", reason="the extra vision is not installed")


def features(vision: VisionFolder, weights: str, *, threads: int = 2) -> NDArray[np.float32]:
    encoder = ImageEncoder(vision, threads=threads, weights=weights)
    try:
        return encoder.encode(read_tiles(picture(90, 50), vision.layout, 100_000))
    finally:
        encoder.close()


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_features_in_int8_are_close_to_those_in_f32(kind: str, tmp_path: Path) -> None:
    vision = open_vision(write_vision_model(tmp_path, kind=kind))
    exact = features(vision, "f32")
    assert np.array_equal(features(vision, "auto"), exact)  # the files hold f32
    for weights, least in (("bf16", 0.9999), ("int8", 0.999)):
        found = features(vision, weights)
        assert not np.array_equal(found, exact)
        norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(exact, axis=-1)
        assert float(((found * exact).sum(axis=-1) / norms).min()) > least
    assert np.array_equal(features(vision, "int8", threads=1), features(vision, "int8"))


def test_int8_takes_less_memory_and_all_of_it_is_counted(tmp_path: Path) -> None:
    path = write_vision_model(tmp_path)
    vision = open_vision(path)
    sizes = [tower_bytes(path, weights) for weights in ("f32", "bf16", "int8")]
    assert sizes == sorted(sizes, reverse=True)
    packed = load_tensors(vision.folder, vision.plan("int8"), _core.Pool(1), cache=None).bytes
    exact = sum(values.nbytes for name, values in vision.extras.items() if name != "projection")
    rows, inputs = vision.extras["projection"].shape
    assert packed + exact < sizes[2] < packed + exact + 2 * rows * inputs
    need = memory_of(open_model(path), Variant(model=str(path), context=64, image_weights="int8"))
    assert need.images == sizes[2] + encoding_bytes(vision.tower, vision.tower.side**2)


def test_another_precision_has_another_fingerprint(tmp_path: Path) -> None:
    path = write_vision_model(tmp_path)
    folder = open_model(path)
    found = {
        fingerprint.of_model(folder, Variant(model=str(path), image_weights=each)) for each in ("auto", "f32", "int8")
    }
    assert len(found) == 3


def test_another_image_part_or_preparation_has_another_fingerprint_and_digest(tmp_path: Path) -> None:
    path = write_vision_model(tmp_path / "model")
    variant = Variant(model=str(path))

    def found() -> tuple[str, bytes]:
        encoder = ImageEncoder(open_vision(path))
        encoder.close()
        return fingerprint.of_model(open_model(path), variant), encoder.digest

    seen = [found()]
    assert found() == seen[0]
    tensors = load_file(path / "model.safetensors")
    changed = {name: tensor * 1.5 if "vision" in name else tensor for name, tensor in tensors.items()}
    (path / "model.safetensors").unlink()
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    seen.append(found())
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.25, 0.5, 0.5]}))
    seen.append(found())
    for each in zip(*seen, strict=True):
        assert len(set(each)) == 3
    encoder = ImageEncoder(open_vision(path), weights="int8")
    encoder.close()
    assert encoder.digest not in {digest for _, digest in seen}


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    vision = open_vision(write_vision_model(tmp_path))
    with pytest.raises(RequestError, match="'image_weights' must be one of auto, f32, bf16, int8, not 'int4'"):
        ImageEncoder(vision, weights="int4")
