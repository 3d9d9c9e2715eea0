"""Chats that a drill asks a server, and what came of each.

Owns Reply and the way from a stream's events to one. Every question has a bound in time: one that is not answered
within it is a failure like any other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
_LONGEST: Final = 120.0  # seconds for one answer, however bad things are


class ChatReply(msgspec.Struct):
    status: int = 0  # 0: no answer came
    headers: Mapping[str, str] = {}
    text: str = ""
    finish: str = ""
    code: str = ""  # of an error
    ttft: float | None = None  # seconds
    seconds: float = 0.0
    restarts: int = 0  # marked
    extracted: bool = False  # quoted from the sources, by the answer's own field
    tokens: int = 0  # of the answer, by the server's usage
    longest_gap: float = 0.0  # seconds between two outputs

    @property
    def answered(self) -> bool:
        return self.status == 200 and bool(self.finish)

    @property
    def refused(self) -> bool:
        """As it should be: with a word on when to come again."""
        return self.status in (429, 503) and "retry-after" in self.headers


class ChatClient:
    """A client of one server. To be closed."""

    def __init__(self, url: str, key: str, *, connections: int = 512) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=_LONGEST),
            headers={"authorization": f"Bearer {key}"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def chat(self, question: str, *, key: str | None = None, **more: Any) -> ChatReply:
        """A streamed chat. `more`: further parameters."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **_STREAM, **more}
        reply = ChatReply()
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
                    if self._take(reply, json.loads(line[6:])):
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

    def _take(self, reply: ChatReply, event: Mapping[str, Any]) -> bool:
        """Whether a client hears something of it."""
        if "error" in event:
            reply.code = str(event["error"].get("code"))
            reply.finish = ""
            return False
        told = event.get("headrace", {})
        reply.extracted = reply.extracted or bool(told.get("extracted"))
        reply.tokens = (event.get("usage") or {}).get("completion_tokens", reply.tokens)
        if told.get("restart"):
            reply.restarts += 1
            reply.text = ""
            return False
        heard = False
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            reply.text += text
            reply.finish = choice.get("finish_reason") or reply.finish
            heard = heard or bool(text)
        return heard

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        async with self._session.request(method, self._url + path, json=body) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text


async def at_rate(ask: Sequence[Any], rate: float) -> list[ChatReply]:
    """Begins so many of the questions (functions without arguments) a second, whatever becomes of those before."""
    began = time.monotonic()
    tasks: list[asyncio.Task[ChatReply]] = []
    for place, question in enumerate(ask):
        await asyncio.sleep(max(0.0, began + place / rate - time.monotonic()))
        tasks.append(asyncio.create_task(question()))
    return list(await asyncio.gather(*tasks))
