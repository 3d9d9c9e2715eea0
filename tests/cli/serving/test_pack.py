"""`headrace pack`: one line for each model, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import FAILED, WRONG_USAGE, main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_is_packed_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pack", "draft", "--weights", "int4", "--check"])
    assert ended.value.code == 1
    assert main(["pack", "draft", "--weights", "int4", "--threads", "1"]) == 0
    assert main(["pack", "draft", "--weights", "int4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" at int4-g32: ")[2].partition(",")[0] for line in lines] == [
        *("not packed", "packed", "packed before")
    ]
    assert all(str(cache / "packed") in line for line in lines)
    assert main(["pack", "draft", "--weights", "int4", "--check", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["model"], found["state"]) == ("draft", "there")


def test_all_of_a_configuration_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "headrace.toml").write_text(
        """
        [models.small]
        path = "draft"
        options = { weights = "int4" }
        variants.exact = { weights = "int8" }
        [models.far]
        upstream = { url = "http://127.0.0.1:9/v1" }
        """
    )
    assert main(["pack", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["model"], each["weights"], each["state"]) for each in found] == [
        ("draft", "int4-g32", "packed"),
        ("draft", "int8-g128", "packed"),
    ]


@pytest.mark.parametrize(
    ("arguments", "cache_folder", "code", "expected"),
    [
        (["no-such-model"], None, WRONG_USAGE, "Unknown model 'no-such-model'"),
        (["draft", "--weights", "int5"], None, WRONG_USAGE, "Unknown precision 'int5'"),
        (["draft", "--threads", "0"], None, WRONG_USAGE, "--threads must be at least 1, not 0."),
        (["draft", "--config", "a.toml"], None, WRONG_USAGE, "Name a model or pass --config, not both."),
        (["draft"], "/proc/none", FAILED, "Cannot write to the cache folder /proc/none"),
    ],
)
def test_mistakes_are_errors(
    arguments: list[str],
    cache_folder: str | None,
    code: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cache_folder is not None:
        monkeypatch.setenv("HEADRACE_CACHE", cache_folder)
    assert main(["pack", *arguments]) == code
    assert expected in capsys.readouterr().err
