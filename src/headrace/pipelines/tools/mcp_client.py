"""McpClient: a Model Context Protocol client over stdio or streamable HTTP, as far as tools need it.

Speaks JSON-RPC 2.0: initialize, tools/list and tools/call. Offers the server nothing: its requests are refused.
Messages are bounded in length, and every wait in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import msgspec

from headrace.pipelines.public_fetch import FetchError, FetchPolicy, fetch
from headrace.pipelines.tools.tool import ToolError
from headrace.sse import EventReader, EventTooLongError
from headrace.tasks import end_tasks
from headrace.version import __version__

PROTOCOL: Final = "2025-06-18"
_MESSAGE_BYTES: Final = 4 * 1024 * 1024
_PAGES: Final = 16  # of a list of tools
_TOOLS: Final = 256
_REFUSED: Final = {"code": -32601, "message": "Method not found"}


class McpTransport(Protocol):
    async def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its response. ToolError where the connection fails."""
        ...

    async def notify(self, message: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class McpClient:
    def __init__(self, transport: McpTransport, *, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._next = 0
        self._is_ready = False
        self._starting = asyncio.Lock()

    async def list_tools(self) -> list[dict[str, Any]]:
        await self._start()
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._ask("tools/list", {} if cursor is None else {"cursor": cursor})
            tools += objects_of(page.get("tools"))
            cursor = page.get("nextCursor")
            if not cursor or len(tools) >= _TOOLS:
                break
        return tools[:_TOOLS]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a result. ToolError if the tool reports an error."""
        await self._start()
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        texts = [
            str(each.get("text") or "") for each in objects_of(result.get("content")) if each.get("type") == "text"
        ]
        text = "\n".join(texts)
        if not text and result.get("structuredContent") is not None:
            text = msgspec.json.encode(result["structuredContent"]).decode()
        if result.get("isError"):
            raise ToolError(text[:1000] or "The tool reported an error.")
        return text

    async def _start(self) -> None:
        async with self._starting:
            if self._is_ready:
                return
            await self._ask(
                "initialize",
                {
                    "protocolVersion": PROTOCOL,
                    "capabilities": {},
                    "clientInfo": {"name": "headrace", "version": __version__},
                },
            )
            await self._transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
            self._is_ready = True

    async def _ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._next += 1
        message = {"jsonrpc": "2.0", "id": self._next, "method": method, "params": dict(params)}
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._transport.request(message)
        except TimeoutError:
            raise ToolError("The MCP server did not answer in time.") from None
        except ToolError:
            self._is_ready = False  # the next call starts anew
            raise
        if (error := answer.get("error")) is not None:
            told = cast(dict[str, Any], error).get("message") if isinstance(error, dict) else error
            raise ToolError(f"The MCP server refused: {str(told)[:500]}")
        result = answer.get("result")
        return cast(dict[str, Any], result) if isinstance(result, dict) else {}

    async def close(self) -> None:
        await self._transport.close()


class StdioTransport:
    """A server process that reads and writes lines of JSON. It is started with the first request, and again after it
    has ended. It gets PATH, HOME and the variables that the operator names, and no others."""

    def __init__(self, command: Sequence[str], environment: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        names = ("PATH", "HOME", "LANG", *environment)
        self._environ = {name: environ[name] for name in names if name in environ}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        await self._ensure_running()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = answer
        try:
            await self.notify(message)
            return await answer
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise ToolError("The MCP server has ended.")
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            await process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise ToolError("The MCP server has ended.") from None

    async def _ensure_running(self) -> None:
        process, reading = self._process, self._reading
        if process is not None and process.returncode is None and reading is not None and not reading.done():
            return
        await self.close()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environ,
                limit=_MESSAGE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"The MCP server cannot be started: {error.strerror}.") from None
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                    await self._take(msgspec.json.decode(line, type=dict[str, Any]))
        except (ValueError, ConnectionError, ToolError):
            pass  # a line that is too long: the connection is of no use any more
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ToolError("The MCP server has ended."))

    async def _take(self, message: dict[str, Any]) -> None:
        id = message.get("id")
        if "method" in message:
            if id is not None:  # a request of the server
                await self.notify({"jsonrpc": "2.0", "id": id, "error": _REFUSED})
            return
        answer = self._waiting.get(id) if isinstance(id, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def close(self) -> None:
        process, self._process = self._process, None
        reading, self._reading = self._reading, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await end_tasks([reading])


class HttpTransport:
    """Streamable HTTP: each message is a POST, answered with JSON or with events."""

    def __init__(self, url: str, policy: FetchPolicy, headers: Mapping[str, str]) -> None:
        self._url = url
        self._policy = policy
        self._headers = dict(headers)
        self._session = ""

    async def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        for answer in await self._post(message):
            if answer.get("id") == message["id"] and "method" not in answer:
                return answer
        raise ToolError("The MCP server sent no response.")

    async def notify(self, message: Mapping[str, Any]) -> None:
        await self._post(message)

    async def _post(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        headers = {
            **self._headers,
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": PROTOCOL,
        }
        if self._session and message.get("method") != "initialize":
            headers["mcp-session-id"] = self._session
        try:
            page = await fetch(
                self._url, self._policy, method="POST", headers=headers, body=msgspec.json.encode(message)
            )
        except FetchError as error:
            raise ToolError(str(error)) from None
        if page.status >= 400:
            raise ToolError(f"The MCP server answered with status {page.status}.")
        self._session = page.headers.get("mcp-session-id", self._session)
        bodies = _event_bodies(page.body) if page.content_type == "text/event-stream" else [page.body]
        found: list[dict[str, Any]] = []
        for body in bodies:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                found.append(msgspec.json.decode(body, type=dict[str, Any]))
        return found

    async def close(self) -> None:
        """Connections are not kept."""


def objects_of(value: Any) -> list[dict[str, Any]]:
    """Return the objects of what should be a list of them."""
    items = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], each) for each in items if isinstance(each, dict)]


def _event_bodies(body: bytes) -> list[bytes]:
    reader = EventReader(_MESSAGE_BYTES)
    try:
        return [*reader.feed(body), *reader.finish()]
    except EventTooLongError:
        raise ToolError("The MCP server sent a message that is too long.") from None
