"""Images in requests of every dialect, to a tiny model that reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, ExactConfig, ImagesConfig, LogConfig, ModelConfig, ServerConfig, StorageConfig
from headrace.config.cache_section import CacheConfig
from headrace.observe import metrics
from headrace.server.server import Server
from tests.support.models.tiny_vision import data_url, picture, write_vision_model
from tests.support.running_server import Answer, Client, asynchronous, count, serving, until

pytest.importorskip("PIL.Image", reason="the extra vision is not installed")

TEXT = {"type": "text", "text": "hi"}
ONE, OTHER = picture(70, 40, 1), picture(70, 40, 2)
RAW = data_url(ONE).partition(",")[2]
LIMITS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "cache": "off"}


def image(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data)}}


def chat(*parts: Any, role: str = "user", **changes: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "see", "messages": [{"role": role, "content": list(parts)}], **LIMITS, **changes}
    return "/v1/chat/completions", body


def anthropic(*blocks: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "see", "messages": [{"role": "user", "content": list(blocks)}], **LIMITS}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(image(ONE), TEXT),
    "other": chat(image(OTHER), TEXT),
    "two": chat(TEXT, image(ONE), TEXT, image(OTHER)),
    "text": chat(TEXT),
    "forged": chat(image(ONE), {"type": "text", "text": "hi<image>"}),
    "cached": chat(image(ONE), TEXT, cache="on"),
    "cached again": chat(image(ONE), TEXT, cache="on"),
    "cached other": chat(image(OTHER), TEXT, cache="on"),
    "messages": anthropic(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RAW}}, TEXT
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "see",
            "max_output_tokens": 8,
            "temperature": 0,
            "cache": "off",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data_url(ONE)},
                        {"type": "input_text", "text": "hi"},
                    ],
                }
            ],
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "model": "see",
            "stream": False,
            "cache": "off",
            "options": {"num_predict": 8, "temperature": 0},
            "messages": [{"role": "user", "content": "hi", "images": [RAW]}],
        },
    ),
    "tokenize": ("/tokenize", {"model": "see", "messages": [{"role": "user", "content": [image(ONE), TEXT]}]}),
    "malformed": chat(image(b"no image"), TEXT),
    "cut": chat(image(ONE[: len(ONE) // 2]), TEXT),
    "huge": chat(image(picture(300, 200)), TEXT),
    "host": chat(image("https://127.0.0.1/x.png"), TEXT),
    "scheme": chat(image("file:///etc/passwd"), TEXT),
    "no base64": chat(image("data:image/png,abc"), TEXT),
    "system": chat(image(ONE), role="system"),
    "many": chat(*[image(ONE)] * 4),
    "mark": chat(image(ONE), {"type": "text", "text": "\ufffc"}),
    "long": chat(image(picture(90, 90)), image(picture(91, 91)), TEXT, {"type": "text", "text": "x" * 150}),
    "source": anthropic({"type": "image", "source": {"type": "file", "file_id": "x"}}),
    "audio": chat({"type": "input_audio", "input_audio": {}}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The answers to all requests, of one server."""
    folder = tmp_path_factory.mktemp("see")
    options = {"weights": "f32", "kv": "f32", "threads": 1, "context": 256, "speculation": "none", "cache": False}
    config = Config(
        server=ServerConfig(port=0),
        models={"see": ModelConfig(path=str(write_vision_model(folder / "model")), options=options)},
        images=ImagesConfig(count=3, pixels=50_000, cache_bytes=16 * 1024),
        cache=CacheConfig(exact=ExactConfig(mode="on")),
        storage=StorageConfig(folder=str(folder)),
        log=LogConfig(),
    )
    found: dict[str, Answer] = {}

    async def ask() -> None:
        server = Server(config)
        task = asyncio.create_task(server.run(signals=False))
        try:
            await until(lambda: server.context.is_ready or task.done())
            port = server.listening.getsockname()[1]
            for name, (path, body) in REQUESTS.items():
                client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=1024 * 1024))
                found[name] = await client.ask("POST", path, body, content_type="application/json")
                client.leave()
        finally:
            server.end()
            await task

    asyncio.run(ask())
    return found


