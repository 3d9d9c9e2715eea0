"""What is found out before anything is measured: the model's name, who counts tokens, what words cost, what a chat
template adds.

Owns Prepared. All of it is a few short requests; none is in any figure. Knows nothing of the load.
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

MOST_COUNTS: Final = 2000  # texts that are counted to learn what words cost
MOST_PROBES: Final = 60  # the same where each is a request for an answer


class Preparation(msgspec.Struct, kw_only=True):
    model: str
    prompts: RequestBuilder
    counter: TokenCounter | None  # None: only the server's usage counts
    lengths_by: str  # who counted, in words
    nonce: str
    warnings: list[str]


async def prepare(client: HttpClient, options: BenchmarkOptions, *, made: bool) -> Preparation:
    """`made`: there are prompts to be made, of given lengths. ConnectionError where the server does not answer."""
    warnings: list[str] = []
    headers = dict(options.headers)
    keys = {tenant.name: tenant.key for tenant in options.tenants if tenant.key}
    first = options.tenants[0]
    asking = headers | ({"authorization": f"Bearer {first.key}"} if first.key else {})
    model = options.model or await _first_model(client, asking)
    chat = options.endpoint == "chat"
    probe = _Probe(client, chat, {**_fields(options, model, stream=False), **options.body}, asking)
    counter = await _counter(client, options, model, asking)
    nonce = secrets.token_hex(8) if options.nonce is None else options.nonce
    frames, writer, by = TemplateOverheads(), None, counter.name if counter is not None else ""
    if made:
        shapes = {shape_of(session, chat=chat) for session in _examples(options.tenants)} | {_plain(chat)}
        usages = {shape: await probe.tokens(sample_of(shape)) for shape in shapes}
        told = all(tokens > 0 for tokens in usages.values())
        if counter is None and not told:
            raise HeadraceError(
                "the server tells no usage and has no /tokenize, so that nobody knows how long a prompt is: "
                "give a --tokenizer"
            )
        if counter is not None:
            costs = await measure(counter.count, most=MOST_COUNTS)
        else:
            by = "usage"
            costs = await measure(probe.count, most=MOST_PROBES)
        if not costs.exact:
            warnings.append("no word is known to be one token of the server's: lengths are only near what was asked")
        if told:
            frames = TemplateOverheads(
                {shape: tokens - costs.first * max(1, len(shape)) for shape, tokens in usages.items()}
            )
        else:
            warnings.append("the server tells no usage: prompts are longer than asked by what its chat template adds")
        writer = TextGenerator(costs, seed=options.seed, nonce=nonce)
    prompts = RequestBuilder(
        client.target,
        chat=chat,
        body={**_fields(options, model, stream=options.stream), **options.body},
        headers=headers,
        keys=keys,
        writer=writer,
        frames=frames,
        ignore_eos=options.ignore_eos,
    )
    return Preparation(model=model, prompts=prompts, counter=counter, lengths_by=by, nonce=nonce, warnings=warnings)


def _fields(options: BenchmarkOptions, model: str, *, stream: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model, "stream": stream}
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    if stream:
        fields["stream_options"] = {"include_usage": True}
    return fields


async def _first_model(client: HttpClient, headers: Mapping[str, str]) -> str:
    answer = await client.fetch("GET", "/v1/models", headers=headers)
    _answered(client, answer, "/v1/models")
    try:
        return str(msgspec.json.decode(bytes(answer.body))["data"][0]["id"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise RequestError(f"{client.target.url}/v1/models names no model; give a --model", parameter="model") from None


def problem(what: str, status: int) -> Exception:
    """What a server refuses is our mistake; that it fails, has no time or is not there is its own."""
    refused = 400 <= status < 500 and status not in (408, 429)
    return RequestError(what) if refused else ConnectionError(what)


def _answered(client: HttpClient, answer: TimedResponse, path: str) -> None:
    if answer.error or answer.status != 200:
        raise problem(f"{client.target.url}{path}: {answer.error}: {answer.why}", answer.status)


async def _counter(
    client: HttpClient, options: BenchmarkOptions, model: str, headers: Mapping[str, str]
) -> TokenCounter | None:
    if options.tokenizer is not None:
        return TokenizerCounter(options.tokenizer)
    server = ServerTokenCounter(client, model, headers)
    return server if await server.found() else None


class _Probe:
    """The usage that short answers tell."""

    def __init__(self, client: HttpClient, chat: bool, fields: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self._client = client
        self._path = CHAT if chat else COMPLETIONS
        self._chat = chat
        self._fields = {**fields, "stream": False, "max_tokens": 1}
        self._head = head_of(client.target, "POST", self._path, headers)

    async def tokens(self, said: Mapping[str, Any]) -> int:
        """Of a prompt; 0 where the server does not tell."""
        answer = TimedResponse(stream=False)
        await self._client.ask(request_of(self._head, msgspec.json.encode({**self._fields, **said})), answer)
        _answered(self._client, answer, self._path)
        answer.whole()
        return answer.prompt_tokens or 0

    async def count(self, text: str) -> int:
        return await self.tokens({"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text})


def _plain(chat: bool) -> Shape:
    return ("user",) if chat else ()


def _examples(tenants: Iterable[LoadTenant]) -> list[Session]:
    """A session of each kind that the workloads have."""
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
