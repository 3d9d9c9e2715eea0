"""A route: which endpoint answers a method and a path, and what the server does around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import ParameterTable

ANTHROPIC: Final = "anthropic"  # the shape of errors
Handler = Callable[[ApiCall], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str  # a part in braces is a parameter
    handler: Handler
    about: str
    table: ParameterTable | None = None  # of its body
    open: bool = False  # without a key
    errors: str = "openai"
    listed: bool = True  # in the OpenAPI document
