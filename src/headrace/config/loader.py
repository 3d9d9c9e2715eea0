"""Reads the configuration: headrace.toml, then the environment, then flags, each over what came before.

Owns where the file is, `${NAME}` in its texts, the names of the environment's variables, and the conversion into
config's types, which goes on after a mistake so that all are told at once, each with its file or variable, its key,
what was expected and what was found. What must hold between keys is checks's.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from headrace.config import PLAIN_SECTIONS, Config, ConfigError, ConfigProblem, Options, Section
from headrace.config.cache_section import Lifetime
from headrace.config.toml_text import HIDDEN, is_secret, key_path, quoted
from headrace.variant import Variant

CONFIG_FILE: Final = "headrace.toml"  # read from the working folder where no file is named

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_NAMED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_PLACE: Final = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_LONGEST_FOUND: Final = 60  # characters of a value in a message
_INTEGER_BITS: Final = 63  # beside the sign: TOML promises no more, and neither does what reads them

# What a model's options may be. The others are not the options' to say: the model is its table's `path`, and surfaces
# are the same for all models.
OPTIONS: Final[Mapping[str, Any]] = {
    field.name: field.type for field in msgspec.structs.fields(Variant) if field.name not in ("model", "surfaces")
}


# What is wrong between keys: pairs of a key's path and a reason.
Check = Callable[[Config, Mapping[str, str]], Iterable[tuple[str, str]]]


def read_config(
    path: Path | None = None, *, environ: Mapping[str, str], check: Check, flags: Mapping[str, Any] | None = None
) -> Config:
    """The configuration in force, checked by `check`; ConfigError with every mistake.

    `flags` are values by their keys' paths, such as {"server.port": 9000, "models": {...}}; None is a flag that was
    not given. A key of the top level is replaced as a whole.
    """
    file = find_config_file(path, environ)
    source = "the configuration" if file is None else str(file)
    reading = _Reading(source, environ)
    try:
        raw: dict[str, Any] = {} if file is None else reading.filled_in(_parsed(file), "")
    except RecursionError:
        raise ConfigError(ConfigProblem(source, "", "tables or lists are nested too deeply"), path=file) from None
    reading.take_environment(raw)
    reading.take_flags(raw, flags or {})
    config = reading.section(Config, raw, "")
    if not reading.mistakes:
        for where, reason in check(config, environ):
            reading.mistake(where, reason)
    if reading.mistakes:
        raise ConfigError(*reading.mistakes, path=file)
    return config


def find_config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one that is named, the one that the environment names, ./headrace.toml, or none."""
    if path is not None:
        return path
    if named := environ.get("HEADRACE_CONFIG"):
        return Path(named)
    here = Path(CONFIG_FILE)
    return here if here.exists() else None


def variable_of(section: str, key: str) -> str:
    """The environment variable that sets a key: HEADRACE_SERVER_PORT."""
    return f"HEADRACE_{section}_{key}".upper()


def _parsed(file: Path) -> dict[str, Any]:
    def refused(reason: str, where: str = "") -> ConfigError:
        return ConfigError(ConfigProblem(str(file), where, reason), path=file)

    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise refused("there is no such file") from None
    except UnicodeDecodeError as error:
        raise refused(f"expected UTF-8, found another byte at offset {error.start}") from None
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror or error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.fullmatch(str(error))
        if found is None:
            raise refused(str(error)) from None
        reason, line, column = found.groups()
        raise refused(reason, f"line {line}, column {column}" if line else "end of the file") from None
    except ValueError:  # Python's own bound on what it turns into an integer
        raise refused("an integer has too many digits") from None


class _FromEnvironment(str):
    """A text that the environment had a part in: it may stand for a number, or for true or false."""

    __slots__ = ()


