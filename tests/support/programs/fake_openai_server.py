"""A tiny server with OpenAI's endpoints in a thread of its own, and one that does with a connection what a test says.

A token of it is a word. It answers at once: nothing here takes time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.client.http_client import HttpClient, Target, head_of, request_of
from headrace.bench.client.timed_response import TimedResponse

Handler = Callable[["Heard", asyncio.StreamWriter], Awaitable[None]]
LONG = 60.0  # seconds after which a test has failed


@dataclass(frozen=True)
class Heard:
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def prompt(self) -> str:
        """All that the request says, message by message."""
        messages = self.body.get("messages")
        return self.body["prompt"] if messages is None else " ".join(each["content"] for each in messages)


class Fake:
    """A server; `with` starts it on a free port and ends it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self.heard: list[Heard] = []
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Heard]:
        return [heard for heard in self.heard if heard.path == path]

    def __enter__(self) -> Fake:
        self._thread.start()
        assert self._ready.wait(LONG)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LONG)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = dict(line.split(": ", 1) for line in lines[1:-2])
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                heard = Heard(method, path, headers, raw)
                self.heard.append(heard)
                await self._handler(heard, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the test is over, or the client has gone
        finally:
            writer.close()


def whole(value: Any, *, status: int = 200) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = "[DONE]"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def delta(text: str = "", *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": finish}]}


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


@dataclass
class OpenAI:
    """The handler of a server that knows its manners, as far as its fields let it."""

    usage: bool = True
    tokenize: bool = True
    lie: float = 1.0  # what it says of output tokens, as a multiple of the truth
    knows_eos: bool = True  # it honours ignore_eos
    silent_past: int = 1_000_000  # tokens after which it writes no text, though they count
    ends_after: int = 5  # tokens, unless ignore_eos is honoured
    refuse_each: int = 0  # every so many requests get 429
    by_chunk: int = 1  # tokens of a chunk
    seconds: float = 0.0  # before it answers
    told: dict[str, Any] | None = None
    _count: int = field(default=0, init=False)

    async def __call__(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/v1/models":
            writer.write(whole({"data": [{"id": "words"}]}))
        elif heard.path == "/tokenize":
            found = {"tokens": list(range(len(heard.body.get("prompt", "").split())))}
            writer.write(whole(found) if self.tokenize else whole(error("no such path"), status=404))
        elif heard.path in ("/v1/chat/completions", "/v1/completions"):
            self._count += 1
            if self.refuse_each and self._count % self.refuse_each == 0:
                writer.write(whole(error("too many"), status=429))
            else:
                await asyncio.sleep(self.seconds)
                writer.write(self._answer(heard.body))
        else:
            writer.write(whole(error("no such path"), status=404))

    def _answer(self, body: dict[str, Any]) -> bytes:
        chat = "messages" in body
        texts = [each["content"] for each in body["messages"]] if chat else [body["prompt"]]
        # A template that adds two tokens to a chat, and three to each of its messages.
        prompt = sum(len(text.split()) for text in texts) + (2 + 3 * len(texts) if chat else 0)
        count = body.get("max_tokens", 16)
        if not body.get("ignore_eos") or not self.knows_eos:
            count = min(count, self.ends_after)
        words = [f"w{place} " if place < self.silent_past else "" for place in range(count)]
        usage = {"prompt_tokens": prompt, "completion_tokens": round(count * self.lie)}
        if not body.get("stream"):
            said = "".join(words)
            choice = {"message": {"content": said}} if chat else {"text": said}
            found: dict[str, Any] = {"choices": [{**choice, "finish_reason": "length"}]}
            return whole(found | ({"usage": usage} if self.usage else {}) | self._own())
        parts = [chunk(event(delta(role="assistant") if chat else {"choices": [{"text": ""}]}))]
        for place in range(0, count, self.by_chunk):
            text = "".join(words[place : place + self.by_chunk])
            finish = "length" if place + self.by_chunk >= count else None
            value = delta(text, finish=finish) if chat else {"choices": [{"text": text, "finish_reason": finish}]}
            parts.append(chunk(event(value)))
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            parts.append(chunk(event({"choices": [], "usage": usage} | self._own())))
        return b"".join([STREAM_HEAD, *parts, chunk(event(DONE)), END])

    def _own(self) -> dict[str, Any]:
        return {} if self.told is None else {"headrace": self.told}


def says(*parts: bytes, close: bool = False) -> Handler:
    """Answers every request with the same bytes."""

    async def handler(_: Heard, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)  # as far as one can tell, a packet each
        if close:
            writer.close()

    return handler


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_it(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*arguments, **named), LONG)

        asyncio.run(bounded())

    return run_it


def client_of(url: str, **options: Any) -> HttpClient:
    usual: dict[str, Any] = {"timeout": 20.0, "connect_timeout": 5.0, "most_kept": 8}
    return HttpClient(Target.of(url), **(usual | options))


async def asked(client: HttpClient, *, stream: bool = True, body: dict[str, Any] | None = None) -> TimedResponse:
    head = head_of(client.target, "POST", "/v1/chat/completions", {})
    sent = {"messages": [{"role": "user", "content": "hello"}], "stream": stream, "max_tokens": 4, "ignore_eos": True}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = TimedResponse(stream=stream, keep_text=True)
    await client.send(request_of(head, json.dumps(body or sent | options).encode()), answer)
    if not stream:
        answer.read_whole()
    return answer
