"""`headrace config`: all mistakes at once, secrets hidden, and a file to begin with that changes nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from headrace.cli import WRONG_USAGE, main
from headrace.cli.config import TEMPLATE
from headrace.config import Config
from headrace.config.loader import OPTIONS
from headrace.server.config_checks import load_config
from headrace.variant import Variant
from tests.support.config_tables import sections_in, tables_in, without_default

EXAMPLE = Path(__file__).parents[2] / "examples" / "gateway.toml"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)


def test_a_fine_file_is_said_to_be_fine(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("server.port = 5\n")
    assert main(["config", "check", "a.toml"]) == 0
    assert capsys.readouterr().out == "a.toml is valid\n"


def test_without_a_file_the_defaults_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert "no file, defaults only" in capsys.readouterr().out


def test_every_mistake_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("headrace.toml").write_text("server.port = 'x'\nlog.level = 1\n")
    assert main(["config", "check"]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert [line.split(": ")[1] for line in captured.out.splitlines()] == ["server.port", "log.level"]
    assert captured.err == "headrace: headrace.toml: 2 mistakes\n"


def test_what_is_in_force_is_shown_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("other.toml").write_text("server.port = 5\nkeys = [{name = 'a', key = 'sk-secret'}]\n")
    monkeypatch.setenv("HEADRACE_CONFIG", "other.toml")
    monkeypatch.setenv("HEADRACE_SERVER_HOST", "::1")
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "sk-secret" not in out
    table = tomllib.loads(out)
    assert (table["server"]["port"], table["server"]["host"], table["keys"][0]["key"]) == (5, "::1", "***")


def test_a_wrong_configuration_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "nowhere.toml"]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "headrace: nowhere.toml: file not found\n"


def test_a_new_file_changes_nothing_and_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init"]) == 0
    path = Path("headrace.toml")
    assert load_config(path, environ={}) == Config()
    path.write_text("server.port = 5\n")
    assert main(["config", "init"]) == WRONG_USAGE
    assert path.read_text() == "server.port = 5\n"
    assert "already exists" in capsys.readouterr().err
    assert main(["config", "init", "b.toml"]) == 0
    assert load_config(Path("b.toml"), environ={}) == Config()


def test_a_file_that_uses_nearly_everything_is_checked_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for name in re.findall(r'^key_env = "(\w+)"', text, re.MULTILINE):
        monkeypatch.setenv(name, f"sk-{name}")
    assert main(["config", "check", str(EXAMPLE), "--file-only"]) == 0
    capsys.readouterr()
    assert main(["config", "check", str(EXAMPLE)]) == WRONG_USAGE  # it names folders of another machine
    wrong = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert wrong == ["models.minilm.path", "models.large.upstream.tokenizer"]
    assert main(["config", "check", str(EXAMPLE), "--file-only"]) == 0
    assert capsys.readouterr().out == f"{EXAMPLE} is valid\n"
    assert main(["config", "show", str(EXAMPLE)]) == 0
    out = capsys.readouterr().out
    assert "sk-" not in out
    Path("shown.toml").write_text(out, encoding="utf-8")
    assert main(["config", "show", "shown.toml"]) == 0
    assert capsys.readouterr().out == out


def test_all_that_is_wrong_with_such_a_file_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("cascade = ", "casade = ").replace('"15m"', '"15 minutes"')
    Path("headrace.toml").write_text(text, encoding="utf-8")
    for name in re.findall(r'^key_env = "(\w+)"', text, re.MULTILINE):
        monkeypatch.setenv(name, f"sk-{name}")
    assert main(["config", "check", "--file-only"]) == WRONG_USAGE
    captured = capsys.readouterr()
    span = 'expected a duration such as 90s, 5m, 1h or 7d, found "15 minutes"'
    assert captured.out.splitlines() == [
        f"headrace.toml: cache.exact.tags.timetable: {span}",
        "headrace.toml: routing.rules[1].casade: unknown key; did you mean cascade?",
    ]
    assert captured.err == "headrace: headrace.toml: 2 mistakes\n"


def uncommented() -> str:
    """The new file with every `#` before a key or a heading taken away."""
    return re.sub(r"^#(?=[a-z\[])", "", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_a_new_file_has_every_key() -> None:
    table = tomllib.loads(uncommented())
    found: dict[type[msgspec.Struct], set[str]] = {}
    for kind, given in tables_in(Config, table):
        found.setdefault(kind, set()).update(given)
    assert found == {kind: set(kind.__struct_fields__) for kind in sections_in(Config)}
    assert set(table["models"]["mini"]["options"]) == set(OPTIONS)


def test_each_key_of_a_new_file_has_its_default_and_its_meaning() -> None:
    table = tomllib.loads(uncommented())
    options = {"model": "", "surfaces": {}} | table["models"]["mini"]["options"]
    for kind, given in [*tables_in(Config, table), (Variant, options)]:
        for field in msgspec.structs.fields(kind):
            if field.name not in given or without_default(field) or list(tables_in(field.type, given[field.name])):
                continue
            assert msgspec.convert(given[field.name], field.type) == field.default, (kind, field.name)
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines():
        if re.match(r"#\w+ = ", line):
            assert re.search(r"  # \S", line), line


def test_what_a_new_file_gives_as_examples_is_fine() -> None:
    # Of these one is to be chosen, and those that are empty stand for nothing.
    left_out = re.compile(
        r'\w*_format = ""|key(_sha256)? =|key_env = "RECORDING_KEY"|text(_file)? =|system_file =|group|'
        r"draft_(model|heads)|kv_disk_(folder|key)|kv_offsets|most_price|"
        r"(split|cascade|chain|opening|calibration|complexity|encoder|openapi|dsn_env|function) ="
    )
    with_url = re.sub(r"\[models\.hosted\.upstream\.managed\]\n(?:.+\n)+", "", uncommented())
    chosen = [line for line in with_url.splitlines() if not left_out.match(line)]
    Path("all.toml").write_text("\n".join(chosen), encoding="utf-8")
    config = load_config(Path("all.toml"), environ={"TEAM_KEY": "sk-1", "UPSTREAM_KEY": "sk-2"})
    assert set(config.models["mini"].options) == set(OPTIONS) - {
        "draft_heads",
        "draft_model",
        "group",
        "kv_disk_folder",
        "kv_disk_key_env",
        "kv_offsets",
    }
    assert config.tenants["acme"].model_limits["mini"].concurrent == 10
    assert config.routing.rules[0].variant == "mini@int4"
