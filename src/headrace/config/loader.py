"""Reads the configuration: headrace.toml, then environment variables, then flags; later sources override earlier ones.

Finds the file, expands `${NAME}` in strings and converts values to the configuration's types. Collects every mistake
before it fails, each with its source, its key, what was expected and what was found. Rules between keys are checked by
the `check` function that the caller passes.
"""

from __future__ import annotations

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
from headrace.config.value_types import Finding
from headrace.errors import similar_names
from headrace.variant import Variant

CONFIG_FILE: Final = "headrace.toml"  # read from the working folder when no file is given

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_NAMED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_LOCATION: Final = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_LONGEST_FOUND: Final = 60  # characters of a value quoted in an error
_INTEGER_BITS: Final = 63  # without the sign: TOML guarantees no more

# The keys of [models.NAME.options]. The variant's other two fields are set elsewhere: `model` by the table's `path`,
# `surfaces` by [surfaces.NAME].
OPTIONS: Final[Mapping[str, Any]] = {
    field.name: field.type for field in msgspec.structs.fields(Variant) if field.name not in ("model", "surfaces")
}


# Checks the rules between keys; receives the configuration and the environment.
ConfigCheck = Callable[[Config, Mapping[str, str]], Iterable[Finding]]


def read_config(
    path: Path | None = None,
    *,
    environ: Mapping[str, str],
    check: ConfigCheck,
    flags: Mapping[str, Any] | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Config:
    """Return the effective configuration; raise ConfigError with every mistake. `tables` replaces the file.

    `flags` maps key paths to values, such as {"server.port": 9000, "models": {...}}. None means that the flag was not
    given. A top-level key is replaced as a whole.
    """
    file = find_config_file(path, environ) if tables is None else None
    source = "the configuration" if file is None else str(file)
    reader = _Reader(source, environ)
    try:
        given = dict(tables or {}) if file is None else _parse(file)
        raw: dict[str, Any] = reader.expand(given, "")
    except RecursionError:
        raise ConfigError(ConfigProblem(source, "", "tables or lists are nested too deeply"), path=file) from None
    reader.apply_environment(raw)
    reader.apply_flags(raw, flags or {})
    config = reader.section(Config, raw, "")
    reader.add_findings(config, check)
    if reader.mistakes:
        raise ConfigError(*reader.mistakes, path=file)
    return config


def find_config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: `path`, else $HEADRACE_CONFIG, else ./headrace.toml if it exists, else None."""
    if path is not None:
        return path
    if named := environ.get("HEADRACE_CONFIG"):
        return Path(named)
    here = Path(CONFIG_FILE)
    return here if here.exists() else None


def variable_of(section: str, key: str) -> str:
    """Name the environment variable that sets a key: HEADRACE_SERVER_PORT."""
    return f"HEADRACE_{section}_{key}".upper()


def _parse(file: Path) -> dict[str, Any]:
    def error_at(reason: str, where: str = "") -> ConfigError:
        return ConfigError(ConfigProblem(str(file), where, reason), path=file)

    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise error_at("file not found") from None
    except UnicodeDecodeError as error:
        raise error_at(f"expected UTF-8, found an invalid byte at offset {error.start}") from None
    except OSError as error:
        raise error_at(f"cannot read the file: {error.strerror or error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        located = _LOCATION.fullmatch(str(error))
        if located is None:
            raise error_at(str(error)) from None
        reason, line, column = located.groups()
        raise error_at(reason, f"line {line}, column {column}" if line else "end of the file") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise error_at("an integer has too many digits") from None


class _Invalid:
    """Stands for a value with a mistake."""


_INVALID: Final = _Invalid()


def _placeholder(kind: Any, where: str) -> Any:
    """Return a value for a required key that is missing or wrong, so that the rest of its section can be checked."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    shape = get_origin(kind) or kind
    if shape is Literal:
        return get_args(kind)[0]
    empty: Mapping[Any, Any] = {dict: {}, tuple: (), int: 0, float: 0.0}
    return empty.get(shape, where)  # a text is unlike any other name


def _related(where: str, other: str) -> bool:
    """True if one key contains the other."""
    shorter, longer = sorted((where, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


class _FromEnvironment(str):
    """A string that came from the environment, which may stand for a number, true or false."""

    __slots__ = ()


class _Reader:
    """Reads one configuration and collects its mistakes."""

    def __init__(self, source: str, environ: Mapping[str, str]) -> None:
        self.mistakes: list[ConfigProblem] = []
        self._source = source
        self._environ = environ
        self._broken: set[str] = set()  # keys whose strings could not be expanded; not checked further
        self._origins: dict[
            str, str
        ] = {}  # key path to its environment variable or "flag"; other keys come from the file

    def add_mistake(self, where: str, reason: str) -> None:
        self.mistakes.append(ConfigProblem(self._origin(where), where, reason))

    def _origin(self, where: str) -> str:
        """Return the source that set the key or the nearest table or list around it."""
        around = [key for key in self._origins if where == key or where.startswith((f"{key}.", f"{key}["))]
        return self._origins[max(around, key=len)] if around else self._source

    def add_findings(self, config: Config | _Invalid, check: ConfigCheck) -> None:
        """Add what `check` finds. Keys with mistakes have their defaults in `config`, so findings about them, and about
        what contains or is inside them, are left out."""
        if isinstance(config, _Invalid):
            return
        wrong = [mistake.where for mistake in self.mistakes if mistake.where]
        try:
            for where, reason in check(config, self._environ):
                if not any(_related(where, other) for other in wrong):
                    self.add_mistake(where, reason)
        except Exception:
            if not wrong:
                raise
            # A rule met a default that no valid configuration has there. The mistakes so far are worth reporting.

    # Sources

    def expand(self, value: Any, where: str) -> Any:
        """Replace ${NAME} and ${NAME:-default} in every string of `value`."""
        match value:
            case str():
                return self._expand_string(value, where)
            case dict():
                table = cast(dict[str, Any], value)
                return {key: self.expand(each, _below(where, key)) for key, each in table.items()}
            case list():
                items = cast(list[Any], value)
                return [self.expand(each, f"{where}[{place}]") for place, each in enumerate(items)]
            case _:
                return value

    def _expand_string(self, text: str, where: str) -> str:
        replaced = False

        def value_of(match: re.Match[str]) -> str:
            nonlocal replaced
            if match[0] == "$${":
                return "${"
            named = _NAMED.fullmatch(match[1])
            if named is None or not match[2]:
                self._broken.add(where)
                self.add_mistake(where, "expected ${NAME} or ${NAME:-default}; write $${ for a literal ${")
                return ""
            replaced = True
            value = self._environ.get(named[1])
            if named[2] is not None:
                return value or named[2]  # as in a shell, an empty variable counts as unset
            if value is None:
                self._broken.add(where)
                self.add_mistake(where, f"the environment variable {named[1]} is not set")
                return ""
            return value

        result = _REFERENCE.sub(value_of, text)
        return _FromEnvironment(result) if replaced else result

    def apply_environment(self, raw: dict[str, Any]) -> None:
        unknown: dict[str, Iterable[str]] = {}  # by variable: the known variables of its section
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
        referenced = {*_variables_in(Config()), *_variables_in(raw)}
        for variable, known in unknown.items():
            if variable not in referenced:
                self.mistakes.append(
                    ConfigProblem(variable, "", f"unknown variable; {_suggestion(variable, known, 'variables')}")
                )

    def apply_flags(self, raw: dict[str, Any], flags: Mapping[str, Any]) -> None:
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

    # Conversion

    def section(self, kind: type[Section], raw: Any, where: str) -> Any:
        """Build a section of type `kind`. Keys with mistakes get their defaults, required ones a placeholder."""
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        given = self._table({name: field.type for name, field in fields.items()}, raw, where)
        for name, field in fields.items():
            if not field.required or name in given:
                continue
            if isinstance(raw, dict) and name not in raw:
                self.add_mistake(where, f"missing required key {name}")
            given[name] = _placeholder(field.type, _below(where, name))
        return kind(**given)

    def _table(self, kinds: Mapping[str, Any], raw: Any, where: str) -> dict[str, Any]:
        if not isinstance(raw, Mapping):
            self.add_mistake(where, f"expected a table, found {_type_name(raw)}")
            return {}
        given: dict[str, Any] = {}
        for key, value in cast(Mapping[str, Any], raw).items():
            if key in kinds:
                read = self._value(kinds[key], value, _below(where, key))
                if not isinstance(read, _Invalid):
                    given[key] = read
            else:
                options = next((name for name, each in kinds.items() if each == Options), None)
                if options is not None and key in OPTIONS:
                    hint = f"did you mean {_below(_below(where, options), key)}?"
                else:
                    hint = _suggestion(key, kinds, "keys")
                self.add_mistake(_below(where, key), f"unknown key; {hint}")
        return given

    def _value(self, kind: Any, raw: Any, where: str, *, secret: bool = False) -> Any:
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, raw, where)
        if kind == Options:
            return self._table(OPTIONS, raw, where)
        if get_origin(kind) in (Union, UnionType):  # TOML has no null: an optional key is left out
            present = [each for each in get_args(kind) if each is not type(None)]
            if len(present) == 1:
                return self._value(present[0], raw, where, secret=secret)
        shape, inner = _container(kind)
        secret = secret or (shape is not None and is_secret(kind))
        if shape is dict and isinstance(raw, Mapping):
            table = cast(Mapping[str, Any], raw)
            read = {key: self._value(inner, each, _below(where, key), secret=secret) for key, each in table.items()}
            return {key: each for key, each in read.items() if not isinstance(each, _Invalid)}
        if shape is tuple and isinstance(raw, Sequence) and not isinstance(raw, str):
            items = cast(Sequence[Any], raw)
            listed = [self._value(inner, each, f"{where}[{place}]", secret=secret) for place, each in enumerate(items)]
            return _INVALID if any(isinstance(each, _Invalid) for each in listed) else tuple(listed)
        return self._scalar(kind, raw, where, secret=secret)

    def _scalar(self, kind: Any, raw: Any, where: str, *, secret: bool) -> Any:
        if where in self._broken:
            return _INVALID
        secret = secret or is_secret(kind)
        try:
            value = _convert(kind, raw)
        except (msgspec.ValidationError, ValueError):
            self.add_mistake(where, f"expected {_expected(kind)}, found {_type_name(raw) if secret else _display(raw)}")
            return _INVALID
        if secret and raw == HIDDEN:
            self.add_mistake(
                where, f"expected a secret, found the placeholder {quoted(HIDDEN)} that `config show` prints"
            )
        elif isinstance(value, str) and "\0" in value:  # no name, path or address contains one
            self.add_mistake(where, "expected a string without null characters")
        return value


def _container(kind: Any) -> tuple[type | None, Any]:
    """Return `dict` or `tuple` and its item type; (None, None) for other types and for fixed-length tuples."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    match get_origin(kind), get_args(kind):
        case builtin, (_, inner) if builtin is dict:
            return dict, inner
        case builtin, (inner, EllipsisType()) if builtin is tuple:
            return tuple, inner
        case _:
            return None, None


def _convert(kind: Any, raw: Any) -> Any:
    """Convert `raw` to `kind`; raise ValidationError or ValueError where it does not fit."""
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
    """Yield the environment variables that keys such as ledger.dsn_env refer to; these may have any name."""
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


# Error texts


def _suggestion(key: str, known: Iterable[str], plural: str) -> str:
    names = list(known)
    similar = similar_names(key, names)
    return f"did you mean {similar[0]}?" if similar else f"known {plural}: {', '.join(names)}"


def _display(value: Any) -> str:
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
            return _type_name(value)
    return text if len(text) <= _LONGEST_FOUND else f"{text[:_LONGEST_FOUND]}..."


def _type_name(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "a table"
        case Sequence():
            return "a list"
        case _:
            return "a date or a time"


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:  # here, because type_info sorts the values
        return f"one of {', '.join(quoted(str(value)) for value in get_args(kind))}"
    return _describe(inspect.type_info(kind))


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _describe(kind.type)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"an integer{_range(kind)}"
        case inspect.FloatType():
            return f"a finite number{_range(kind)}"
        case inspect.StrType():
            return _string_description(kind)
        case inspect.UnionType():
            return " or ".join(_describe(each) for each in kind.types if not isinstance(each, inspect.NoneType))
        case inspect.VarTupleType() | inspect.TupleType():
            return "a list"
        case _:
            return "a table"


def _pattern_of(kind: Any) -> str | None:
    info = inspect.type_info(kind)
    return info.pattern if isinstance(info, inspect.StrType) else None


# How to describe strings that must match a pattern.
_PATTERNS: Final[Mapping[str | None, str]] = {_pattern_of(Lifetime): "a duration such as 90s, 5m, 1h or 7d"}


def _string_description(kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        return _PATTERNS.get(kind.pattern, f"a string that matches {kind.pattern}")
    return "a non-empty string" if kind.min_length else "a string"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_bound(kind.ge)} to {_bound(kind.le)}"
    bounds = (("of at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    words = " and ".join(f"{word} {_bound(bound)}" for word, bound in bounds if bound is not None)
    return f" {words}" if words else ""


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
