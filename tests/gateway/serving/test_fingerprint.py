"""What a model's fingerprint follows from: what is in its files, and nothing else of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from headrace.gateway.serving.fingerprint import of_model
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.model_folder import BUNDLED, open_model
from headrace.variant import Variant

WEIGHTS = "model.safetensors"


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(BUNDLED / "draft", folder))


def of(folder: Path, **options: str) -> str:
    return of_model(open_model(folder), Variant.of(str(folder), **options))


def test_a_model_elsewhere_at_another_time_is_the_same(tmp_path: Path) -> None:
    there = copied(tmp_path / "another name")
    for path in there.iterdir():
        os.utime(path, (0, 0))
    (there / "README.md").write_text("Nothing that a model is read from.")
    assert of(there) == of(BUNDLED / "draft")
    assert of(there).startswith("fp_")
    assert len(of(there)) == 13


def test_a_model_in_other_shards_is_the_same(tmp_path: Path) -> None:
    there = copied(tmp_path / "there")
    file = SafetensorsFile.open(there / WEIGHTS)
    data = (there / WEIGHTS).read_bytes()
    places: dict[str, str] = {}
    for part in range(2):
        name = f"part-{part}.safetensors"
        tensors = {
            tensor: (entry.dtype, entry.shape, lambda entry=entry: [data[entry.start : entry.stop]])
            for place, (tensor, entry) in enumerate(file.tensors.items())
            if place % 2 == part
        }
        write_safetensors(there / name, tensors)
        places |= dict.fromkeys(tensors, name)
    (there / WEIGHTS).unlink()
    (there / f"{WEIGHTS}.index.json").write_bytes(msgspec.json.encode({"weight_map": places}))
    assert of(there) == of(BUNDLED / "draft")


def test_every_tensor_that_changes_as_a_whole_changes_it(tmp_path: Path) -> None:
    there = copied(tmp_path / "there")
    whole = (there / WEIGHTS).read_bytes()
    found = {of(there)}
    entries = list(SafetensorsFile.open(there / WEIGHTS).tensors.values())
    for entry in entries:
        changed = bytearray(whole)
        changed[entry.start : entry.stop] = bytes(byte ^ 1 for byte in changed[entry.start : entry.stop])
        (there / WEIGHTS).unlink()  # its old bytes may still be mapped
        (there / WEIGHTS).write_bytes(changed)
        found.add(of(there))
    assert len(found) == 1 + len(entries)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_what_stands_beside_the_weights_counts(name: str, tmp_path: Path) -> None:
    there = copied(tmp_path / "there")
    text = (there / name).read_text()
    (there / name).write_text(text + "\n")
    assert of(there) != of(BUNDLED / "draft")


def test_a_chat_template_counts(tmp_path: Path) -> None:
    there = copied(tmp_path / "there")
    (there / "chat_template.jinja").unlink()
    assert of(there) != of(BUNDLED / "draft")


def test_a_variant_s_precision_counts_and_its_threads_do_not() -> None:
    folder = BUNDLED / "draft"
    assert len({of(folder), of(folder, weights="int8"), of(folder, weights="int4"), of(folder, kv="int8")}) == 4
    model = open_model(folder)
    assert of_model(model, Variant.of("draft", threads=1)) == of_model(model, Variant.of("draft", threads=2))
