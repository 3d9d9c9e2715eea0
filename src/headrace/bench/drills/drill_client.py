"""The client of a drill: streamed chats and what came of each.

Every request has a timeout: one that takes longer counts as a failure, and nothing here raises for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import aiohttp
import msgspec

_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
_TIMEOUT_S: Final = 600.0  # for one response


class ChatReply(msgspec.Struct):
    """One streamed chat; filled in while it arrives."""

    status: int = 0  # 0: no response
    headers: Mapping[str, str] = {}
    text: str = ""
    finish: str = ""
    code: str = ""  # of an error
    ttft: float | None = None  # seconds
    seconds: float = 0.0
    restarts: int = 0  # marked by the server: the text before was discarded
    extracted: bool = False  # quoted from the sources, according to the `headrace` field
    tokens: int = 0  # generated, according to the server's usage
    longest_gap: float = 0.0  # seconds between two outputs

    @property
    def answered(self) -> bool:
        return self.status == 200 and bool(self.finish)

    @property
    def refused(self) -> bool:
        """Rejected the way a client can handle: 429 or 503 with Retry-After."""
        return self.status in (429, 503) and "retry-after" in self.headers

    def take_event(self, event: Mapping[str, Any]) -> bool:
        """Apply one event of the stream; return whether it carried text."""
        if "error" in event:
            self.code = str(event["error"].get("code"))
            self.finish = ""
            return False
        own: Mapping[str, Any] = event.get("headrace", {})
        self.extracted = self.extracted or bool(own.get("extracted"))
        usage: Mapping[str, Any] = event.get("usage") or {}
        self.tokens = usage.get("completion_tokens", self.tokens)
        if own.get("restart"):
            self.restarts += 1
            self.text = ""
            return False
        has_text = False
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            self.text += text
            self.finish = choice.get("finish_reason") or self.finish
            has_text = has_text or bool(text)
        return has_text


class ChatClient:
    """A client of one server; an async context manager."""

    def __init__(self, url: str, key: str, *, connections: int = 512) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            headers={"authorization": f"Bearer {key}"},
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def chat(
        self, question: str, *, key: str | None = None, reply: ChatReply | None = None, **fields: Any
    ) -> ChatReply:
        """Stream one chat. Pass `reply` to watch it while it is filled in; `fields` are added to the request."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **_STREAM, **fields}
        reply = ChatReply() if reply is None else reply
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        began = last = time.monotonic()
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                reply.status = response.status
                reply.headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    reply.code = str((await response.json()).get("error", {}).get("code"))
                    return reply
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    now = time.monotonic()
                    if reply.take_event(json.loads(line[6:])):
                        if reply.ttft is None:
                            reply.ttft = now - began
                        else:
                            reply.longest_gap = max(reply.longest_gap, now - last)
                        last = now
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reply.code = type(error).__name__
            reply.finish = ""
        finally:
            reply.seconds = time.monotonic() - began
        return reply

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Return the status and the body: parsed where it is JSON."""
        async with self._session.request(method, self._url + path, json=body) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text


async def send_at_rate(requests: Sequence[Callable[[], Awaitable[ChatReply]]], rate: float) -> list[ChatReply]:
    """Start `rate` requests a second, whether or not earlier ones have finished (an open loop)."""
    began = time.monotonic()
    tasks: list[asyncio.Future[ChatReply]] = []
    for place, request in enumerate(requests):
        await asyncio.sleep(max(0.0, began + place / rate - time.monotonic()))
        tasks.append(asyncio.ensure_future(request()))
    return list(await asyncio.gather(*tasks))


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Poll until the condition holds; return the seconds that took, or None after the timeout."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began >= timeout_s:
            return None
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def retry_until(
    request: Callable[[], Awaitable[ChatReply]], accept: Callable[[ChatReply], bool], timeout_s: float, pause_s: float
) -> float | None:
    """Repeat a request until its reply is accepted; return the seconds that took, or None after the timeout."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if accept(await request()):
            return time.monotonic() - began
        await asyncio.sleep(pause_s)
    return None
