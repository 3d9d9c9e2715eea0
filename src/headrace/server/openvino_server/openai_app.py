"""OpenAiApp: the endpoints of the OpenVINO server, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headrace.errors import RequestError
from headrace.server.http.request_cycle import GONE, Message
from headrace.server.openvino_server.pipeline_thread import FinishReason, OpenVinoGeneration, PipelineThread, TextPieces
from headrace.server.openvino_server.request_body import RequestBody, generation_config, read_body

_BODY_BYTES: Final = 64 * 1024 * 1024  # the gateway bounds bodies; this bounds a mistake
_JSON: Final = [(b"content-type", b"application/json")]
_EVENTS: Final = [(b"content-type", b"text/event-stream")]
_TEXT: Final = [(b"content-type", b"text/plain; version=0.0.4")]

Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Arrival = tuple[list[int], FinishReason | None]


class OpenAiApp:
    def __init__(
        self,
        openvino: Any,
        genai: Any,
        pipeline: Any,
        thread: PipelineThread,
        *,
        name: str,
        key: str,
        context: int | None,
    ) -> None:
        """`key`: what clients must send; empty: nothing. `context`: tokens of prompt and answer; None: unbounded."""
        self._genai = genai
        self._pipeline = pipeline
        self._openvino = openvino
        self._tokenizer = pipeline.get_tokenizer()
        self._vocabulary = len(self._tokenizer.get_vocab_vector())
        self._thread = thread
        self._name = name
        self._key = key
        self._context = context
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            match scope["method"], scope["path"]:
                case "GET", "/health":
                    await self._health(send)
                case "GET", "/metrics":
                    await _reply(send, 200, self._metrics().encode(), _TEXT)
                case "GET", "/v1/models":
                    self._check_key(scope)
                    data = [{"id": self._name, "object": "model", "owned_by": "openvino"}]
                    await _reply(send, 200, msgspec.json.encode({"object": "list", "data": data}))
                case "POST", ("/v1/chat/completions" | "/v1/completions") as path:
                    self._check_key(scope)
                    await self._generate(scope, await _body(receive), send, chat=path.endswith("/chat/completions"))
                case _:
                    raise _RefusalError(404, f"No endpoint {scope['method']} {scope['path'][:200]}.")
        except RequestError as error:
            await _reply(send, 400, _error(str(error), "invalid_request_error", error.parameter))
        except _RefusalError as refusal:
            await _reply(send, refusal.status, _error(str(refusal), "invalid_request_error"))

    async def _health(self, send: Send) -> None:
        if self._thread.broken:
            await _reply(send, 503, _error(self._thread.broken, "server_error"))
        else:
            await _reply(send, 200, b'{"status":"ok"}')

    def _metrics(self) -> str:
        used = self._pipeline.get_metrics().cache_usage / 100.0  # a share
        return (
            f"openvino:requests_running {self._thread.running}\n"
            f"openvino:requests_waiting {self._thread.waiting}\n"
            f"openvino:kv_cache_usage_ratio {used:.6f}\n"
        )

    def _check_key(self, scope: Message) -> None:
        found = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if self._key and not hmac.compare_digest(found, f"Bearer {self._key}".encode()):
            raise _RefusalError(401, "Expected the key of this server as 'authorization: Bearer KEY'.")

    async def _generate(self, scope: Message, data: bytes, send: Send, *, chat: bool) -> None:
        body = read_body(data, chat=chat)
        prompt = await asyncio.to_thread(self._prompt, body)
        length = int(prompt.shape[1])
        room = None if self._context is None else self._context - length
        if room is not None and room < 1:
            raise RequestError(
                f"The prompt has {length} tokens. Expected fewer than {self._context}, the context.",
                parameter="messages" if chat else "prompt",
            )
        config = generation_config(self._genai, body, room)
        if self._thread.broken:
            raise _RefusalError(503, f"The pipeline has failed: {self._thread.broken}")
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()

        def deliver(tokens: list[int], reason: FinishReason | None) -> None:
            loop.call_soon_threadsafe(arrivals.put_nowait, (tokens, reason))

        generation = self._thread.submit(prompt, config, deliver)
        scope["extensions"][GONE](lambda: arrivals.put_nowait(([], "gone")))
        writer = _Writer(self._name, next(self._numbers), send, body, prompt_tokens=length, chat=chat)
        await self._write(writer, generation, arrivals)

    async def _write(self, writer: _Writer, generation: OpenVinoGeneration, arrivals: asyncio.Queue[Arrival]) -> None:
        pieces = TextPieces(self._decode)
        reason: FinishReason | None = None
        try:
            while reason is None:
                tokens, reason = await arrivals.get()
                if generation.rejection:
                    raise RequestError(f"OpenVINO GenAI rejects the request: {generation.rejection}")
                if reason == "error":
                    raise _RefusalError(500, self._thread.broken or "The request does not fit into the KV memory.")
                if reason != "gone":
                    await writer.add(pieces.add(tokens, last=reason is not None), len(tokens))
            if reason != "gone":
                await writer.end(reason)
        except _RefusalError as refusal:
            if not writer.begun:
                raise
            await writer.fail(str(refusal))
        finally:
            self._thread.cancel(generation)

    def _prompt(self, body: RequestBody) -> Any:
        """Return the prompt's tokens, of shape (1, tokens)."""
        if isinstance(body.prompt, list):
            if not all(0 <= token < self._vocabulary for token in body.prompt):
                raise RequestError(f"Expected token ids from 0 to {self._vocabulary - 1}.", parameter="prompt")
            return self._openvino.Tensor(np.array([body.prompt], dtype=np.int64))
        if body.messages is None:
            return self._tokenizer.encode(body.prompt).input_ids
        try:
            text: str = self._tokenizer.apply_chat_template(
                body.messages, add_generation_prompt=True, extra_context=body.chat_template_kwargs
            )
        except RuntimeError as error:
            raise RequestError(f"The chat template rejects the messages: {error}", parameter="messages") from None
        return self._tokenizer.encode(text, add_special_tokens=False).input_ids

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens)) if tokens else ""


