"""Reads the arguments of `headrace serve` in their plain forms, which spares a start the import of cyclopts.

Whatever is not plain is left to cyclopts, with its help and its errors. The result is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}|0", re.ASCII)
_ALIASES: Final = {"-c": "--config", "-p": "--port", "-t": "--threads"}
_SWITCHES: Final = ("--insecure", "--pull")
_VALUES: Final[dict[str, Callable[[str], Any]]] = {
    "--config": Path,
    "--host": str,
    "--port": int,
    "--weights": str,
    "--kv": str,
    "--threads": int,
    "--context": int,
    "--replicas": int,
    "--api-key": str,
    "--log-format": str,
}


def read_plain(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the parameters of `start_server`, or None if cyclopts has to read the arguments."""
    found: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        flag = _ALIASES.get(word, word)
        if flag in _SWITCHES:
            name, value = flag, True
        elif flag in _VALUES:
            text = next(words, "")
            if not text or text.startswith("-") or (_VALUES[flag] is int and _NUMBER.fullmatch(text) is None):
                return None
            name, value = flag, _VALUES[flag](text)
        elif word and not word.startswith("-"):
            name, value = "--model", word
        else:
            return None
        name = name[2:].replace("-", "_")
        if name in found:
            return None
        found[name] = value
    return found
