"""Requests that reserve no tokens count towards the limits on requests: other endpoints, mistakes, addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import LimitSet
from headrace.gateway.limits.limit_errors import LimitError
from headrace.gateway.limits.limit_scopes import LimitScope
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.limits.request_charges import RequestCharges
from tests.support.clock import Clock
from tests.support.limited_server import bearer, key, served
from tests.support.running_server import CHAT, asynchronous

OTHER_ENDPOINTS: list[tuple[str, str, Any]] = [
    ("POST", "/tokenize", {"prompt": "Hello"}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    ("POST", "/v1/messages/count_tokens", {"model": "mini", "messages": [{"role": "user", "content": "a"}]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/files", None),
    ("GET", "/v1/batches", None),
    ("GET", "/v1/responses/resp_1", None),
]
MISTAKES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", CHAT | {"model": "nothing"}),
    ("/v1/chat/completions", CHAT | {"temperature": 9}),
    ("/v1/completions", {}),
    ("/v1/responses", {"input": []}),
    ("/v1/messages", {"messages": []}),
    ("/v1/embeddings", {"input": 5}),
    ("/v1/rerank", {}),
    ("/v1/score", {}),
]


def charges(clock: Clock, **options: Any) -> RequestCharges:
    limiter = RateLimiter(local=LocalLimitStore(clock=clock), clock=clock, sleep=clock.sleep)
    return RequestCharges(limiter, clock=clock, **options)


@asynchronous
async def test_a_request_counts_for_its_tenant_and_its_key() -> None:
    made = charges(Clock())
    tenant = LimitScope("tenant", "acme", LimitSet(requests_per_s=3))
    one, two = (LimitScope("key", name, LimitSet(requests_per_min=2)) for name in ("one", "two"))
    await made.charge((tenant, one), "acme", closed=False)
    await made.charge((tenant, one), "acme", closed=False)
    with pytest.raises(LimitError) as raised:
        await made.charge((tenant, one), "acme", closed=False)
    assert raised.value.code == "key_requests_per_min"
    await made.charge((tenant, two), "acme", closed=False)
    with pytest.raises(LimitError) as raised:
        made.check((tenant, two))
    assert (raised.value.code, raised.value.retry_after) == ("tenant_requests_per_s", 1.0)


@asynchronous
async def test_a_check_counts_nothing() -> None:
    made = charges(Clock())
    scope = LimitScope("key", "one", LimitSet(requests_per_s=1))
    for _ in range(5):
        made.check((scope,))
    await made.charge((scope,), "", closed=False)
    with pytest.raises(LimitError):
        made.check((scope,))


@asynchronous
async def test_other_limits_of_the_scope_are_untouched() -> None:
    clock = Clock()
    made = charges(clock)
    limits = LimitSet(requests_per_s=9, concurrent=1, input_tokens_per_min=10, output_tokens_per_min=10)
    scope = LimitScope("key", "one", limits)
    running = await made._limiter.reserve((scope,), input_tokens=9, most_output=9)
    await made.charge((scope,), "", closed=False)  # although one runs, as many as may
    await running.settle(9, 9)
    for window in running._grant.statuses():
        assert window.left == {"requests": 7, "input_tokens": 1, "output_tokens": 1}[window.window.meter]


@asynchronous
async def test_an_address_has_a_limit_of_its_own() -> None:
    clock = Clock()
    made = charges(clock, address_requests_per_s=2)
    made.charge_address("192.0.2.1")
    made.check_address("192.0.2.1")
    made.charge_address("192.0.2.1")
    for attempt in (made.charge_address, made.check_address):
        with pytest.raises(LimitError) as raised:
            attempt("192.0.2.1")
        assert (raised.value.status, raised.value.code) == (429, "address_requests_per_s")
    made.charge_address("192.0.2.2")
    made.charge_address("")  # a Unix socket
    clock.now += 1.0
    made.charge_address("192.0.2.1")


@asynchronous
async def test_every_endpoint_is_charged(tmp_path: Path) -> None:
    limits = LimitSet(requests_per_min=len(OTHER_ENDPOINTS))
    async with served(tmp_path, keys=(key("site", limits=limits),)) as running:
        for method, path, body in OTHER_ENDPOINTS:
            answer = await running.ask(method, path, body, **bearer("site"))
            assert answer.status in (200, 404), (path, answer.body)
        for method, path, body in OTHER_ENDPOINTS:
            answer = await running.ask(method, path, body, **bearer("site"))
            assert answer.status == 429, path
            assert "key's limit of 7 requests per minute" in answer.error["message"]
        assert (await running.chat_as("site")).status == 429
        assert (await running.ask("GET", "/v1/models", **bearer("root"))).status == 200


@asynchronous
async def test_every_mistake_is_charged_and_then_refused_before_its_body_is_read(tmp_path: Path) -> None:
    limits = LimitSet(requests_per_min=len(MISTAKES))
    async with served(tmp_path, keys=(key("site", limits=limits),)) as running:
        for path, body in MISTAKES:
            answer = await running.ask("POST", path, body, **bearer("site"))
            assert answer.status in (400, 404), (path, answer.body)
        for path, _ in MISTAKES:
            client = await running.client()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key-of-site\r\n"
            await client.send(f"{head}content-length: 5000000\r\n\r\n".encode())  # and the body never comes
            answer = await client.answer()
            assert answer.status == 429, path


@asynchronous
async def test_an_answer_counts_once(tmp_path: Path) -> None:
    async with served(tmp_path, keys=(key("site", limits=LimitSet(requests_per_min=3)),)) as running:
        running.says(2)
        for left in (2, 1):
            answer = await running.chat_as("site")
            assert answer.status == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert (await running.chat_as("site", temperature=9)).status == 400
        refused = await running.chat_as("site")
        assert refused.status == 429
        running.clock.now += 60.0
        assert (await running.chat_as("site")).status == 200


@asynchronous
async def test_a_refusal_by_a_limit_does_not_count(tmp_path: Path) -> None:
    limits = LimitSet(requests_per_min=2, input_tokens_per_min=1)
    async with served(tmp_path, keys=(key("site", limits=limits),)) as running:
        for _ in range(5):
            assert (await running.chat_as("site")).error["code"] == "key_input_tokens_per_min"
        assert (await running.ask("GET", "/v1/models", **bearer("site"))).status == 200
