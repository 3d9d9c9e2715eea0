"""Whatever a file or the environment says, what comes of it is a configuration or a ConfigError."""

from __future__ import annotations

import re
from datetime import datetime
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.config import PLAIN_SECTIONS, Config, ConfigError, Options, Section
from headrace.config.loader import OPTIONS, variable_of
from headrace.config.toml_text import HIDDEN, config_toml, toml
from headrace.server.config_checks import load_config
from tests.support.config_tables import parts_of
from tests.support.config_text import read

ENVIRON = {"KEY": "sk-1", "NUMBER": "5", "EMPTY": ""}
KEYS = ["mini", "mini@int4", "int4", "chat", "acme", "a b", "", 'é"\\', "${KEY}", "x" * 70]
NAMES = st.sampled_from(KEYS) | st.text(max_size=5)
WORDS = [
    *("", "mini", "mini@int4", "@int4", "chat", "voice", "fast", "trim", "sk-1", "KEY", "/v1/embeddings", HIDDEN),
    *("${KEY}", "${NUMBER}", "${NOT_SET}", "${EMPTY:-7}", "${", "$${KEY}", "$${a${KEY}", "a\0b", "bf16", "int4"),
    *("5m", "1.5h", "0s", "5x", "22:00-06:00", "UTC", "America", "../etc", "http://127.0.0.1:1/v1", "http://["),
]
TEXTS = st.sampled_from(WORDS) | st.text(max_size=8)
ODD_NUMBERS = [0.5, 1e-7, 1e300, 99.99999, 10**9, 2**63 - 1, 2**64, 10**30, -(10**400)]
NUMBERS = st.sampled_from(ODD_NUMBERS) | st.integers(-2, 200) | st.floats()
TIMES = st.dates() | st.times() | st.datetimes(min_value=datetime(1000, 1, 1))
ANYTHING = st.recursive(
    st.booleans() | NUMBERS | TEXTS | TIMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """What looks like a value of the type, in range or not."""
    if isinstance(kind, type) and issubclass(kind, Section):
        fields = msgspec.structs.fields(kind)
        required = [field.name for field in fields if field.required]
        return _tables({field.name: values(field.type) for field in fields}, required)
    if kind == Options:
        return _tables({name: values(each) for name, each in OPTIONS.items()}, [])
    origin, parts = get_origin(kind), list(parts_of(kind))
    if origin in (Union, UnionType):
        return st.one_of(*map(values, parts))
    if origin is dict:
        return st.dictionaries(NAMES, values(parts[0]), max_size=2)
    if origin is tuple:
        return st.lists(values(parts[0]), max_size=3)
    if origin is Literal:
        return st.sampled_from(get_args(kind))
    if origin is Annotated:
        return values(get_args(kind)[0])
    plain: dict[Any, st.SearchStrategy[Any]] = {bool: st.booleans(), int: NUMBERS, float: NUMBERS, str: TEXTS}
    return plain.get(kind, ANYTHING)


def _tables(keys: dict[str, st.SearchStrategy[Any]], required: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the keys, those that are required nearly always, and now and then one that is none or is anything."""

    @st.composite
    def table(draw: st.DrawFn) -> dict[str, Any]:
        oddity = draw(st.integers(0, 40))
        names = draw(st.lists(st.sampled_from(sorted(keys)), max_size=3, unique=True))
        if oddity != 1:
            names += [name for name in required if name not in names]
        found = {name: draw(keys[name]) for name in names}
        if oddity == 2:
            found[draw(NAMES)] = draw(ANYTHING)
        if oddity == 3:
            found |= dict.fromkeys(names[:1], draw(ANYTHING))
        return found

    return table()


LIGHT = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_refused(text: str) -> Config | None:
    try:
        return read(text, **ENVIRON)
    except ConfigError as error:
        told = [str(each) for each in error.mistakes]
    assert told
    assert all(told)
    return None


@LIGHT
@given(values(Config))
@example({"server": {"port": float("nan"), "idle_s": 10**400}, "keys": {}, "models": {"": {"": {}}}})
@example({"routing": {"cascades": {"c": {"small": "mini", "large": "mini", "calibration": "a\0b"}}}})
def test_any_table_is_a_configuration_or_refused_and_what_is_shown_reads_back_the_same(table: dict[str, Any]) -> None:
    config = read_or_refused(toml(table))
    if config is not None and HIDDEN not in config_toml(config):
        assert read(config_toml(config), **ENVIRON) == config


@LIGHT
@given(st.dictionaries(NAMES | st.sampled_from(sorted(Config.__struct_fields__)), ANYTHING, max_size=4))
def test_any_nested_table_at_all_is_a_configuration_or_refused(table: dict[str, Any]) -> None:
    read_or_refused(toml(table))


@LIGHT
@given(st.text(max_size=60) | st.lists(st.sampled_from(list("[]{}=.,\"'\n \\u5e-_:ab$")), max_size=40).map("".join))
def test_any_text_is_a_configuration_or_refused(text: str) -> None:
    read_or_refused(text)


VARIABLES = st.sampled_from(
    [variable_of(name, key) for name, kind in PLAIN_SECTIONS.items() for key in kind.__struct_fields__]
)


@LIGHT
@given(st.dictionaries(VARIABLES | st.text(max_size=5).map("HEADRACE_LOG_".__add__), TEXTS, max_size=4))
@example({"HEADRACE_SERVER_PORT": "9" * 5000, "HEADRACE_SERVER_IDLE_S": "1e999"})
def test_any_environment_is_a_configuration_or_refused(environ: dict[str, str]) -> None:
    told: list[str] = []
    try:
        load_config(environ=environ)
    except ConfigError as error:
        told = [str(each) for each in error.mistakes]
    assert all(re.match(r"HEADRACE_|the configuration", each) for each in told)
