"""ModelServer: a variant that answers cases over HTTP, and the temporary server of a local model.

A local model is served as users would get it, with its chat template, tool parser and grammars, so both kinds are
measured alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.client.http_client import HttpClient, Target, head_of, request_of
from headrace.bench.client.timed_response import TimedResponse
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.config.toml_text import toml_value
from headrace.errors import RequestError
from headrace.lab.answering.choice_scores import likeliest_choice
from headrace.lab.cases.case import Case
from headrace.lab.comparison.answer import Answer, AnsweredCall
from headrace.models.model_folder import find_model
from headrace.variant import Variant

TIMEOUT_S: Final = 300.0  # of one answer
_CONNECT_S: Final = 10.0
_MOST_CONNECTIONS: Final = 256


class AnswererSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line names: a server, or a local model with its options."""

    name: str  # as given
    url: str = ""  # of a server
    model: str = ""  # that the server is asked for; empty: its default
    variant: Variant | None = None  # of a local model

    @property
    def is_local(self) -> bool:
        return self.variant is not None


def parse_spec(text: str, *, parameter: str, options: Mapping[str, Any] | None = None) -> AnswererSpec:
    """Read `URL[#MODEL]` or `MODEL[@WEIGHTS]`. RequestError for a model that is not on this machine."""
    if text.startswith(("http://", "https://")):
        url, _, model = text.partition("#")
        Target.of(url)
        return AnswererSpec(name=text, url=url, model=model)
    model, at, weights = text.rpartition("@") if "@" in Path(text).name else (text, "", "")
    path = find_model(model)
    given = dict(options or {})
    if at:
        if "weights" in given:
            raise RequestError(f"'{text}' names a precision already. Remove --weights.", parameter=parameter)
        given["weights"] = weights
    return AnswererSpec(name=text, variant=Variant.of(str(path.absolute()), **given))


class ModelServer:
    """Not thread-safe: belongs to one event loop."""

    def __init__(self, url: str, *, model: str = "", key: str = "", connections: int = 32) -> None:
        self._client = HttpClient(
            Target.of(url),
            timeout=TIMEOUT_S,
            connect_timeout=_CONNECT_S,
            most_kept=min(connections, _MOST_CONNECTIONS),
        )
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def check(self) -> None:
        """RequestError if the server does not answer, and choose its first model if none was named."""
        response = await self._client.fetch("GET", "/v1/models", headers=self._headers)
        if response.error or response.status != 200:
            why = response.why or response.error or f"status {response.status}"
            raise RequestError(f"The server at {self._client.target.url} cannot be used: {why}.", parameter="url")
        if not self._model:
            models: Any = msgspec.json.decode(bytes(response.body)).get("data") or [{}]
            self._model = str(models[0].get("id", ""))

    async def answer(self, case: Case) -> Answer:
        """Return the answer; its `error` says why there is none."""
        if case.choices:
            return await likeliest_choice(self._client, self._headers, self._model, case)
        headers = dict(self._headers)
        if case.surface:
            headers["x-headrace-surface"] = case.surface
        if case.priority:
            headers["x-headrace-priority"] = str(case.priority)
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        if self._model:
            body["model"] = self._model
        response = TimedResponse(stream=True, keep_text=True)
        head = head_of(self._client.target, "POST", case.endpoint, headers)
        await self._client.send(request_of(head, msgspec.json.encode(body)), response)
        return answer_of(response)

    async def complete(self, case: Case, **changes: Any) -> tuple[Answer, dict[str, Any]]:
        """Answer a case whole, with further parameters. Return the answer, and its choice as the server wrote it."""
        body = {**case.body, **changes, "stream": False}
        if self._model:
            body["model"] = self._model
        response = await self._client.fetch("POST", case.endpoint, body, self._headers)
        try:
            found: dict[str, Any] = msgspec.json.decode(bytes(response.body), type=dict[str, Any])
        except msgspec.DecodeError:
            found = {}
        if response.error or response.status != 200 or not found.get("choices"):
            why = response.why or response.error or f"status {response.status}"
            return Answer(error=str(found.get("error", {}).get("message") or why)), {}
        choice: dict[str, Any] = found["choices"][0]
        usage: dict[str, Any] = found.get("usage") or {}
        message: dict[str, Any] = choice.get("message") or {"content": choice.get("text")}
        called: list[dict[str, Any]] = message.get("tool_calls") or []
        calls: list[dict[str, Any]] = [each.get("function") or {} for each in called]
        answer = Answer(
            text=message.get("content") or "",
            calls=tuple(AnsweredCall(each.get("name", ""), each.get("arguments", "{}")) for each in calls),
            finish=choice.get("finish_reason") or "",
            prompt_tokens=usage.get("prompt_tokens") or 0,
            output_tokens=usage.get("completion_tokens") or 0,
            e2el_s=response.end - response.start,
        )
        return answer, choice

    def close(self) -> None:
        self._client.close()


def answer_of(response: TimedResponse) -> Answer:
    if response.error == "empty":
        return Answer(finish=response.finish, prompt_tokens=response.prompt_tokens or 0)
    if response.error:
        return Answer(error=f"{response.error}: {response.why}")
    return Answer(
        text="".join(response.content_parts),
        calls=tuple(AnsweredCall(name, arguments) for name, arguments in response.calls()),
        finish=response.finish,
        prompt_tokens=response.prompt_tokens or 0,
        output_tokens=response.output_tokens or 0,
        ttft_s=None if response.first_content is None else response.first_content - response.start,
        e2el_s=response.end - response.start,
    )


@contextlib.asynccontextmanager
async def open_servers(specs: Sequence[AnswererSpec], *, key: str = "") -> AsyncGenerator[list[ModelServer]]:
    """Yield a server for each spec. Local models share one temporary server, which stops at the end. `key`: the API
    key of servers that were given by their URL."""
    local = {f"variant-{place}": spec.variant for place, spec in enumerate(specs) if spec.variant is not None}
    async with contextlib.AsyncExitStack() as stack:
        url = ""
        if local:
            started = await stack.enter_async_context(DrillServer(_config(local), name="lab"))
            url = started.url
        servers: list[ModelServer] = []
        for place, spec in enumerate(specs):
            if spec.is_local:
                server = ModelServer(url, model=f"variant-{place}", key=KEY)
            else:
                server = ModelServer(spec.url, model=spec.model, key=key)
            stack.callback(server.close)
            await server.check()
            servers.append(server)
        yield servers


def _config(local: Mapping[str, Variant]) -> str:
    parts: list[str] = ['\n[cache.exact]\nmode = "off"\n']
    for name, variant in local.items():
        options = {
            field: value
            for field, value in msgspec.structs.asdict(variant).items()
            if field not in ("model", "surfaces") and value != getattr(_DEFAULTS, field)
        }
        parts.append(f'\n[models."{name}"]\npath = {toml_value(variant.model)}\n\n[models."{name}".options]\n')
        parts += [f"{field} = {toml_value(value)}\n" for field, value in options.items()]
    return "".join(parts)


_DEFAULTS: Final = Variant(model="")