class _Reading:
    """One pass over a configuration, and the mistakes that it has found so far."""

    def __init__(self, source: str, environ: Mapping[str, str]) -> None:
        self.mistakes: list[ConfigProblem] = []
        self._source = source
        self._environ = environ
        self._broken: set[str] = set()  # keys whose texts could not be filled in: what they become says nothing
        self._origins: dict[str, str] = {}  # of keys that are not the file's: their variable, or "flag"

    def mistake(self, where: str, reason: str) -> None:
        self.mistakes.append(ConfigProblem(self._origin(where), where, reason))

    def _origin(self, where: str) -> str:
        """What set the key, or the nearest table or list around it."""
        around = [key for key in self._origins if where == key or where.startswith((f"{key}.", f"{key}["))]
        return self._origins[max(around, key=len)] if around else self._source

    # Where values come from

    def filled_in(self, value: Any, where: str) -> Any:
        """With ${NAME} and ${NAME:-default} replaced in every text."""
        match value:
            case str():
                return self._text_filled_in(value, where)
            case dict():
                table = cast(dict[str, Any], value)
                return {key: self.filled_in(each, _below(where, key)) for key, each in table.items()}
            case list():
                items = cast(list[Any], value)
                return [self.filled_in(each, f"{where}[{place}]") for place, each in enumerate(items)]
            case _:
                return value

    def _text_filled_in(self, text: str, where: str) -> str:
        replaced = False

        def put(found: re.Match[str]) -> str:
            nonlocal replaced
            if found[0] == "$${":
                return "${"
            named = _NAMED.fullmatch(found[1])
            if named is None or not found[2]:
                self._broken.add(where)
                self.mistake(
                    where, "expected ${NAME} or ${NAME:-default}; a $${ stands for itself, without the first $"
                )
                return ""
            replaced = True
            value = self._environ.get(named[1])
            if named[2] is not None:
                return value or named[2]  # as a shell does: an empty variable counts as none
            if value is None:
                self._broken.add(where)
                self.mistake(where, f"the environment variable {named[1]} is not set")
                return ""
            return value

        result = _REFERENCE.sub(put, text)
        return _FromEnvironment(result) if replaced else result

    def take_environment(self, raw: dict[str, Any]) -> None:
        unknown: dict[str, Iterable[str]] = {}  # and those that there are
        for section, kind in PLAIN_SECTIONS.items():
            fields = {variable_of(section, field.name): field for field in msgspec.structs.fields(kind)}
            prefix = variable_of(section, "")
            for variable in sorted(self._environ):
                if not variable.startswith(prefix):
                    continue
                if variable not in fields:
                    unknown[variable] = fields
                    continue
                field = fields[variable]
                text = self._environ[variable].strip()
                value: Any = _FromEnvironment(text)
                if get_origin(field.type) is tuple:
                    value = [part.strip() for part in text.split(",") if part.strip()]
                self._put(raw, section, field.name, value, variable)
        pointed = {*_variables_in(Config()), *_variables_in(raw)}
        for variable, known in unknown.items():
            if variable not in pointed:
                self.mistakes.append(
                    ConfigProblem(variable, "", f"there is no such variable; {_nearest(variable, known)}")
                )

    def take_flags(self, raw: dict[str, Any], flags: Mapping[str, Any]) -> None:
        for where, value in flags.items():
            if value is not None:
                section, _, key = where.partition(".")
                self._put(raw, section, key, value, "flag")

    def _put(self, raw: dict[str, Any], section: str, key: str, value: Any, origin: str) -> None:
        self._origins[_below(section, key) if key else section] = origin
        if not key:
            raw[section] = value
        elif isinstance(table := raw.setdefault(section, {}), dict):
            table[key] = value

    # What they become

    def section(self, kind: type[Section], raw: Any, where: str) -> Any:
        """One of `kind`; anything where there were mistakes."""
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        given = self._table({name: field.type for name, field in fields.items()}, raw, where)
        for name, field in fields.items():
            if field.required and isinstance(raw, dict) and name not in raw:
                self.mistake(where, f"{name} is missing")
        return None if self.mistakes else kind(**given)

    def _table(self, kinds: Mapping[str, Any], raw: Any, where: str) -> dict[str, Any]:
        if not isinstance(raw, Mapping):
            self.mistake(where, f"expected a table, found {_kind_of(raw)}")
            return {}
        given: dict[str, Any] = {}
        for key, value in cast(Mapping[str, Any], raw).items():
            if key in kinds:
                given[key] = self._value(kinds[key], value, _below(where, key))
            else:
                self.mistake(_below(where, key), f"there is no such key; {_nearest(key, kinds)}")
        return given

    def _value(self, kind: Any, raw: Any, where: str, *, secret: bool = False) -> Any:
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, raw, where)
        if kind == Options:
            return self._table(OPTIONS, raw, where)
        if get_origin(kind) in (Union, UnionType):  # a file has no null: what may be one is left out
            present = [each for each in get_args(kind) if each is not type(None)]
            if len(present) == 1:
                return self._value(present[0], raw, where, secret=secret)
        shape, inner = _container(kind)
        secret = secret or (shape is not None and is_secret(kind))
        if shape is dict and isinstance(raw, Mapping):
            table = cast(Mapping[str, Any], raw)
            return {key: self._value(inner, each, _below(where, key), secret=secret) for key, each in table.items()}
        if shape is tuple and isinstance(raw, Sequence) and not isinstance(raw, str):
            items = cast(Sequence[Any], raw)
            return tuple(
                self._value(inner, each, f"{where}[{place}]", secret=secret) for place, each in enumerate(items)
            )
        return self._plain(kind, raw, where, secret=secret)

    def _plain(self, kind: Any, raw: Any, where: str, *, secret: bool) -> Any:
        if where in self._broken:
            return None
        secret = secret or is_secret(kind)
        try:
            value = _converted(kind, raw)
        except (msgspec.ValidationError, ValueError):
            self.mistake(where, f"expected {_expected(kind)}, found {_kind_of(raw) if secret else _spelled(raw)}")
            return None
        if secret and raw == HIDDEN:
            self.mistake(where, f"{quoted(HIDDEN)} is what is shown in place of a secret, and no secret")
        elif isinstance(value, str) and "\0" in value:  # no name, path or address has one
            self.mistake(where, "expected a text without null characters")
        return value


