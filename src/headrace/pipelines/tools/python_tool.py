"""Python tools: a function of a module, or a callable that a program registers.

The schema of the arguments follows from the annotations. Plain functions run in threads of their own, of which there
are few: a function that never returns holds one, and further calls fail.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, get_type_hints

import msgspec

from headrace.config.tool_section import ToolConfig
from headrace.errors import HeadraceError
from headrace.pipelines.tools.tool import ToolError, ToolSpec, make_spec

_THREADS: Final = 8  # of one tool

PythonFunction = Callable[..., Any]


class PythonToolError(HeadraceError):
    """The function cannot be a tool."""


class PythonTool:
    """A ToolSource. Without `function`, it has no tool until one is registered."""

    def __init__(self, name: str, config: ToolConfig, function: PythonFunction | None = None) -> None:
        self._name = name
        self._config = config
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"tool-{name}")
        self._running = 0
        self._spec: ToolSpec | None = None
        if function is not None:
            self.register(function)

    def register(self, function: PythonFunction) -> None:
        arguments = arguments_of(self._name, function)
        schema = _inline(msgspec.json.schema(arguments))
        about = inspect.getdoc(function) or ""

        async def call(given: Mapping[str, Any], tenant: str) -> str:
            try:
                converted = msgspec.convert(dict(given), arguments, strict=False)
            except msgspec.ValidationError as error:
                raise ToolError(f"Wrong arguments: {error}") from None
            values = {each: getattr(converted, each) for each in arguments.__struct_fields__}
            return _as_text(await self._run(function, values))

        self._spec = make_spec(self._config, self._name, call, schema, description=about.split("\n\n")[0])

    async def _run(self, function: PythonFunction, values: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        if self._running >= _THREADS:
            raise ToolError("All threads of this tool are busy.")
        self._running += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(**values))
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)  # a thread cannot be interrupted

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not work.cancelled():
            work.exception()

    async def tools(self) -> list[ToolSpec]:
        return [] if self._spec is None else [self._spec]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def load_function(path: str) -> PythonFunction:
    """Import MODULE:FUNCTION. PythonToolError if there is none."""
    module, colon, name = path.partition(":")
    if not colon:
        raise PythonToolError(f"Expected MODULE:FUNCTION, found '{path}'.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PythonToolError(f"Cannot import '{path}': {error}.") from None
    if not callable(found):
        raise PythonToolError(f"'{path}' is not a function.")
    return found


def arguments_of(name: str, function: PythonFunction) -> type[msgspec.Struct]:
    """Return a struct of the function's arguments. PythonToolError if one has no annotation that JSON can express."""
    hints = get_type_hints(function)
    fields: list[Any] = []
    for each in inspect.signature(function).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise PythonToolError(f"The tool '{name}' takes *arguments. Expected named ones.")
        if each.name not in hints:
            raise PythonToolError(f"The argument '{each.name}' of the tool '{name}' has no type. Annotate it.")
        plain = (each.name, hints[each.name])
        fields.append(plain if each.default is each.empty else (*plain, each.default))
    try:
        struct = msgspec.defstruct("arguments", fields, forbid_unknown_fields=True, kw_only=True)
        msgspec.json.schema(struct)
    except TypeError as error:
        raise PythonToolError(f"The arguments of the tool '{name}' cannot be expressed in JSON: {error}.") from None
    return struct


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments themselves, with the definitions that it refers to."""
    definitions = dict(schema.get("$defs", {}))
    own: dict[str, Any] = definitions.pop("arguments", schema)
    return {**own, "$defs": definitions} if definitions else own


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:
        return str(value)
