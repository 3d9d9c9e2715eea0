"""`headrace compress`: the folder, its card, what is held out, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.compress.compression import memory_needed
from headrace.compress.recipe import Recipe
from headrace.models.model_folder import open_model

FAST = ("--no-speed", "--window", "64", "--threads", "2", "--calibrate-tokens", "600", "--measure-tokens", "200")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("The old mill stands by the river, and its wheel turns. " * 60)
    return path


def test_the_folder_has_a_card_with_recipe_and_measured_quality(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert main(["compress", str(tiny_folder), str(out), "--calibrate", str(text), *FAST]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if "Weight files" not in line) <= 100
    assert "int4-g128" in shown
    assert "4.16 bits per weight" in shown
    card = (out / "README.md").read_text()
    assert "| method | awq+gptq, 4 bits in groups of 128, asymmetric |" in card
    assert "of notes.txt |" in card
    assert "on a tenth of notes.txt: " in card
    assert "| layers.0.attn.qkv | 4 |" in card
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert main(["generate", str(out), "--prompt", "The old", "--max-tokens", "4", "--no-cache"]) == 0


def test_a_machine_without_the_memory_is_told_before_the_work_begins(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text("The old mill stands by the river, and its wheel turns. " * 1200)
    arguments = ["compress", str(tiny_folder), str(tmp_path / "small"), "--calibrate", str(text), "--no-quality"]
    fits_2048 = memory_needed(open_model(tiny_folder).spec, 2048, 64, Recipe(bits={"layers.0.mlp.up": 4})) / 2**30
    for gibibytes, advice in (
        (fits_2048 * 1.0001, "pass --calibrate-tokens 2048, use a machine"),
        (0.01, "To go on, use a machine"),
    ):
        monkeypatch.setenv("HEADRACE_MEMORY_GIB", str(gibibytes))
        assert main([*arguments, "--window", "64"]) == 1
        error = capsys.readouterr().err
        assert "calibration tokens takes up to" in error
        assert advice in error
        assert not list(tmp_path.glob("small*"))


def test_rounding_to_nearest_measures_on_the_file_that_is_named(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One two", "completion": " three four"}\n' * 3)
    options = ["--method", "rtn", "--bits", "3", "--group", "32", "--symmetric", "--keep", "layers.0.*=8"]
    arguments = ["compress", str(tiny_folder), str(out), "--measure", str(prompts), *options, *FAST]
    assert main([*arguments, "--calibrate", str(text)]) == 0
    assert "prompts.jsonl" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "| calibration | none |" in card
    assert "rtn, 3 and 8 bits in groups of 32, symmetric" in card


def test_a_target_gives_products_bits_by_what_they_cost(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    options = ["--method", "rtn", "--calibrate", str(text), "--no-quality", *FAST]
    size = "1.75MB"
    assert main(["compress", str(tiny_folder), str(out), "--target-size", size, *options]) == 0
    shown = capsys.readouterr().out
    assert "KL at 3 bits" in shown
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert 1.6e6 < written < 1.78e6  # with the header
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) > 1
    assert main(["compress", str(tiny_folder), str(tmp_path / "mean"), "--bits", "4.5", *options]) == 0
    assert "The plan has 4." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "4.5", "--max-kl", "0.1"], "Pass one of --bits, --target-size and --max-kl"),
        (["--target-size", "big"], "Unknown size 'big'"),
        (["--target-size", "1KB"], "is not more than what is kept as it is"),
        (["--method", "nf4", "--max-kl", "1"], "NF4 has 4 bits"),
        (["--max-kl", "0"], "'max_kl' must be greater than 0"),
        (["--method", "magic"], "Unknown method 'magic'. Expected rtn, gptq"),
        (["--bits", "9"], "'bits' must be 2 to 8, not 9"),
        (["--method", "nf4", "--bits", "3"], "NF4 has 4 bits, not 3"),
        (["--method", "fp8", "--bits", "4"], "FP8 has 8 bits, not 4"),
        (["--method", "fp8", "--group", "128"], "FP8 files have a scale per output"),
        (["--method", "fp8+gptq", "--keep", "*.o=4"], "FP8 has 8 bits, and --keep"),
        (["--method", "fp8", "--target-size", "1MB"], "FP8 has 8 bits. Choose another method"),
        (["--group", "48"], "Unknown group '48'"),
        (["--keep", "attn=8"], "--keep pattern 'attn' matches no product"),
        (["--keep", "attn"], "Expected PATTERN=BITS"),
        (["--format", "pickle"], "Unknown format 'pickle'"),
        (["--format", "bitsandbytes"], "does not hold the codes of awq+gptq"),
        (["--calibrate", "missing.txt"], "There is no file missing.txt"),
        (["--pruner", "wanda"], "--pruner is for --sparsity"),
        (["--window", "4"], "'window' must be 16 to"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(tiny_folder), str(tmp_path / "small"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "small").exists()
