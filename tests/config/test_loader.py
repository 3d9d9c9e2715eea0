"""Reading the configuration: what comes before what, mistakes that name their place, secrets hidden."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from headrace.config import (
    PLAIN_SECTIONS,
    Config,
    ConfigError,
    KeyConfig,
    LogConfig,
    ModelConfig,
    ServerConfig,
    SurfaceConfig,
    digest_of,
    variants_of,
)
from headrace.config.limit_section import LimitSet
from headrace.config.loader import variable_of
from headrace.config.tenant_section import BudgetConfig
from headrace.config.toml_text import config_toml
from headrace.server.config_checks import load_config
from headrace.variant import Variant
from tests.support.config_text import mistakes, read


def test_without_a_file_everything_has_its_default() -> None:
    assert load_config(environ={}) == Config()


def test_flags_go_before_the_environment_before_the_file_before_defaults() -> None:
    text = "[server]\nport = 1\nconnections = 2\nbody_bytes = 3\n"
    config = read(
        text,
        {"server.port": 10, "server.host": None},
        HEADRACE_SERVER_PORT="20",
        HEADRACE_SERVER_CONNECTIONS="21",
    )
    assert config.server == ServerConfig(port=10, connections=21, body_bytes=3)


def test_a_flag_replaces_a_whole_table_of_the_top_level() -> None:
    config = read("[models.a]\n", {"models": {"b": {"replicas": 2}}, "default_model": "b"})
    assert config.models == {"b": ModelConfig(replicas=2)}


def test_a_file_is_named_by_the_caller_or_by_the_environment(tmp_path: Path) -> None:
    for port in (1, 2, 3):
        (tmp_path / f"{port}.toml").write_text(f"server.port = {port}\n")
    Path("headrace.toml").write_text("server.port = 4\n")
    assert load_config(tmp_path / "1.toml", environ={"HEADRACE_CONFIG": "2.toml"}).server.port == 1
    assert load_config(environ={"HEADRACE_CONFIG": "2.toml"}).server.port == 2
    assert load_config(environ={}).server.port == 4


def test_the_environment_sets_every_kind_of_key() -> None:
    config = load_config(
        environ={
            "HEADRACE_SERVER_IDLE_S": "2.5",
            "HEADRACE_SERVER_HEADER_S": "3",
            "HEADRACE_SERVER_DOCS": "false",
            "HEADRACE_SERVER_CORS_ORIGINS": "https://a.example, http://b.example:80",
            "HEADRACE_LIMITS_STOP": "4",
            "HEADRACE_STORAGE_FOLDER": "here",
            "HEADRACE_LOG_FORMAT": "json",
        }
    )
    assert config.server == ServerConfig(
        idle_s=2.5, header_s=3.0, docs=False, cors_origins=("https://a.example", "http://b.example:80")
    )
    assert (config.limits.stop, config.storage.folder, config.log) == (4, "here", LogConfig(format="json"))


def test_every_plain_key_has_a_variable() -> None:
    config = Config()
    environ: dict[str, str] = {}
    none: list[tuple[str, str]] = []
    for section, kind in PLAIN_SECTIONS.items():
        for field in msgspec.structs.fields(kind):
            value = getattr(getattr(config, section), field.name)
            if value is None:
                none.append((section, field.name))
            else:
                environ[variable_of(section, field.name)] = "" if value == () else str(value)
    assert load_config(environ=environ) == config
    assert "HEADRACE_SERVER_PORT" in environ
    # What is none by default has no spelling in the environment, but it can be set there.
    config = load_config(environ={variable_of(*key): str(number) for number, key in enumerate(none, 7)})
    assert ("limiting", "redis_env") in none
    for number, (section, name) in enumerate(none, 7):  # no two ports are the same
        assert getattr(getattr(config, section), name) in (number, str(number))


def test_a_variable_that_a_key_points_to_may_have_any_name() -> None:
    assert load_config(environ={"HEADRACE_LEDGER_DSN": "postgres://x"}) == Config()
    pointing = {"HEADRACE_LEDGER_WEBHOOK_URL_ENV": "HEADRACE_LOG_WEBHOOK", "HEADRACE_LOG_WEBHOOK": "https://x.example"}
    assert load_config(environ=pointing).ledger.webhook_url_env == "HEADRACE_LOG_WEBHOOK"
    config = read("keys = [{name = 'a', key_env = 'HEADRACE_SERVER_KEY'}]", HEADRACE_SERVER_KEY="sk-1")
    assert config.keys[0].key_env == "HEADRACE_SERVER_KEY"
    assert mistakes("", HEADRACE_SERVER_KEY="sk-1")[0].startswith("HEADRACE_SERVER_KEY: unknown variable")


def test_tables_within_tables_are_read() -> None:
    config = read(
        """
        [tenants.acme]
        weight = 2
        models = ["mini"]
        limits.concurrent = 3
        model_limits."mini" = {context = 4096}
        surface_limits = {voice = {requests_per_s = "${RATE}"}}
        caches.exact = "record"
        [[tenants.acme.budgets]]
        limit_micros = 5
        period = "day"
        alerts = [10, 20]
        [[tenants.acme.budgets]]
        limit_micros = 6
        period = "month"
        [models.mini]
        [models.far.upstream]
        url = "http://127.0.0.1:1/v1"
        timeouts.first_s = 3
        takes.grammars = ["regex"]
        [models.far.upstreams.spare]
        url = "http://127.0.0.1:2/v1"
        [surfaces.voice.ladder]
        steps = [{step = "trim", queue_ms = [300, 150.5]}]
        """,
        RATE="9",
    )
    acme = config.tenants["acme"]
    assert (acme.weight, acme.models, acme.surfaces, acme.caches.exact) == (2.0, ("mini",), None, "record")
    assert (acme.limits, acme.model_limits) == (LimitSet(concurrent=3), {"mini": LimitSet(context=4096)})
    assert acme.surface_limits == {"voice": LimitSet(requests_per_s=9)}
    assert acme.budgets == (
        BudgetConfig(limit_micros=5, period="day", alerts=(10, 20)),
        BudgetConfig(limit_micros=6, period="month"),
    )
    assert config.models["mini"].upstream is None
    far = config.models["far"].upstream
    assert far is not None
    assert (far.timeouts.first_s, far.timeouts.chunk_s, far.takes.grammars) == (3.0, 20.0, ("regex",))
    assert config.models["far"].upstreams["spare"].url == "http://127.0.0.1:2/v1"
    (step,) = config.surfaces["voice"].ladder.steps
    assert (step.queue_ms, step.slack_ms) == ((300.0, 150.5), None)


def test_names_within_texts_come_from_the_environment() -> None:
    config = read(
        """
        default_model = "${M}"
        server.port = "${PORT:-9}"
        server.docs = "${DOCS}"
        storage.folder = "/${A}/${B:-b}/${EMPTY:-c}/$${A}$${A${A}"
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
    assert config.storage.folder == "/a/b/c/${A}${Aa"
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
        ("server.host = ''", 'server.host: expected a non-empty string, found ""'),
        ("server.docs = 1", "server.docs: expected true or false, found 1"),
        ("server = 5", "server: expected a table, found an integer"),
        ("server.prot = 5", "server.prot: unknown key; did you mean port?"),
        ("server.cors_origins = 'x'", 'server.cors_origins: expected a list, found "x"'),
        ("server.cors_origins = ['*', 1]", "server.cors_origins[1]: expected a string, found 1"),
        ("log.level = 'loud'", 'log.level: expected one of "debug", "info", "warning", "error", found "loud"'),
        ("models.mini.context = 9", "models.mini.context: unknown key; did you mean models.mini.options.context?"),
        ("log.zzz = 1", "log.zzz: unknown key; known keys: format, level, requests"),
        ("models.mini.replicas = 65", "models.mini.replicas: expected an integer from 1 to 64, found 65"),
        ('models."a.b".max_tokens = 0', 'models."a.b".max_tokens: expected an integer of at least 1, found 0'),
        ("keys = [{key='x'}]", "keys[0]: missing required key name"),
        ("keys = ['x']", "keys[0]: expected a table, found a string"),
        ("keys = [{name='a', key=123456}]", "keys[0].key: expected a non-empty string, found an integer"),
        ("storage.folder = '${NOT_SET}'", "storage.folder: the environment variable NOT_SET is not set"),
        (
            "storage.folder = '${not-a-name}'",
            "storage.folder: expected ${NAME} or ${NAME:-default}; write $${ for a literal ${",
        ),
        ("server.port = '${X:-y}'", 'server.port: expected an integer from 0 to 65535, found "y"'),
        ("[server\nport = 1", "line 1, column 8: Expected ']' at the end of a table declaration"),
        ("a = '", 'Expected "\'"'),
        (
            "models.mini.options.weight = 'int4'",
            "models.mini.options.weight: unknown key; did you mean weights?",
        ),
        ("models.mini.options.threads = 'x'", 'models.mini.options.threads: expected an integer, found "x"'),
        ("models.mini.variants.a.threads = 1.5", "models.mini.variants.a.threads: expected an integer, found 1.5"),
        ("models.mini.options.group = []", "models.mini.options.group: expected a string or an integer, found a list"),
        (
            "cache.exact.ttl = '5x'",
            'cache.exact.ttl: expected a duration such as 90s, 5m, 1h or 7d, found "5x"',
        ),
        (
            "cache.semantic.tags.'a b' = 5",
            'cache.semantic.tags."a b": expected a duration such as 90s, 5m, 1h or 7d, found 5',
        ),
        ("cache.exact.stale = ''", 'cache.exact.stale: expected a duration such as 90s, 5m, 1h or 7d, found ""'),
        ("cache.semantic.delta = 1", "cache.semantic.delta: expected a finite number above 0 and below 1, found 1"),
        ("cache.semantic.floor = -2", "cache.semantic.floor: expected a finite number from -1 to 1, found -2"),
        ("profiles.fast.top_p = 0", "profiles.fast.top_p: expected a finite number above 0 and at most 1, found 0"),
        ("cache.exact.events.e = 'tag'", 'cache.exact.events.e: expected a list, found "tag"'),
        ("tenants = []", "tenants: expected a table, found a list"),
        ("tenants.a.fail = 'shut'", 'tenants.a.fail: expected one of "open", "closed", found "shut"'),
        ("tenants.a.limit = {}", "tenants.a.limit: unknown key; did you mean limits?"),
        (
            "tenants.a.model_limits.mini.concurrent = 0",
            "tenants.a.model_limits.mini.concurrent: expected an integer of at least 1, found 0",
        ),
        ("tenants.a.budgets = [{period='day'}]", "tenants.a.budgets[0]: missing required key limit_micros"),
        (
            "tenants.a.budgets = [{period='day', limit_micros=1, alerts=[50, 0]}]",
            "tenants.a.budgets[0].alerts[1]: expected an integer from 1 to 1000, found 0",
        ),
        ("prices.mini.input = 1e7", "prices.mini.input: expected a finite number from 0 to 1000000, found 10000000.0"),
        (
            "surfaces.chat.ladder.steps = [{step='trim', queue_ms=[1, 'a']}]",
            'surfaces.chat.ladder.steps[0].queue_ms[1]: expected a finite number, found "a"',
        ),
        (
            "surfaces.chat.ladder.steps = [{step='trim', memory_free=0.1}]",
            "surfaces.chat.ladder.steps[0].memory_free: expected a list, found 0.1",
        ),
        ("routing.rules = [{name='a', when={days=['xyz']}}]", 'routing.rules[0].when.days[0]: expected one of "mon"'),
        ("models.a.upstream = 'http://x'", "models.a.upstream: expected a table, found a string"),
        ("models.a.upstream = {}", "models.a.upstream: missing required key url"),
        ("models.a.upstreams.b = {}", "models.a.upstreams.b: missing required key url"),
        (
            "models.a.upstream = {url='http://x', headers={h=12345}}",
            "models.a.upstream.headers.h: expected a string, found an integer",
        ),
        ("ledger.exchanges = 123456789012345678901", "ledger.exchanges: expected an integer from 16 to 1000000, found"),
        ("ledger.keep_days = 0x8000000000000000", "found an integer that is too large"),
        ('storage.folder = "a\\u0000b"', "storage.folder: expected a string without null characters"),
        (f"server.port = {'9' * 5000}", "headrace.toml: an integer has too many digits"),
        (f"{'.'.join('a' * 3000)} = 1", "headrace.toml: tables or lists are nested too deeply"),
    ],
)
def test_a_mistake_says_where_what_was_expected_and_what_was_found(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith("headrace.toml: ")
    assert said in mistake


def test_all_mistakes_are_told_at_once() -> None:
    found = mistakes("server.port = -1\n[modles]\n[log]\nlevel = 5\n", HEADRACE_LIMITS_STOP="many")
    assert len(found) == 4
    assert "modles: unknown key; did you mean models?" in found[1]
    assert found[3] == 'HEADRACE_LIMITS_STOP: limits.stop: expected an integer from 1 to 64, found "many"'


def test_a_mistake_of_the_environment_names_the_variable() -> None:
    assert mistakes("", HEADRACE_SERVER_PORT="-1") == [
        'HEADRACE_SERVER_PORT: server.port: expected an integer from 0 to 65535, found "-1"'
    ]
    assert mistakes("", HEADRACE_SERVER_PROT="1") == [
        "HEADRACE_SERVER_PROT: unknown variable; did you mean HEADRACE_SERVER_PORT?"
    ]
    assert mistakes("", HEADRACE_STORAGE_FILES_BYTES="1")[0].startswith("HEADRACE_STORAGE_FILES_BYTES: storage.")


def test_a_mistake_within_a_list_of_the_environment_names_the_variable() -> None:
    assert mistakes("", HEADRACE_SERVER_CORS_ORIGINS="*,nowhere")[0].startswith(
        "HEADRACE_SERVER_CORS_ORIGINS: server.cors_origins[1]: expected"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"server.port": 70_000}, r"^flag: server\.port: expected an integer"),
        ({"models": {"a.b": {"options": {"threads": "x"}}}}, r'^flag: models\."a\.b"\.options\.threads: expected'),
        ({"models": {"m": {"options": {"kv": "f8"}}}}, r"^flag: models\.m\.options\.kv: Unknown KV type"),
        ({"keys": [{"name": "a", "key": "a b"}]}, r"^flag: keys\[0\]\.key: expected ASCII characters"),
    ],
)
def test_a_mistake_of_a_flag_says_so(flags: Mapping[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(environ={}, flags=flags)


def test_an_error_knows_its_file_and_its_place() -> None:
    Path("headrace.toml").write_text("models.mini.replicas = 0")
    with pytest.raises(ConfigError) as raised:
        load_config(environ={})
    assert (raised.value.path, raised.value.where) == (Path("headrace.toml"), "models.mini.replicas")
    assert str(raised.value).startswith("headrace.toml: models.mini.replicas: expected")
    assert (str(ConfigError("no key")), ConfigError("no key").where) == ("no key", "")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "file not found"), (b"a = '\xff'", "expected UTF-8"), (b"a = " + b"[" * 5000, "nested too deeply")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "other.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"other.toml: .*{said}"):
        load_config(path, environ={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path, environ={})


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert read("\ufeffserver.port = 5").server.port == 5


def test_no_secret_is_shown() -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    config = read(
        f"keys = [{{name='a', key='sk-1'}}, {{name='b', key_sha256='{digest}'}}, {{name='c', key_env='C'}}]", C="sk-2"
    )
    text = config_toml(config)
    assert "sk-1" not in text
    assert "sk-2" not in text
    assert digest not in text
    keys = tomllib.loads(text)["keys"]
    assert [key["name"] for key in keys] == ["a", "b", "c"]
    assert (keys[0]["key"], keys[1]["key_sha256"], keys[2]["key_env"]) == ("***", "***", "C")


def test_no_secret_of_an_upstream_is_shown_or_told() -> None:
    config = read(
        """
        [models.a.upstream]
        url = "http://127.0.0.1:1/v1"
        key = "sk-1"
        headers = {x-org = "org-2", authorization = "Bearer ${TOKEN}"}
        """,
        TOKEN="sk-3",
    )
    text = config_toml(config)
    assert not any(secret in text for secret in ("sk-1", "org-2", "sk-3"))
    upstream = tomllib.loads(text)["models"]["a"]["upstream"]
    assert (upstream["key"], upstream["headers"]) == ("***", {"x-org": "***", "authorization": "***"})
    hidden = 'expected a secret, found the placeholder "***" that `config show` prints'
    assert mistakes(text) == [
        f"headrace.toml: models.a.upstream.key: {hidden}",
        f"headrace.toml: models.a.upstream.headers.x-org: {hidden}",
        f"headrace.toml: models.a.upstream.headers.authorization: {hidden}",
    ]


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
        [models.far.upstream]
        url = "http://127.0.0.1:1/v1"
        takes = {stops = 4, grammars = []}
        [models.far.upstreams."x.y"]
        url = "http://127.0.0.1:2/v1"
        health.path = ""
        [tenants.acme]
        models = []
        model_limits."b.c/d".concurrent = 1
        metadata = {"a b" = "$${X$${Y"}
        budgets = [{limit_micros = 5, period = "day"}, {limit_micros = 6, period = "day", endpoint = "/v1/é"}]
        [prices.a]
        input = 0.000001
        [cache.exact]
        stale = "1.5h"
        tags = {"a.b" = "5m"}
        events = {e = [], f = ["a.b"]}
        [routing]
        rules = [
            {name = "r", when = {tags = {t = "*"}, tools = false, days = ["mon"]}, chain = "c"},
            {name = "s", variant = "a@x"},
        ]
        chains.c.steps = [{variant = "a"}, {variant = "far", then = "restart"}]
        splits.s.percent = {a = 99.5, "a@x" = 0.5}
        hedges."a@x" = {}
        [surfaces.chat.ladder]
        steps = [{step = "trim", queue_ms = [3, 1], slack_ms = [-5, 0]}, {step = "refuse", queue_ms = [4, 2]}]
        """,
        K="k",
    )
    assert read(config_toml(config), K="k") == config
    assert read(config_toml(Config())) == Config()


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
