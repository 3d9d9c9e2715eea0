"""Where /metrics and /docs are served, and to whom."""

from __future__ import annotations

import asyncio

from headrace.config import KeyConfig
from tests.support.limited_server import bearer
from tests.support.running_server import Client, asynchronous, serving

KEYS = (
    KeyConfig(name="site", key="key-of-site"),
    KeyConfig(name="ops", key="key-of-ops", admin="read"),
)
INTERNAL = ("/metrics", "/docs", "/openapi.json")


@asynchronous
async def test_metrics_and_docs_are_open_by_default() -> None:
    async with serving(keys=KEYS) as running:
        for path in INTERNAL:
            assert (await running.ask("GET", path)).status == 200, path


@asynchronous
async def test_metrics_need_an_administrators_key_where_configured() -> None:
    async with serving(keys=KEYS, metrics_need_key=True, docs_need_key=True) as running:
        for path in INTERNAL:
            assert (await running.ask("GET", path)).status == 401, path
        for path in INTERNAL[1:]:
            assert (await running.ask("GET", path, **bearer("site"))).status == 200, path
        refused = await running.ask("GET", "/metrics", **bearer("site"))
        assert (refused.status, refused.error["code"]) == (403, "no_admin")
        answer = await running.ask("GET", "/metrics", **bearer("ops"))
        assert answer.status == 200
        assert b"headrace_connections" in answer.body
        assert (await running.ask("GET", "/health/live")).status == 200


@asynchronous
async def test_an_internal_port_takes_them_over() -> None:
    async with serving(internal_port=0) as running:
        for path in INTERNAL:
            assert (await running.ask("GET", path)).status == 404, path
        listening = running.server.internal_listening
        assert listening is not None
        for path in (*INTERNAL, "/v1/models"):
            client = Client(*await asyncio.open_connection("127.0.0.1", listening.getsockname()[1]))
            answer = await client.ask("GET", path)
            assert answer.status == (200 if path in INTERNAL else 404), path
            client.leave()
        document = await _internal(listening.getsockname()[1], "/openapi.json")
        assert "/v1/models" in document
    assert listening.fileno() == -1


async def _internal(port: int, path: str) -> str:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    answer = await client.ask("GET", path)
    client.leave()
    return answer.body.decode()
