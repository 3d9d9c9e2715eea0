"""Model names as Ollama writes them, NAME:TAG: `mini` is `mini:latest`, and the variant `mini@int4` is `mini:int4`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller
from headrace.gateway.serving.fleet import Fleet

_LATEST: Final = ":latest"


def tag_of(name: str, *, latest: bool = True) -> str:
    """Return a name with its tag. `latest`: also where it is the one that clients may leave out."""
    if ":" in name:  # an alias that has one already
        return name
    if "@" in name:
        return name.replace("@", ":", 1)
    return name + _LATEST if latest else name


def find_name(caller: Caller, fleet: Fleet, tagged: str) -> str:
    """Return the model's own name, or `tagged` where the caller may use no such model."""
    for name in _spellings(tagged):
        with contextlib.suppress(ApiError):
            find_model(caller, fleet, name)
            return name
    return tagged


def _spellings(tagged: str) -> Iterator[str]:
    yield tagged
    name, colon, tag = tagged.rpartition(":")
    if name and tag == "latest":
        yield name
    elif name and colon:
        yield f"{name}@{tag}"
