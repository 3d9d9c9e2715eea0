"""Prepares a benchmark: finds the model's name, a token counter, the tokens of words and of the chat template.

Sends a few short requests, which are not measured.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.bench.client.http_client import HttpClient, head_of, request_of
from headrace.bench.client.timed_response import TimedResponse
from headrace.bench.load_generator.benchmark_options import BenchmarkOptions, LoadTenant
from headrace.bench.load_generator.request_builder import (
    CHAT,
    COMPLETIONS,
    RequestBuilder,
    Shape,
    TemplateOverheads,
    sample_of,
    shape_of,
)
from headrace.bench.load_generator.text_generator import FIRST, TextGenerator, measure
from headrace.bench.load_generator.token_counters import ServerTokenCounter, TokenCounter, TokenizerCounter
from headrace.bench.load_generator.workloads import ConversationTurn, PrefixKind, PromptPrefix, Session
from headrace.errors import HeadraceError, RequestError

MOST_COUNTS: Final = 2000  # texts counted to learn the tokens of words
MOST_PROBES: Final = 60  # the same, if each takes a generation request


class Preparation(msgspec.Struct, kw_only=True):
    model: str
    prompts: RequestBuilder
    counter: TokenCounter | None  # None: only the server's usage is known
    lengths_by: str  # description of the counter
    nonce: str
    warnings: list[str]


async def prepare(client: HttpClient, options: BenchmarkOptions, *, made: bool) -> Preparation:
    """Prepare a run; `made`: prompts of given lengths must be generated.

    Raises ConnectionError if the server does not answer, RequestError if it rejects our requests.
    """
    warnings: list[str] = []
    headers = dict(options.headers)
    keys = {tenant.name: tenant.key for tenant in options.tenants if tenant.key}
    first = options.tenants[0]
    auth = headers | ({"authorization": f"Bearer {first.key}"} if first.key else {})
    model = options.model or await _find_model(client, auth)
    chat = options.endpoint == "chat"
    probe = _Probe(client, chat, {**_common_fields(options, model, stream=False), **options.body}, auth)
    counter = await _counter(client, options, model, auth)
    nonce = secrets.token_hex(8) if options.nonce is None else options.nonce
    frames, writer, by = TemplateOverheads(), None, counter.name if counter is not None else ""
    if made:
        shapes = {shape_of(session, chat=chat) for session in _examples(options.tenants)} | {_plain(chat)}
        usages = {shape: await probe.tokens(sample_of(shape)) for shape in shapes}
        has_usage = all(tokens > 0 for tokens in usages.values())
        if counter is None and not has_usage:
            raise HeadraceError(
                "The server reports no usage and has no /tokenize, so prompts cannot be measured. Pass --tokenizer."
            )
        if counter is not None:
            costs = await measure(counter.count, most=MOST_COUNTS)
        else:
            by = "usage"
            costs = await measure(probe.count, most=MOST_PROBES)
        if not costs.exact:
            warnings.append(
                "No word is a single token for this server: prompt lengths are only close to the requested ones."
            )
        if has_usage:
            frames = TemplateOverheads(
                {shape: tokens - costs.first * max(1, len(shape)) for shape, tokens in usages.items()}
            )
        else:
            warnings.append(
                "The server reports no usage: prompts are longer than requested by the tokens of its chat template."
            )
        writer = TextGenerator(costs, seed=options.seed, nonce=nonce)
    prompts = RequestBuilder(
        client.target,
        chat=chat,
        body={**_common_fields(options, model, stream=options.stream), **options.body},
        headers=headers,
        keys=keys,
        writer=writer,
        frames=frames,
        ignore_eos=options.ignore_eos,
    )
    return Preparation(model=model, prompts=prompts, counter=counter, lengths_by=by, nonce=nonce, warnings=warnings)


def _common_fields(options: BenchmarkOptions, model: str, *, stream: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model, "stream": stream}
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    if stream:
        fields["stream_options"] = {"include_usage": True}
    return fields


async def _find_model(client: HttpClient, headers: Mapping[str, str]) -> str:
    response = await client.fetch("GET", "/v1/models", headers=headers)
    _require_ok(client, response, "/v1/models")
    try:
        return str(msgspec.json.decode(bytes(response.body))["data"][0]["id"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise RequestError(f"{client.target.url}/v1/models lists no model. Pass --model.", parameter="model") from None


def server_error(message: str, status: int) -> Exception:
    """Return a RequestError if the server rejected our request, a ConnectionError if it failed, was busy or is down."""
    rejected = 400 <= status < 500 and status not in (408, 429)
    return RequestError(message) if rejected else ConnectionError(message)


def _require_ok(client: HttpClient, response: TimedResponse, path: str) -> None:
    if response.error or response.status != 200:
        raise server_error(f"{client.target.url}{path}: {response.error}: {response.why}", response.status)


async def _counter(
    client: HttpClient, options: BenchmarkOptions, model: str, headers: Mapping[str, str]
) -> TokenCounter | None:
    if options.tokenizer is not None:
        return TokenizerCounter(options.tokenizer)
    server = ServerTokenCounter(client, model, headers)
    return server if await server.detect() else None


class _Probe:
    """Counts prompt tokens by the usage of one-token generations."""

    def __init__(self, client: HttpClient, chat: bool, fields: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self._client = client
        self._path = CHAT if chat else COMPLETIONS
        self._chat = chat
        self._fields = {**fields, "stream": False, "max_tokens": 1}
        self._head = head_of(client.target, "POST", self._path, headers)

    async def tokens(self, prompt: Mapping[str, Any]) -> int:
        """Return the tokens of a prompt; 0 if the server reports none."""
        response = TimedResponse(stream=False)
        await self._client.send(request_of(self._head, msgspec.json.encode({**self._fields, **prompt})), response)
        _require_ok(self._client, response, self._path)
        response.read_whole()
        return response.prompt_tokens or 0

    async def count(self, text: str) -> int:
        return await self.tokens({"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text})


def _plain(chat: bool) -> Shape:
    return ("user",) if chat else ()


def _examples(tenants: Iterable[LoadTenant]) -> list[Session]:
    """Return one session for each kind of shared prefix in the workloads."""
    kinds: set[PrefixKind | None] = {
        workload.shared.kind if workload.shared is not None else None
        for tenant in tenants
        for workload, _ in tenant.mix
    }
    return [
        Session(
            number=0,
            turns=(ConversationTurn(1, 1),),
            name="",
            prefix=PromptPrefix(FIRST, kind, 1) if kind is not None else None,
        )
        for kind in kinds
    ]
