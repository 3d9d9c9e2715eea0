"""GGUF models that are split into several files, as the package gguf writes them: whichever file is named, all are
read, and a file that is missing, another's, or there twice is an error that names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.cli.models import describe
from headrace.errors import ModelError
from headrace.models.formats.shard_names import first_name, model_file, shard_name
from headrace.models.model_folder import find_model, open_model, open_tokenizer
from headrace.models.weight_samples import samples
from tests.models.gguf.gguf_models import write_gguf
from tests.models.gguf.test_gguf_models import build, headrace_logits
from tests.models.tiny_models import prompt, write_tokenizer

PER_FILE = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_tokenizer(folder)
    write_gguf(folder / "tiny.gguf", model, folder / "tokenizer.json")
    return folder / "tiny.gguf"


@pytest.fixture(scope="module")
def written(model: Any, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    write_gguf(folder / "tiny.gguf", model, whole.with_name("tokenizer.json"), split=PER_FILE)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "split"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def test_a_split_model_is_the_model_of_one_file(written: Path, whole: Path) -> None:
    paths = shards(written)
    count = len(paths)
    assert count > 2
    assert paths[1].name == f"tiny-00002-of-{count:05d}.gguf"
    one, several = open_model(whole), open_model(paths[0])
    assert several.spec == one.spec
    assert several.weights.files == tuple(paths)
    assert several.weights.total_bytes == one.weights.total_bytes
    assert several.tokenizer.encode("the fox jumps") == one.tokenizer.encode("the fox jumps")
    tokens = prompt(20)
    np.testing.assert_array_equal(headrace_logits(paths[0], tokens), headrace_logits(whole, tokens))


def test_any_file_or_the_folder_names_the_model(written: Path, whole: Path) -> None:
    paths = shards(written)
    for place in (*paths, written):
        assert open_model(find_model(str(place))).path == paths[0]
        assert open_tokenizer(place, 1 << 16).encode("fox") == open_model(whole).tokenizer.encode("fox")
    assert find_model(str(whole.parent)) == whole


def test_digests_read_each_tensor_in_its_file(written: Path, whole: Path) -> None:
    one, several = open_model(whole).weights, open_model(written).weights
    names = sorted(one.names)
    # What is before the first tensor is of the metadata, which says how the model is split.
    assert list(samples(several, names))[2:] == list(samples(one, names))[2:]


def test_models_says_the_size_of_all_files(written: Path) -> None:
    paths = shards(written)
    found = describe("tiny", paths[0], 0)
    assert found.problem is None
    assert found.bytes == sum(path.stat().st_size for path in paths)


def lose(paths: list[Path]) -> Path:
    paths[1].unlink()
    return paths[1]


def double(paths: list[Path]) -> Path:
    shutil.copy(paths[0], paths[1])
    return paths[1]


def exchange(paths: list[Path]) -> Path:
    spare = paths[1].with_name("spare")
    paths[1].rename(spare)
    paths[2].rename(paths[1])
    spare.rename(paths[2])
    return paths[1]


def rename(paths: list[Path]) -> Path:
    return paths[0].rename(paths[0].with_name("model.gguf"))


def cut(paths: list[Path]) -> Path:
    paths[2].write_bytes(paths[2].read_bytes()[:-64])
    return paths[2]


def clear(paths: list[Path]) -> Path:
    paths[2].write_bytes(b"<html>not found</html>" * 4)
    return paths[2]


def without_keys(paths: list[Path]) -> Path:
    writer = gguf.GGUFWriter(str(paths[1]), "llama")
    writer.add_tensor("x", np.ones(4, np.float32))
    finish(writer)
    return paths[1]


def of_more_tensors(paths: list[Path]) -> Path:
    write_shard(paths[1], 1, len(paths), 1000, "x")
    return paths[1]


def with_a_tensor_twice(paths: list[Path]) -> Path:
    total = len(open_model(paths[0]).weights.names)
    write_shard(paths[1], 1, len(paths), total, "token_embd.weight")
    return paths[1]


def with_fewer_tensors(paths: list[Path]) -> Path:
    total = len(open_model(paths[0]).weights.names)
    write_shard(paths[1], 1, len(paths), total, "x")
    return paths[0]


def of_another_architecture(paths: list[Path]) -> Path:
    total = len(open_model(paths[0]).weights.names)
    write_shard(paths[1], 1, len(paths), total, "x", architecture="qwen2")
    return paths[1]


def write_shard(path: Path, number: int, count: int, total: int, tensor: str, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
    writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, count)
    writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, total)
    writer.add_tensor(tensor, np.ones(4, np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lose, "The file is missing: the model is split into"),
        (double, "Key 'split.no': Found 0. Expected 1 by the file's name"),
        (exchange, "Key 'split.no': Found 2. Expected 1"),
        (rename, r"Key 'split.count': .* Rename the file as it was: its name ended in -00001-of-0000\d.gguf"),
        (cut, "past the end of the file"),
        (clear, "does not start with 'GGUF'"),
        (without_keys, "Key 'split.count': Found 1"),
        (of_more_tensors, "Key 'split.tensors.count': Found 1000. .* the files are of two models"),
        (with_a_tensor_twice, "The tensor is also in tiny-00001-of"),
        (with_fewer_tensors, r"Key 'split.tensors.count': Found \d+, but its \d files have \d+ tensors"),
        (of_another_architecture, "Key 'general.architecture': Found 'qwen2': tiny-00001-of"),
    ],
)
def test_a_file_that_has_no_place_in_the_model_is_named(
    folder: Path, damage: Callable[[list[Path]], Path], reason: str
) -> None:
    paths = shards(folder)
    guilty = damage(paths)
    with pytest.raises(ModelError, match=reason) as caught:
        open_model(guilty if damage is rename else folder)
    assert caught.value.path == str(guilty)


def test_the_first_file_lost_is_named_too(folder: Path) -> None:
    paths = shards(folder)
    paths[0].unlink()
    with pytest.raises(ModelError, match="The file is missing") as caught:
        open_model(folder)
    assert caught.value.path == str(paths[0])


def test_a_folder_of_several_models_needs_a_choice(folder: Path) -> None:
    (folder / "mmproj-tiny-f16.gguf").write_bytes(b"GGUF")
    assert model_file(folder) == shards(folder)[1]
    shutil.copy(shards(folder)[1], folder / "other.gguf")
    with pytest.raises(ModelError, match=r"several GGUF models. Pass one of them: other.gguf, tiny-00001-of"):
        open_model(folder)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a-00003-of-00003.gguf", "a-00001-of-00003.gguf"),
        ("Q4/a-00002-of-00012.gguf", "Q4/a-00001-of-00012.gguf"),
        ("a-00001-of-00001.gguf", "a-00001-of-00001.gguf"),
        ("a-00004-of-00003.gguf", "a-00004-of-00003.gguf"),
        ("a-00000-of-00003.gguf", "a-00000-of-00003.gguf"),
        ("a-2-of-3.gguf", "a-2-of-3.gguf"),
        ("a.gguf", "a.gguf"),
    ],
)
def test_names(name: str, first: str) -> None:
    assert first_name(name) == first
    assert (shard_name(name) is None) == (name == first)
