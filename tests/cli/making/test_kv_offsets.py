"""`headrace kv-offsets`: a file that is served, measured and kept apart from KV without it, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.engine.process.open_engine import open_variant
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.variant import Variant

TEXT = "The water wheel turns, and the mill grinds what the fields gave. " * 12


@pytest.fixture
def offsets(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "tiny.offsets.safetensors"
    sizes = ["--calibrate", str(tmp_path / "text.txt"), "--calibrate-tokens", "200", "--window", "64", "--threads", "1"]
    assert main(["kv-offsets", str(tiny_folder), str(out), *sizes]) == 0
    assert f'kv = "int4", kv_offsets = "{out}"' in capsys.readouterr().out
    return out


def test_offsets_are_measured_written_and_evaluated(offsets: Path, tiny_folder: Path, tmp_path: Path) -> None:
    about = SafetensorsFile.open(offsets).metadata
    assert about["model"] == tiny_folder.name
    assert about["measured_on"].endswith(" tokens of text.txt")
    texts = ["--text", str(tmp_path / "text.txt"), "--tokens", "100", "--no-speed", "--threads", "1", "--json"]
    kinds = ["--weights", "f32", "--kv", "int4", "--against-kv", "f32", "--kv-offsets", str(offsets)]
    assert main(["evaluate", str(tiny_folder), *kinds, *texts, str(tmp_path / "report.json")]) == 0
    reference, found = json.loads((tmp_path / "report.json").read_text())["variants"]
    assert (reference["kv"], reference["kv_offsets"]) == ("f32", None)
    assert (found["kv"], found["kv_offsets"]) == ("int4", str(offsets))
    assert found["distance"]["kl"]["value"] > 0.0


def test_kept_kv_belongs_to_its_offsets(offsets: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """What disk holds of one is never read with the other."""
    common: dict[str, Any] = {"threads": 1, "context": 128, "kv": "int4", "speculation": "none"}
    disk = tmp_path / "kv"
    for more in ({}, {"kv_offsets": str(offsets)}, {"kv_offsets": str(offsets)}):
        variant = Variant.of(str(tiny_folder), kv_disk_bytes=1 << 20, kv_disk_folder=str(disk), **common, **more)
        opened = open_variant(variant)
        opened.executor.close()
    assert len(list(disk.iterdir())) == 2


def test_mistakes_are_named(tiny_folder: Path, offsets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-offsets", str(tiny_folder), str(offsets)]) == 2
    assert "exists. Choose another name" in capsys.readouterr().err
    assert main(["kv-offsets", "mini", "/no/such/folder/out"]) == 2
    assert "does not exist. Create it first" in capsys.readouterr().err