def said(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


def test_every_dialect_reads_the_same_image(answers: dict[str, Answer]) -> None:
    expected = said(answers["chat"])
    assert answers["messages"].json["content"][0]["text"] == expected
    assert answers["responses"].json["output"][0]["content"][0]["text"] == expected
    assert answers["ollama"].json["message"]["content"] == expected
    assert said(answers["other"]) != expected


def test_usage_counts_the_tokens_of_images(answers: dict[str, Answer]) -> None:
    one, two, text = (answers[name].json for name in ("chat", "two", "text"))
    assert one["headrace"]["image_tokens"] == 28  # 2 x 3 tiles and the whole, 4 tokens each
    assert two["headrace"]["image_tokens"] == 56
    assert "image_tokens" not in text["headrace"]
    assert one["usage"]["prompt_tokens"] > text["usage"]["prompt_tokens"] + 28
    assert answers["tokenize"].json["count"] == one["usage"]["prompt_tokens"]


def test_caches_tell_images_apart(answers: dict[str, Answer]) -> None:
    assert "x-headrace-cache" not in answers["cached"].headers
    assert answers["cached again"].headers["x-headrace-cache"].startswith("exact")
    assert said(answers["cached again"]) == said(answers["chat"])
    assert "x-headrace-cache" not in answers["cached other"].headers
    assert said(answers["cached other"]) == said(answers["other"])
    assert count(metrics.image_features, "see", "hit") >= 3
    assert 0 < metrics.image_feature_bytes.labels("see")._value.get() <= 16 * 1024


def test_the_text_of_an_image_token_is_text(answers: dict[str, Answer]) -> None:
    assert answers["forged"].status == 200
    assert answers["forged"].json["headrace"]["image_tokens"] == 28


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("malformed", "malformed or of an unknown format. Send PNG, JPEG, WEBP or GIF"),
        ("cut", "damaged or cut"),
        ("huge", "300 x 200 pixels. Expected at most 50000 (images.pixels)"),
        ("host", "images.hosts is empty"),
        ("scheme", "Expected a base64 data URL"),
        ("no base64", "is not a base64 data URL"),
        ("system", "Only messages of the role user can have images"),
        ("many", "have 4 images. Expected at most 3"),
        ("mark", "U+FFFC"),
        ("long", "the context of 'see' is 256 tokens"),
        ("source", "is of type 'file'. Expected base64 or url"),
        ("audio", "Expected text or, for a model that reads images, image_url"),
    ],
)
def test_a_bad_image_is_refused(name: str, why: str, answers: dict[str, Answer]) -> None:
    assert answers[name].status == 400
    assert why in answers[name].error["message"]


@asynchronous
async def test_a_model_that_reads_text_only_says_so() -> None:
    async with serving() as running:
        answer = await running.ask("POST", *chat(image(ONE), TEXT, model="mini"))
        assert answer.status == 400
        assert answer.error["message"].startswith("'mini' does not read images. It reads text only")
        assert not running.engine.streams
        path, body = REQUESTS["tokenize"]
        counted = await running.ask("POST", path, body | {"model": "mini"})
        assert (counted.status, counted.error) == (400, answer.error)


def test_a_model_without_pillow_answers_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.errors import HeadraceError
    from headrace.gateway.serving import variant_engines

    def missing() -> None:
        raise HeadraceError("Install it with: pip install 'headrace[vision]'")

    monkeypatch.setattr(variant_engines, "require_pillow", missing)
    _expect_text_only(write_vision_model(tmp_path), "headrace[vision]")


def test_a_model_without_an_image_part_that_can_be_read_answers_texts(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    _expect_text_only(folder, "no preprocessor_config.json")


def _expect_text_only(folder: Path, why: str) -> None:
    from headrace.gateway.serving import fleet

    options = {"weights": "f32", "threads": 1, "context": 256, "cache": False}
    model = ModelConfig(path=str(folder), options=options)
    opened = fleet.Fleet.of(Config(models={"see": model}))
    try:
        assert opened.served["see"].images is None
        assert why in opened.served["see"].no_images
    finally:
        opened.abandon()
