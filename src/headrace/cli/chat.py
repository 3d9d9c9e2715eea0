"""`headrace chat`: a conversation in the terminal, with the speed of each answer.

Answers come from an engine in this process, or from any OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from cyclopts import Parameter
from rich.console import Console

from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SamplingParams
from headrace.errors import HeadraceError, RequestError
from headrace.llm import LLM
from headrace.models.precision import AUTO
from headrace.variant import DEFAULT_MODEL

_HELP = "/reset starts over, /system TEXT sets the system message, /quit exits. Ctrl-C stops an answer."


@dataclass(slots=True)
class AnswerTimings:
    """Tokens and times of one answer; from a server, as it reports them."""

    tokens: int = 0
    cached: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


@dataclass(slots=True)
class ChatSession:
    """The conversation so far."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]


class ChatBackend(Protocol):
    def answer(self, messages: list[dict[str, str]], timings: AnswerTimings) -> Iterator[str]:
        """Yield the answer in pieces; `timings` is complete at its end."""
        ...

    def close(self) -> None: ...


class LocalBackend:
    """A model that runs in this process."""

    def __init__(self, model: str, max_tokens: int, sampling: SamplingParams, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._max_tokens = max_tokens
        self._sampling = sampling

    def answer(self, messages: list[dict[str, str]], timings: AnswerTimings) -> Iterator[str]:
        tokenizer = self._llm.tokenizer
        prompt = tokenizer.encode(tokenizer.apply_template(messages), add_special_tokens=False)
        room = self._llm.opened.executor.capacity.context - len(prompt)
        if room < 1:
            raise RequestError("The conversation fills the model's context. Type /reset to start over.")
        most = min(self._max_tokens, room)
        for output in self._llm.stream(prompt, max_tokens=most, sampling=self._sampling, surface="chat"):
            timings.tokens += len(output.tokens)
            if output.text:
                yield output.text
            if output.ending is not None:
                if output.ending.finish is FinishReason.FAILED:
                    raise HeadraceError(output.ending.why)
                usage = output.ending.usage
                timings.cached = usage.cached_tokens
                timings.queue_ms, timings.prefill_ms = usage.queue_s * 1e3, usage.prefill_s * 1e3
                timings.decode_ms = usage.decode_s * 1e3

    def close(self) -> None:
        self._llm.close()


class RemoteBackend:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, key: str | None, max_tokens: int, sampling: SamplingParams) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._body: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            self._body["model"] = model
        self._runner = asyncio.Runner()

    def answer(self, messages: list[dict[str, str]], timings: AnswerTimings) -> Iterator[str]:
        pieces = self._pieces(messages, timings)
        try:
            while (piece := self._runner.run(_next(pieces))) is not None:
                yield piece
        finally:
            self._runner.run(pieces.aclose())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]

    async def _pieces(self, messages: list[dict[str, str]], timings: AnswerTimings) -> AsyncIterator[str]:
        import aiohttp

        body = {**self._body, "messages": messages}
        try:
            async with (
                aiohttp.ClientSession(read_bufsize=1024 * 1024) as session,
                session.post(self._url, json=body, headers=self._headers) as reply,
            ):
                if reply.status != 200:
                    raise HeadraceError(_error_message(await reply.text(), reply.status))
                async for line in reply.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise HeadraceError(chunk["error"]["message"])
                    _take_timings(chunk, timings)
                    for choice in chunk.get("choices", ()):
                        delta = choice["delta"]
                        if text := (delta.get("reasoning_content") or "") + (delta.get("content") or ""):
                            yield text
        except aiohttp.ClientError as error:
            raise HeadraceError(f"{self._url}: {error}") from None

    def close(self) -> None:
        self._runner.close()


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


def _take_timings(chunk: dict[str, Any], timings: AnswerTimings) -> None:
    if usage := chunk.get("usage"):
        timings.tokens = usage["completion_tokens"]
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        timings.cached = details.get("cached_tokens")
    if own := chunk.get("headrace"):
        timings.queue_ms, timings.prefill_ms, timings.decode_ms = own["queue_ms"], own["prefill_ms"], own["decode_ms"]


def _error_message(text: str, status: int) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {status}."


def chat(
    model: str | None = None,
    /,
    *,
    url: str | None = None,
    system: Annotated[str, Parameter(name=["--system", "-s"])] = "",
    max_tokens: Annotated[int, Parameter(name=["--max-tokens", "-n"])] = 1024,
    temperature: float = 0.0,
    seed: int = 0,
    weights: str = AUTO,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
) -> None:
    """Chat with a model in the terminal.

    Usage: headrace chat, or headrace chat --url http://localhost:8000

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name. With --url, the name of one
        of the server's models.
    url
        OpenAI-compatible server to use instead of an engine in this process. The API key is read from OPENAI_API_KEY.
    system
        System message.
    max_tokens
        Maximum tokens of an answer.
    temperature
        0 always takes the most likely token; higher values sample.
    seed
        Seed for sampling.
    weights
        Precision of the weights: auto (bf16, or what keeps the weights of a quantised file), f32, bf16, fp8, int8,
        int4, int3 or int2.
    threads
        Threads to compute with. Default: the machine's cores.
    """
    sampling = SamplingParams(temperature=temperature, seed=seed)
    if url is not None:
        backend: ChatBackend = RemoteBackend(url, model, os.environ.get("OPENAI_API_KEY"), max_tokens, sampling)
    else:
        backend = LocalBackend(model or DEFAULT_MODEL, max_tokens, sampling, weights=weights, threads=threads)
    try:
        _converse(backend, ChatSession(system))
    finally:
        backend.close()


def _converse(backend: ChatBackend, conversation: ChatSession) -> None:
    console = Console(highlight=False)
    if sys.stdin.isatty():
        console.print(_HELP, style="dim")
    while True:
        try:
            line = console.input("[bold cyan]>[/] ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        if not line:
            return
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            conversation.turns.clear()
        elif text.startswith("/system"):
            conversation.system = text.removeprefix("/system").strip()
        elif text.startswith("/"):
            console.print(_HELP, style="dim")
        elif text:
            _answer(backend, conversation, text, console)


def _answer(backend: ChatBackend, conversation: ChatSession, text: str, console: Console) -> None:
    """Send one question and print its answer. A stopped or failed answer does not join the conversation."""
    timings, answer = AnswerTimings(), ""
    began = time.perf_counter()
    first = 0.0
    question = {"role": "user", "content": text}
    pieces = backend.answer([*conversation.messages, question], timings)
    try:
        for piece in pieces:
            first = first or time.perf_counter()
            answer += piece
            console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        return
    except HeadraceError as error:
        console.print(str(error), style="red", markup=False)
        return
    finally:
        pieces.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    console.print()
    console.print(_speed(timings, first - began, time.perf_counter() - first), style="dim", soft_wrap=True)
    conversation.turns += [question, {"role": "assistant", "content": answer}]


def _speed(timings: AnswerTimings, ttft: float, rest: float) -> str:
    parts = [f"{timings.tokens} tokens", f"first after {ttft * 1e3:.0f} ms"]
    if timings.tokens > 1 and rest > 0:
        parts.append(f"then {(timings.tokens - 1) / rest:.0f} tokens/s")
    stages = {"queue": timings.queue_ms, "prefill": timings.prefill_ms, "decode": timings.decode_ms}
    parts += [f"{name} {value:.0f} ms" for name, value in stages.items() if value is not None]
    if timings.cached:
        parts.append(f"{timings.cached} of the prompt cached")
    return ", ".join(parts)
