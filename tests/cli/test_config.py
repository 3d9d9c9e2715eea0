"""`millrace config`: all mistakes at once, secrets hidden, and a file to begin with that changes nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.cli import REFUSED, main
from millrace.cli.config import TEMPLATE
from millrace.config import Config, KeyConfig, ModelConfig, SurfaceConfig
from millrace.config_file import OPTIONS, load
from millrace.engine.variant import Variant


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_CONFIG", raising=False)


def test_a_fine_file_is_said_to_be_fine(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("server.port = 5\n")
    assert main(["config", "check", "a.toml"]) == 0
    assert capsys.readouterr().out == "a.toml is fine\n"


def test_without_a_file_the_defaults_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert "There is no file" in capsys.readouterr().out


def test_every_mistake_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("millrace.toml").write_text("server.port = 'x'\nlog.level = 1\n")
    assert main(["config", "check"]) == REFUSED
    captured = capsys.readouterr()
    assert [line.split(": ")[1] for line in captured.out.splitlines()] == ["server.port", "log.level"]
    assert captured.err == "millrace: millrace.toml: 2 mistakes\n"


def test_what_is_in_force_is_shown_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("other.toml").write_text("server.port = 5\nkeys = [{name = 'a', key = 'sk-secret'}]\n")
    monkeypatch.setenv("MILLRACE_CONFIG", "other.toml")
    monkeypatch.setenv("MILLRACE_SERVER_HOST", "::1")
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "sk-secret" not in out
    table = tomllib.loads(out)
    assert (table["server"]["port"], table["server"]["host"], table["keys"][0]["key"]) == (5, "::1", "***")


def test_a_wrong_configuration_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nowhere.toml"]) == REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "millrace: nowhere.toml: there is no such file\n"


def test_a_new_file_changes_nothing_and_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init"]) == 0
    path = Path("millrace.toml")
    assert load(path, environ={}) == Config()
    path.write_text("server.port = 5\n")
    assert main(["config", "init"]) == REFUSED
    assert path.read_text() == "server.port = 5\n"
    assert "stays" in capsys.readouterr().err
    assert main(["config", "init", "b.toml"]) == 0
    assert load(Path("b.toml"), environ={}) == Config()


def uncommented() -> dict[str, Any]:
    """The new file with every `#` before a key or a heading taken away."""
    return tomllib.loads(re.sub(r"^#(?=[a-z\[])", "", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_a_new_file_has_every_key_with_its_default_and_its_meaning() -> None:
    table = uncommented()
    assert set(table) | {"models", "surfaces", "keys"} == set(Config.__struct_fields__)
    sections: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
        (ModelConfig, table["models"]["mini"]),
        (Variant, {"model": "", "surfaces": {}} | table["models"]["mini"]["options"]),
        (SurfaceConfig, table["surfaces"]["chat"]),
        (KeyConfig, table["keys"][0]),
        *((type(value), table[name]) for name, value in msgspec.structs.asdict(Config()).items() if name in PLAIN),
    ]
    assert len(sections) == 8
    for kind, given in sections:
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        assert set(given) == set(fields)
        for name, field in fields.items():
            if field.default not in (None, msgspec.NODEFAULT) and not isinstance(given[name], dict):
                assert msgspec.convert(given[name], field.type) == field.default, name
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines():
        if re.match(r"#\w+ = ", line) and "variants" not in line and line != '#weights = "int4"':
            assert re.search(r"  # \S", line), line


PLAIN = ("server", "limits", "storage", "log")


def test_what_a_new_file_gives_as_examples_is_fine() -> None:
    text = re.sub(r"^#(?=[a-z\[])", "", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    # Of these one is to be chosen, and those that are empty stand for nothing.
    chosen = [
        line for line in text.splitlines() if not re.match(r'\w*_format = ""|key(_sha256)? =|draft_model|group', line)
    ]
    Path("all.toml").write_text("\n".join(chosen), encoding="utf-8")
    config = load(Path("all.toml"), environ={"TEAM_KEY": "sk-1"})
    assert set(config.models["mini"].options) == set(OPTIONS) - {"draft_model", "group"}
