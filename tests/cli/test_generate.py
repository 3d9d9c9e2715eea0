"""`headrace generate` as a user types it: text, JSON, flags, and errors in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace._core as _core
from headrace.cli import WRONG_USAGE, main
from headrace.models.model_folder import open_model
from headrace.models.synthetic.random_model import write_random_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def generate(*flags: str) -> dict[str, Any]:
        assert main(["generate", str(tiny_folder), "-p", "The water ran", "-n", "12", "--json", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return generate


def test_text_is_streamed_and_equals_the_json(run: Run, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run()
    assert main(["generate", str(tiny_folder), "--prompt", "The water ran", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == report["text"] + "\n"


def test_the_json_says_what_ran_and_how_long_it_took(run: Run, tiny_folder: Path) -> None:
    report = run("--weights", "int4", "--kv", "int8", "--threads", "1")
    tokenizer = open_model(tiny_folder).tokenizer
    assert report["prompt_tokens"] == tokenizer.encode("The water ran")
    assert report["text"] == tokenizer.decode(report["tokens"])
    assert (report["weights"], report["kv"], report["threads"]) == ("int4-g32", "int8", 1)
    assert report["isa"] in _core.isa_available()
    assert report["finish_reason"] in {"stop", "length"}
    assert min(report["load_s"], report["prefill_s"]) > 0
    assert report["decode_s"] >= 0


def test_the_same_command_gives_the_same_tokens(run: Run) -> None:
    flags = ("--weights", "int8", "--temperature", "3", "--seed", "9")
    assert run(*flags, "--threads", "1")["tokens"] == run(*flags, "--threads", "3")["tokens"]


def test_the_second_start_maps_packed_weights(run: Run) -> None:
    assert [run()["weights_mapped"], run()["weights_mapped"]] == [False, True]
    assert run("--no-cache")["weights_mapped"] is False


def test_ignoring_the_end_of_sequence_gives_the_full_length(run: Run) -> None:
    report = run("--ignore-eos")
    assert (len(report["tokens"]), report["finish_reason"]) == (12, "length")


def test_a_chat_prompt_goes_through_the_template(run: Run, tiny_folder: Path) -> None:
    tokenizer = open_model(tiny_folder).tokenizer
    text = tokenizer.apply_template([{"role": "user", "content": "The water ran"}])
    assert text != "The water ran"
    assert run("--chat")["prompt_tokens"] == tokenizer.encode(text, add_special_tokens=False)


def test_a_dash_reads_the_prompt_from_standard_input(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run()["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("The water ran"))
    assert main(["generate", str(tiny_folder), "-p", "-", "-n", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


def test_groups_and_kept_tensors_are_honoured(run: Run) -> None:
    plain = run("--weights", "int4")
    assert run("--weights", "int4", "--group", "128")["weights"] == "int4-g128"
    kept = run("--weights", "int4", "--keep", "layers.*.attn.o=bf16", "--keep", "layers.*.mlp.down=bf16")
    assert kept["weight_bytes"] > plain["weight_bytes"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--weights", "int5"], "int5"),
        (["--kv", "fp4"], "fp4"),
        (["--group", "48"], "48"),
        (["--keep", "layers.*"], "PATTERN=PRECISION"),
        (["--keep", "nothing.*=bf16"], "nothing"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--seed", "-1"], "seed"),
        (["--threads", "0"], "threads"),
        (["--context", "2"], "context"),
        (["--max-tokens", "many"], "many"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_a_wrong_flag_is_refused_in_words(
    flags: list[str], word: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_folder), "-p", "The water ran", *flags]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert word in captured.err + captured.out
    assert "Traceback" not in captured.err + captured.out


def test_a_missing_model_is_one_line_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nowhere"), "-p", "x"]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_an_encoder_says_that_it_makes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_model("minilm-l6", tmp_path / "encoder")
    assert main(["generate", str(tmp_path / "encoder"), "-p", "x"]) == WRONG_USAGE
    assert "encoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [("", []), ("", ["--chat"]), (" \n", ["--chat"])],
    ids=["text", "message", "blank message"],
)
def test_an_empty_prompt_is_refused(
    prompt: str, flags: list[str], tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_folder), "-p", prompt, *flags]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.err == (
        "headrace: The prompt is empty. Pass a text with --prompt TEXT, or - to read it from standard input.\n"
    )
    assert captured.out == ""
