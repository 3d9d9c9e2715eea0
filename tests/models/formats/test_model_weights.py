"""The weights of a folder: choice of files, agreement of index and shards, and the digest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from headrace.errors import ModelError
from headrace.models.formats.json_file import read_json
from headrace.models.formats.model_weights import ModelWeights, content_digest

INDEX = "model.safetensors.index.json"


def save(path: Path, *names: str, value: float = 1.0) -> Path:
    safetensors.numpy.save_file({name: np.full((2, 2), value, np.float32) for name in names}, path)
    return path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ModelWeights.open(folder)
    return caught.value


def test_a_single_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", "a", "b")
    save(tmp_path / "other.safetensors", "c")
    weights = ModelWeights.open(tmp_path)
    assert weights.names == frozenset({"a", "b"})
    assert weights.total_bytes == 32
    assert weights.files == (tmp_path / "model.safetensors",)
    assert weights.dense("a").data.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ModelError, match="no such tensor") as caught:
        weights.dense("c")
    assert caught.value.tensor == "c"


def test_shards_by_their_index(tmp_path: Path) -> None:
    save(tmp_path / "m-2.safetensors", "b", value=2.0)
    save(tmp_path / "m-1.safetensors", "a", "c", value=1.0)
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"})
    weights = ModelWeights.open(tmp_path)
    assert weights.names == frozenset({"a", "b", "c"})
    assert weights.total_bytes == 48
    assert weights.files == (tmp_path / "m-1.safetensors", tmp_path / "m-2.safetensors")
    assert weights.dense("b").data[0, 0] == 2.0
    assert weights.dense("b").path == tmp_path / "m-2.safetensors"


def test_the_only_file_of_another_name(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", "a")
    assert ModelWeights.open(tmp_path).names == frozenset({"a"})
    save(tmp_path / "second.safetensors", "b")
    assert "2 .safetensors files" in refused(tmp_path).reason


def test_symlinks_as_hub_caches_make_them(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs" / "0a1b", "a")
    (tmp_path / "snapshot" / "m-1.safetensors").symlink_to("../blobs/0a1b")
    write_index(tmp_path / "snapshot", {"a": "m-1.safetensors"})
    assert ModelWeights.open(tmp_path / "snapshot").dense("a").data.sum() == 4.0


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "m-1.safetensors", "a")
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    missing = refused(tmp_path)
    assert "The shard is missing" in missing.reason
    assert missing.path == str(tmp_path / "m-2.safetensors")
    save(tmp_path / "m-2.safetensors", "c")
    absent = refused(tmp_path)
    assert absent.tensor == "b"
    assert "does not hold it" in absent.reason
    save(tmp_path / "m-2.safetensors", "a", "b")
    twice = refused(tmp_path)
    assert twice.tensor == "a"
    assert "is also in 'm-1.safetensors'" in twice.reason


@pytest.mark.parametrize(
    "shard",
    [
        "../m.safetensors",
        "/etc/m.safetensors",
        "sub/m.safetensors",
        "..",
        "m.bin",
        "a\\m.safetensors",
        "a\0.safetensors",
    ],
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    (tmp_path / "sub").mkdir()
    save(tmp_path / "m.safetensors", "a")
    save(tmp_path / "sub" / "m.safetensors", "a")
    write_index(tmp_path / "sub", {"a": shard})
    assert "is not the plain name" in refused(tmp_path / "sub").reason


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": None}, "m.safetensors"])
def test_a_weight_map_of_another_type_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    assert "'weight_map' must" in refused(tmp_path).reason


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "model.ckpt", "model.pkl"]
)
def test_pickle_files_are_refused_by_name_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "nothing")
    error = refused(tmp_path)
    assert error.path == str(tmp_path / name)
    assert "can execute code" in error.reason
    assert "safetensors" in error.reason


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "has no weights" in refused(tmp_path).reason
    assert "Cannot read" in refused(tmp_path / "nothing").reason


def test_the_digest_follows_the_contents_and_not_the_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(b"first")
        (tmp_path / name / "b").write_bytes(b"second")
    one, two = ([tmp_path / name / file for file in ("b", "a")] for name in ("one", "two"))
    assert content_digest(one) == content_digest(two) == content_digest(reversed(two))
    assert len(content_digest(one)) == 64
    (tmp_path / "two" / "a").write_bytes(b"First")
    assert content_digest(one) != content_digest(two)
    (tmp_path / "two" / "a").write_bytes(b"firsts")
    (tmp_path / "two" / "b").write_bytes(b"econd")
    assert content_digest(one) != content_digest(two)


def settle(path: Path) -> None:
    """A file that was written long ago, so that its mtime can be trusted."""
    os.utime(path, ns=(10**18, 10**18))


def test_a_digest_that_is_known_is_not_worked_out_again(tmp_path: Path) -> None:
    file, index = tmp_path / "a", tmp_path / "cache" / "digests"
    file.write_bytes(b"first")
    settle(file)
    first = content_digest([file], index_dir=index)
    assert first == content_digest([file])
    # The same size, inode and mtime: this is what the index goes by.
    file.write_bytes(b"other")
    settle(file)
    assert content_digest([file], index_dir=index) == first
    file.write_bytes(b"longer")
    settle(file)
    assert content_digest([file], index_dir=index) == content_digest([file]) != first
    assert len(list(index.iterdir())) == 1


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    file, index = tmp_path / "a", tmp_path / "digests"
    file.write_bytes(b"first")
    first = content_digest([file], index_dir=index)
    file.write_bytes(b"other")
    assert content_digest([file], index_dir=index) != first


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b"{" * 5000, b'{"sha256": "zz"}'])
def test_a_corrupt_index_entry_is_ignored_and_mended(tmp_path: Path, damage: bytes) -> None:
    file, index = tmp_path / "a", tmp_path / "digests"
    file.write_bytes(b"first")
    settle(file)
    first = content_digest([file], index_dir=index)
    (record,) = index.iterdir()
    good = record.read_bytes()
    record.write_bytes(damage)
    assert content_digest([file], index_dir=index) == first
    assert record.read_bytes() == good
    record.write_bytes(good.replace(good[-10:-2], b"zzzzzzzz"))
    assert content_digest([file], index_dir=index) == first


def test_an_index_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"first")
    settle(file)
    (tmp_path / "digests").write_bytes(b"a file where a folder should be")
    assert content_digest([file], index_dir=tmp_path / "digests") == content_digest([file])


def test_a_missing_file_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Cannot read"):
        content_digest([tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1]", "must hold a JSON object, not list"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "acceptable JSON"),
        (b'{"a": "' + b"x" * 10_000 + b'"}', "larger than 10000 bytes"),
    ],
)
def test_a_file_without_a_plain_json_object_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason) as caught:
        read_json(path, limit=10_000 if b"x" in content else 1_000_000)
    assert caught.value.path == str(path)


def test_a_json_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match="not a regular file"):
        read_json(tmp_path)


def test_a_json_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, 2.5, null], "é": {"b": true}}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": [1, 2.5, None], "é": {"b": True}}