class _RefusalError(Exception):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class _Writer:
    """Writes an answer, whole or as events."""

    def __init__(
        self, name: str, number: int, send: Send, body: RequestBody, *, prompt_tokens: int, chat: bool
    ) -> None:
        self.begun = False
        self._send = send
        self._stream = body.stream
        self._include_usage = body.stream_options.include_usage
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._texts: list[str] = []
        kind = "chat.completion" if chat else "text_completion"
        self._event: dict[str, Any] = {
            "id": f"openvino-{number}",
            "object": f"{kind}.chunk" if chat and body.stream else kind,
            "created": int(time.time()),
            "model": name,
        }

    async def add(self, text: str, tokens: int) -> None:
        self._tokens += tokens
        if not self._stream:
            self._texts.append(text)
        elif text:
            await self._push({**self._event, "choices": [self._choice(text, None)]})

    async def end(self, reason: FinishReason) -> None:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
        }
        if not self._stream:
            whole = {**self._event, "choices": [self._choice("".join(self._texts), reason)], "usage": usage}
            await _reply(self._send, 200, msgspec.json.encode(whole))
            return
        await self._push({**self._event, "choices": [self._choice("", reason)]})
        if self._include_usage:
            await self._push({**self._event, "choices": [], "usage": usage})
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": b"data: " + _error(text, "server_error") + b"\n\n"})

    async def _push(self, event: dict[str, Any]) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        data = b"data: " + msgspec.json.encode(event) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _choice(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        found: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if not self._chat:
            return {**found, "text": text}
        if self._stream:
            return {**found, "delta": {"content": text} if text else {}}
        return {**found, "message": {"role": "assistant", "content": text}}


async def _body(receive: Receive) -> bytes:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _RefusalError(400, "The client left before its body was complete.")
        data += message.get("body", b"")
        if len(data) > _BODY_BYTES:
            raise _RefusalError(413, f"The body is longer than {_BODY_BYTES} bytes.")
        if not message.get("more_body"):
            return bytes(data)


async def _reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] = _JSON) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(text: str, kind: str, parameter: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": parameter, "code": None}})