def _container(kind: Any) -> tuple[type | None, Any]:
    """`dict` or `tuple` and the type of what is in it; None for what is neither, or has a type for each place."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    match get_origin(kind), get_args(kind):
        case builtin, (_, inner) if builtin is dict:
            return dict, inner
        case builtin, (inner, EllipsisType()) if builtin is tuple:
            return tuple, inner
        case _:
            return None, None


def _converted(kind: Any, raw: Any) -> Any:
    """ValidationError or ValueError for what is none of the kind."""
    if isinstance(raw, int) and raw.bit_length() > _INTEGER_BITS:
        raise ValueError
    if isinstance(raw, _FromEnvironment):
        text = str(raw)
        try:
            value = msgspec.convert(text, kind)
        except msgspec.ValidationError:
            value = msgspec.convert(text, kind, strict=False)
    else:
        value = msgspec.convert(raw, kind)
    match value:
        case float() if not math.isfinite(value):
            raise ValueError
        case int() if value.bit_length() > _INTEGER_BITS:
            raise ValueError
        case _:
            return value


def _variables_in(value: Any) -> Iterator[str]:
    """The environment variables that keys point to, such as ledger.dsn_env: they may have any name."""
    match value:
        case Section():
            yield from _variables_in(msgspec.structs.asdict(value))
        case Mapping():
            for key, each in cast(Mapping[str, Any], value).items():
                if key.endswith("_env") and isinstance(each, str):
                    yield each
                else:
                    yield from _variables_in(each)
        case list() | tuple():
            for each in cast(Sequence[Any], value):
                yield from _variables_in(each)
        case _:
            pass


def _below(where: str, key: str) -> str:
    return f"{where}.{key_path(key)}" if where else key_path(key)


# Words for messages


def _nearest(key: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def _spelled(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > _INTEGER_BITS:
            return "an integer that is too large"
        case int() | float():
            text = repr(value)
        case str():
            text = quoted(value)
        case _:
            return _kind_of(value)
    return text if len(text) <= _LONGEST_FOUND else f"{text[:_LONGEST_FOUND]}..."


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a text"
        case Mapping():
            return "a table"
        case Sequence():
            return "a list"
        case _:
            return "a date or a time"


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:  # here, because type_info sorts the values
        return f"one of {', '.join(quoted(str(value)) for value in get_args(kind))}"
    return _described(inspect.type_info(kind))


def _described(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _described(kind.type)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"an integer{_range(kind)}"
        case inspect.FloatType():
            return f"a finite number{_range(kind)}"
        case inspect.StrType():
            return _text(kind)
        case inspect.UnionType():
            return " or ".join(_described(each) for each in kind.types if not isinstance(each, inspect.NoneType))
        case inspect.VarTupleType() | inspect.TupleType():
            return "a list"
        case _:
            return "a table"


def _pattern_of(kind: Any) -> str | None:
    found = inspect.type_info(kind)
    return found.pattern if isinstance(found, inspect.StrType) else None


# What texts look like that have a pattern.
_PATTERNS: Final[Mapping[str | None, str]] = {_pattern_of(Lifetime): "a time span such as 90s, 5m, 1h or 7d"}


def _text(kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        return _PATTERNS.get(kind.pattern, f"a text of the form {kind.pattern}")
    return "a text that is not empty" if kind.min_length else "a text"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_bound(kind.ge)} to {_bound(kind.le)}"
    bounds = (("of at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    words = " and ".join(f"{word} {_bound(bound)}" for word, bound in bounds if bound is not None)
    return f" {words}" if words else ""


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
