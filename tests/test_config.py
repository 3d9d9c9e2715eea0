"""The configuration: what comes before what, mistakes that name their place, secrets hidden, every key documented."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.config import (
    PLAIN_SECTIONS,
    Config,
    ConfigError,
    KeyConfig,
    Log,
    ModelConfig,
    Server,
    SurfaceConfig,
    digest_of,
    variants_of,
)
from millrace.config_file import OPTIONS, load, variable_of
from millrace.config_text import shown, toml_value
from millrace.engine.policy import SURFACES
from millrace.engine.variant import Variant

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, flags: dict[str, Any] | None = None, **environ: str) -> Config:
    Path("millrace.toml").write_text(text, encoding="utf-8")
    return load(environ=environ, flags=flags)


def mistakes(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read(text, **environ)
    return [str(mistake) for mistake in raised.value.mistakes]


def test_without_a_file_everything_has_its_default() -> None:
    assert load(environ={}) == Config()


def test_flags_go_before_the_environment_before_the_file_before_defaults() -> None:
    text = "[server]\nport = 1\nconnections = 2\nbody_bytes = 3\n"
    config = read(
        text,
        {"server.port": 10, "server.host": None},
        MILLRACE_SERVER_PORT="20",
        MILLRACE_SERVER_CONNECTIONS="21",
    )
    assert config.server == Server(port=10, connections=21, body_bytes=3)


def test_a_flag_replaces_a_whole_table_of_the_top_level() -> None:
    config = read("[models.a]\n", {"models": {"b": {"replicas": 2}}, "default_model": "b"})
    assert config.models == {"b": ModelConfig(replicas=2)}


def test_a_file_is_named_by_the_caller_or_by_the_environment(tmp_path: Path) -> None:
    for port in (1, 2, 3):
        (tmp_path / f"{port}.toml").write_text(f"server.port = {port}\n")
    Path("millrace.toml").write_text("server.port = 4\n")
    assert load(tmp_path / "1.toml", environ={"MILLRACE_CONFIG": "2.toml"}).server.port == 1
    assert load(environ={"MILLRACE_CONFIG": "2.toml"}).server.port == 2
    assert load(environ={}).server.port == 4


def test_the_environment_sets_every_kind_of_key() -> None:
    config = load(
        environ={
            "MILLRACE_SERVER_IDLE_S": "2.5",
            "MILLRACE_SERVER_HEADER_S": "3",
            "MILLRACE_SERVER_DOCS": "false",
            "MILLRACE_SERVER_CORS_ORIGINS": "https://a.example, http://b.example:80",
            "MILLRACE_LIMITS_STOP": "4",
            "MILLRACE_STORAGE_FOLDER": "here",
            "MILLRACE_LOG_FORMAT": "json",
        }
    )
    assert config.server == Server(
        idle_s=2.5, header_s=3.0, docs=False, cors_origins=("https://a.example", "http://b.example:80")
    )
    assert (config.limits.stop, config.storage.folder, config.log) == (4, "here", Log(format="json"))


def test_every_plain_key_has_a_variable() -> None:
    config = Config()
    environ: dict[str, str] = {}
    for section, kind in PLAIN_SECTIONS.items():
        for field in msgspec.structs.fields(kind):
            value = getattr(getattr(config, section), field.name)
            environ[variable_of(section, field.name)] = "" if value == () else str(value)
    assert load(environ=environ) == config
    assert "MILLRACE_SERVER_PORT" in environ


def test_names_within_texts_come_from_the_environment() -> None:
    config = read(
        """
        default_model = "${M}"
        server.port = "${PORT:-9}"
        server.docs = "${DOCS}"
        storage.folder = "/${A}/${B:-b}/${EMPTY:-c}/$${A}"
        [models.m]
        options = {threads = "${THREADS:-3}", keep = ["${K}=bf16"]}
        """,
        M="m",
        DOCS="false",
        A="a",
        EMPTY="",
        K="head",
    )
    assert config.default_model == "m"
    assert (config.server.port, config.server.docs) == (9, False)
    assert config.storage.folder == "/a/b/c/${A}"
    assert config.models["m"].options == {"threads": 3, "keep": ("head=bf16",)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('server.port = "abc"', 'server.port: expected an integer from 0 to 65535, found "abc"'),
        ("server.port = 65536", "server.port: expected an integer from 0 to 65535, found 65536"),
        ("server.port = true", "server.port: expected an integer from 0 to 65535, found true"),
        ("server.connections = 0", "server.connections: expected an integer of at least 1, found 0"),
        ("server.idle_s = inf", "server.idle_s: expected a finite number above 0, found inf"),
        ("server.idle_s = nan", "server.idle_s: expected a finite number above 0, found nan"),
        ("server.host = ''", 'server.host: expected a text that is not empty, found ""'),
        ("server.docs = 1", "server.docs: expected true or false, found 1"),
        ("server = 5", "server: expected a table, found an integer"),
        ("server.prot = 5", "server.prot: there is no such key; did you mean port?"),
        ("server.cors_origins = 'x'", 'server.cors_origins: expected a list, found "x"'),
        ("server.cors_origins = ['*', 1]", "server.cors_origins[1]: expected a text, found 1"),
        ("log.level = 'loud'", 'log.level: expected one of "debug", "info", "warning", "error", found "loud"'),
        ("log.zzz = 1", "log.zzz: there is no such key; there are format, level, requests"),
        ("models.mini.replicas = 65", "models.mini.replicas: expected an integer from 1 to 64, found 65"),
        ('models."a.b".max_tokens = 0', 'models."a.b".max_tokens: expected an integer of at least 1, found 0'),
        ("keys = [{key='x'}]", "keys[0]: name is missing"),
        ("keys = ['x']", "keys[0]: expected a table, found a text"),
        ("keys = [{name='a', key=123456}]", "keys[0].key: expected a text that is not empty, found an integer"),
        ("storage.folder = '${NOT_SET}'", "storage.folder: the environment variable NOT_SET is not set"),
        (
            "storage.folder = '${not-a-name}'",
            "storage.folder: expected ${NAME} or ${NAME:-default}; a $${ stands for itself, without the first $",
        ),
        ("server.port = '${X:-y}'", 'server.port: expected an integer from 0 to 65535, found "y"'),
        ("[server\nport = 1", "line 1, column 8: Expected ']' at the end of a table declaration"),
        ("a = '", 'Expected "\'"'),
        (
            "models.mini.options.weight = 'int4'",
            "models.mini.options.weight: there is no such key; did you mean weights?",
        ),
        ("models.mini.options.threads = 'x'", 'models.mini.options.threads: expected an integer, found "x"'),
        ("models.mini.variants.a.threads = 1.5", "models.mini.variants.a.threads: expected an integer, found 1.5"),
    ],
)
def test_a_mistake_says_where_what_was_expected_and_what_was_found(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith("millrace.toml: ")
    assert said in mistake


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models]", "models: expected at least one model"),
        ("default_model = 'x'", 'default_model: expected one of the models, "mini", found "x"'),
        ("[models.'a@b']", 'models."a@b": expected a model\'s name'),
        ("models.mini.aliases = ['a', 'a']", 'models.mini.aliases[1]: "a" is an alias of "mini" already'),
        ("models.a.aliases = ['b']\nmodels.b = {}", 'models.a.aliases[0]: "b" is the model "b" already'),
        (
            "models.a = {aliases = ['a@x'], variants.x = {}}",
            'models.a.aliases[0]: "a@x" is a variant of the model "a" already',
        ),
        ("models.a.aliases = ['a b']", "models.a.aliases[0]: expected a name"),
        ("models.a.variants.'x y' = {}", 'models.a.variants."x y": expected a name'),
        ("models.a.surface = 'phone'", 'models.a.surface: there is no surface "phone"; there are chat, voice'),
        ("surfaces.phone = {}", 'surfaces.phone: there is no surface "phone"'),
        ("models.a.options.weights = 'int3'", "models.a.options.weights: unknown precision 'int3'"),
        ("models.a.variants.x.kv = 'f8'", "models.a.variants.x.kv: unknown KV type 'f8'"),
        ("models.a.options.speculation = 'x'", "models.a.options.speculation: speculation is one of"),
        ("models.a = {options.kv = 'f8', variants.x = {}}", "models.a.options.kv: unknown KV type 'f8'"),
        ("models.a.options.max_rows = 0", "models.a.options.max_rows: max_rows must be at least 1, not 0"),
        ("keys = [{name='a', key='x'}, {name='a', key='y'}]", 'keys[1].name: "a" is the name of keys[0] already'),
        ("keys = [{name='a', key='x'}, {name='b', key='x'}]", "keys[1]: this is the same secret as that of keys[0]"),
        ("keys = [{name='a'}]", "keys[0]: expected exactly one of key, key_env and key_sha256, found none"),
        (
            "keys = [{name='a', key='x', key_env='X'}]",
            "keys[0]: expected exactly one of key, key_env and key_sha256, found key and key_env",
        ),
        ("keys = [{name='a', key_env='X'}]", "keys[0].key_env: the environment variable X is not set, or empty"),
        ("keys = [{name='a', key_sha256='12'}]", "keys[0].key_sha256: expected 64 hexadecimal digits"),
        ("keys = [{name='a', key='x y'}]", "keys[0].key: expected ASCII characters without spaces"),
        ("keys = [{name='a', key='***'}]", 'keys[0].key: "***" is what is shown in place of a secret'),
        ("keys = [{name='a', key='x', surface='s'}]", 'keys[0].surface: there is no surface "s"'),
        (
            "storage.files_bytes = 5\nstorage.file_bytes = 6",
            "storage.files_bytes: expected at least storage.file_bytes, 6, found 5",
        ),
        ("server.cors_origins = ['https://a.example/']", "server.cors_origins[0]: expected"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(f"millrace.toml: {said}")


def test_all_mistakes_are_told_at_once() -> None:
    found = mistakes("server.port = -1\n[modles]\n[log]\nlevel = 5\n", MILLRACE_LIMITS_STOP="many")
    assert len(found) == 4
    assert "modles: there is no such key; did you mean models?" in found[1]
    assert found[3] == 'MILLRACE_LIMITS_STOP: limits.stop: expected an integer from 1 to 64, found "many"'


def test_a_mistake_of_the_environment_names_the_variable() -> None:
    assert mistakes("", MILLRACE_SERVER_PORT="-1") == [
        'MILLRACE_SERVER_PORT: server.port: expected an integer from 0 to 65535, found "-1"'
    ]
    assert mistakes("", MILLRACE_SERVER_PROT="1") == [
        "MILLRACE_SERVER_PROT: there is no such variable; did you mean MILLRACE_SERVER_PORT?"
    ]
    assert mistakes("", MILLRACE_STORAGE_FILES_BYTES="1")[0].startswith("MILLRACE_STORAGE_FILES_BYTES: storage.")


def test_a_mistake_of_a_flag_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^flag: server\.port: expected an integer"):
        load(environ={}, flags={"server.port": 70_000})


def test_an_error_knows_its_file_and_its_place() -> None:
    with pytest.raises(ConfigError) as raised:
        read("models.mini.replicas = 0")
    assert (raised.value.path, raised.value.where) == (Path("millrace.toml"), "models.mini.replicas")
    assert str(raised.value).startswith("millrace.toml: models.mini.replicas: expected")
    assert (str(ConfigError("no key")), ConfigError("no key").where) == ("no key", "")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no such file"), (b"a = '\xff'", "expected UTF-8"), (b"a = " + b"[" * 5000, "nested too deeply")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "other.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"other.toml: .*{said}"):
        load(path, environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, environ={})


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert read("\ufeffserver.port = 5").server.port == 5


def test_no_secret_is_shown() -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    config = read(
        f"keys = [{{name='a', key='sk-1'}}, {{name='b', key_sha256='{digest}'}}, {{name='c', key_env='C'}}]", C="sk-2"
    )
    text = shown(config)
    assert "sk-1" not in text
    assert "sk-2" not in text
    assert digest not in text
    keys = tomllib.loads(text)["keys"]
    assert [key["name"] for key in keys] == ["a", "b", "c"]
    assert (keys[0]["key"], keys[1]["key_sha256"], keys[2]["key_env"]) == ("***", "***", "C")


def test_what_is_shown_reads_back_the_same() -> None:
    config = read(
        r"""
        default_model = "b.c/d"
        surfaces.voice = {ttft_ms = 250, weight = 2.5}
        keys = [{name = "é \" \\ \u007f \n", key_env = "K"}]
        server.cors_origins = ["*"]
        storage.folder = "$${HOME}/x"
        [models.a]
        variants = {x = {}, "y.z" = {weights = "int4", public_prefixes = [[1, 2], [3]]}}
        [models."b.c/d"]
        path = "/models/b"
        aliases = ["gpt-4o"]
        max_tokens = 5
        options = {cache = false, group = 64, weights = "int8", keep = ["a=bf16"]}
        """,
        K="k",
    )
    assert read(shown(config), K="k") == config
    assert read(shown(Config())) == Config()


def test_each_model_has_a_variant_for_its_options_and_one_for_each_name() -> None:
    model = ModelConfig(options={"weights": "int8", "kv": "int8"}, variants={"int4": {"weights": "int4"}})
    variants = variants_of("mini", model, {"voice": SurfaceConfig(ttft_ms=250, weight=3, deadline_ms=9)})
    assert list(variants) == ["mini", "mini@int4"]
    assert [variant.name for variant in variants.values()] == ["int8/kv-int8", "int4/kv-int8"]
    for variant in variants.values():
        assert variant.model == "mini"
        assert {name: (s.ttft, s.itl, s.weight, s.patience) for name, s in variant.surfaces.items()} == {
            "voice": (0.25, None, 3, None)
        }
    assert variants_of("m", ModelConfig(path="/x"), {}) == {"m": Variant(model="/x")}


def test_a_key_is_known_by_its_digest_wherever_its_secret_is() -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    assert digest_of(KeyConfig(name="a", key="sk-1"), {}) == digest
    assert digest_of(KeyConfig(name="a", key_env="K"), {"K": "sk-1"}) == digest
    assert digest_of(KeyConfig(name="a", key_sha256=digest.upper()), {}) == digest


# The documentation

ROW = re.compile(r"^\| `(\w+)` \|.*\| (.*?) \|$", re.MULTILINE)
DOCUMENTED: dict[str, type[msgspec.Struct]] = {
    "Top level": Config,
    "`[models.NAME]`": ModelConfig,
    "`[models.NAME.options]`": Variant,
    "`[surfaces.NAME]`": SurfaceConfig,
    "`[[keys]]`": KeyConfig,
    **{f"`[{name}]`": kind for name, kind in PLAIN_SECTIONS.items()},
}


def documented(heading: str) -> dict[str, str]:
    """Each key of a section of docs/configuration.md with what stands for its default."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    _, found, after = text.partition(f"# {heading}\n")
    assert found
    return dict(ROW.findall(re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]))


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_every_key_is_documented_with_its_default(heading: str) -> None:
    kind = DOCUMENTED[heading]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if kind is Variant:
        fields = {name: field for name, field in fields.items() if name in OPTIONS}
    rows = documented(heading)
    assert list(rows) == list(fields)
    for name, field in fields.items():
        if field.default in (None, msgspec.NODEFAULT) or isinstance(field.default, msgspec.Struct):
            assert not rows[name].startswith("`") or name in ("models", "keys")
        else:
            assert rows[name].startswith(f"`{toml_value(field.default)}`"), name


def test_every_section_is_documented() -> None:
    assert set(Config.__struct_fields__) - {"default_model"} <= {
        re.sub(r"\W|NAME.*", "", heading) for heading in DOCUMENTED
    }


def test_the_documented_surfaces_have_the_engines_numbers() -> None:
    rows = documented("`[surfaces.NAME]`")
    order = [SURFACES[name] for name in ("chat", "voice", "agent", "embedded", "batch")]

    def spelled(values: list[float], scale: float) -> str:
        return ", ".join("none" if value == float("inf") else f"{value * scale:g}" for value in values)

    assert rows["ttft_ms"] == spelled([surface.ttft for surface in order], 1e3)
    assert rows["itl_ms"] == spelled([surface.itl for surface in order], 1e3)
    assert rows["weight"] == spelled([surface.weight for surface in order], 1)
    assert rows["patience_s"] == spelled([surface.patience for surface in order], 1)


def test_the_example_of_the_documentation_is_fine() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    config = read(example, MOBILE_KEY="sk-1")
    assert config.models["assistant"].path == "/srv/models/assistant"
