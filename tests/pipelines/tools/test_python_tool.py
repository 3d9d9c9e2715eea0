"""Python functions as tools: schemas from annotations, converted arguments, bounded threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import pytest

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.python_tool import PythonTool, PythonToolError, load_function
from headrace.pipelines.tools.tool import ToolError

CONFIG = ToolConfig(kind="python")


def convert(amount: float, unit: Literal["km", "mi"] = "km") -> dict[str, Any]:
    """Convert a length.

    The rest is not for the model.
    """
    return {"amount": amount, "unit": unit}


def test_the_schema_and_the_description_come_from_the_function() -> None:
    async def it() -> None:
        tool = PythonTool("convert", CONFIG, convert)
        (spec,) = await tool.tools()
        assert spec.description == "Convert a length."
        assert spec.schema["required"] == ["amount"]
        assert spec.schema["properties"]["unit"]["enum"] == ["km", "mi"]
        assert await spec.call({"amount": "5"}, "acme") == '{"amount":5.0,"unit":"km"}'
        with pytest.raises(ToolError, match="Wrong arguments"):
            await spec.call({"amount": "far"}, "acme")
        await tool.close()

    asyncio.run(it())


def test_coroutines_run_on_the_loop_and_can_be_registered_later() -> None:
    async def greet(name: str) -> str:
        return f"Hello {name}"

    async def it() -> None:
        tool = PythonTool("greet", CONFIG)
        assert await tool.tools() == []
        tool.register(greet)
        (spec,) = await tool.tools()
        assert await spec.call({"name": "Ada"}, "acme") == "Hello Ada"

    asyncio.run(it())


def test_functions_that_never_return_do_not_take_all_threads_of_others() -> None:
    released = threading.Event()

    def wait() -> str:
        released.wait()
        return "done"

    async def it() -> None:
        tool = PythonTool("wait", CONFIG, wait)
        (spec,) = await tool.tools()
        calls = [asyncio.ensure_future(spec.call({}, "acme")) for _ in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(ToolError, match="busy"):
            await spec.call({}, "acme")
        released.set()
        assert await asyncio.gather(*calls) == ["done"] * 8
        await tool.close()

    asyncio.run(it())


@pytest.mark.parametrize("path", ["json", "json:nothing", "no_such_module:x", "json:__doc__"])
def test_a_path_without_a_function_is_an_error(path: str) -> None:
    with pytest.raises(PythonToolError):
        load_function(path)


def test_every_argument_needs_a_type() -> None:
    def untyped(x) -> str:  # type: ignore[no-untyped-def]
        return str(x)  # pyright: ignore

    with pytest.raises(PythonToolError, match="Annotate"):
        PythonTool("untyped", CONFIG, untyped)
