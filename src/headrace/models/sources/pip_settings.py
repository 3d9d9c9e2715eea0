"""Reads where pip gets its packages: the index URL, the certificates and the timeout, from the environment and files.

Reads the variables and files that pip reads, in its order. Extra indexes are not used: a name must not mean another
package because a second index has it too.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.errors import RequestError


class PipSettings(msgspec.Struct, frozen=True):
    index_url: str  # may hold a user and a password
    certificates: str = ""  # a file; empty: those of the system
    timeout_s: float = 15.0


def pip_settings(environ: Mapping[str, str] = os.environ, files: list[Path] | None = None) -> PipSettings:
    """Return pip's settings: variables (PIP_INDEX_URL, PIP_CERT, PIP_DEFAULT_TIMEOUT) come before files."""
    found: dict[str, str] = {}
    for file in _files(environ) if files is None else files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself says what is wrong with it
        for section in ("global", "download"):
            if parser.has_section(section):
                found |= dict(parser.items(section))
    for variable, key in (
        ("PIP_INDEX_URL", "index-url"),
        ("PIP_CERT", "cert"),
        ("PIP_TIMEOUT", "timeout"),
        ("PIP_DEFAULT_TIMEOUT", "timeout"),
    ):
        if environ.get(variable):
            found[key] = environ[variable]
    try:
        timeout_s = max(1.0, float(found.get("timeout", "15")))
    except ValueError:
        timeout_s = 15.0
    index = found.get("index-url", "").strip() or _pips_default()
    return PipSettings(index.rstrip("/"), found.get("cert", "").strip(), timeout_s)


def _pips_default() -> str:
    """Return the index that pip itself would use. RequestError where pip is not installed."""
    try:
        from pip._internal.models.index import PyPI  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        raise RequestError(
            "No package index is configured. Set PIP_INDEX_URL, or pass --index-url.", parameter="index_url"
        ) from None
    return str(PyPI.simple_url)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's files on Linux and macOS, later ones override earlier ones: of the machine, the user, the venv."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path(environ.get("HOME") or Path.home())
    for folder in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)
