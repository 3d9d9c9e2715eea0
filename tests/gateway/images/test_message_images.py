"""Images of messages between dialects, templates and upstreams; the cache of features; hosts that images come from."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from aiohttp import web

from headrace.config import ImagesConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.cache_key import cache_key_for
from headrace.gateway.images.feature_cache import FeatureCache, FeatureKey
from headrace.gateway.images.image_fetch import fetch_image
from headrace.gateway.images.message_images import MARK, decode_data_url, images_of, template_parts, upstream_parts
from headrace.gateway.requests.text_request import TextRequest
from tests.support.running_server import FakeEngine, FakeFleet, asynchronous

PNG = "data:image/png;base64,iVBORw0KGgo="
MESSAGE: dict[str, Any] = {
    "role": "user",
    "content": f"a{MARK}{MARK}b",
    "images": [{"url": PNG, "detail": "low"}, {"url": "https://x/y.png"}],
}


def test_parts_keep_the_order_of_texts_and_images() -> None:
    text, image = {"type": "text"}, {"type": "image"}
    assert template_parts(MESSAGE) == [{**text, "text": "a"}, image, image, {**text, "text": "b"}]
    assert template_parts({"content": f"a{MARK}"}) == [{**text, "text": f"a{MARK}"}]
    assert upstream_parts(MESSAGE) == [
        {**text, "text": "a"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {**text, "text": "b"},
    ]
    assert images_of([{"role": "user", "content": "x"}, MESSAGE]) == MESSAGE["images"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,", "empty"),
        (f"data:image/png;base64,{base64.b64encode(bytes(101)).decode()}", "larger than 100 bytes"),
    ],
)
def test_a_data_url_out_of_bounds_is_refused(url: str, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        decode_data_url(url, 100)
    assert decode_data_url(f"data:image/png;base64,{base64.b64encode(bytes(100)).decode()}", 100) == bytes(100)


def test_features_are_kept_per_tenant_within_a_bound() -> None:
    cache = FeatureCache(100, "see")
    keys = [FeatureKey(tenant, b"1") for tenant in ("a", "b", "c")]
    assert cache.find(keys[0]) is None
    cache.keep(keys[0], (bytes(40),))
    assert cache.find(keys[0]) == (bytes(40),)
    assert cache.find(keys[1]) is None  # another tenant has not sent it
    cache.keep(keys[1], (bytes(20), bytes(20)))
    cache.find(keys[0])
    cache.keep(keys[2], (bytes(40),))
    assert (cache.find(keys[1]), cache.bytes, len(cache)) == (None, 80, 2)  # the least recently used went
    cache.keep(FeatureKey("d", b"1"), (bytes(101),))
    assert cache.bytes == 80


def test_the_exact_cache_tells_images_apart() -> None:
    served = FakeFleet(FakeEngine()).served["mini"]
    request = TextRequest(model="mini", messages=[MESSAGE])

    def key(images: list[bytes], prompts: list[list[int]] | None, asked: TextRequest = request) -> Any:
        return cache_key_for(tenant="a", served=served, text_request=asked, prompts=prompts, seeded=True, images=images)

    assert key([b"1"], [[1]]).digest == key([b"1"], [[1]]).digest
    assert len({key(images, [[1]]).digest for images in ([], [b"1"], [b"2"], [b"1", b"2"], [b"2", b"1"])}) == 5
    assert key([], None) is None  # what an upstream fetches may change
    inline = [request.but(messages=[{**MESSAGE, "images": [{"url": url}] * 2}]) for url in (PNG, PNG + "AA")]
    assert key([], None, inline[0]).digest != key([], None, inline[1]).digest


@asynchronous
async def test_images_come_from_allowed_hosts_within_bounds() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/good":
                return web.Response(body=b"image")
            case "/long":
                return web.Response(body=bytes(1001))
            case "/redirect":
                return web.Response(status=302, headers={"location": "/good"})
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(bytes(500))
            case _:
                return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host = f"127.0.0.1:{runner.addresses[0][1]}"
    config = ImagesConfig(hosts=(host,), bytes=1000, fetch_s=30.0)
    try:
        assert await fetch_image(f"http://{host}/good", config) == b"image"
        for url, why in (
            (f"http://{host}/long", "larger than 1000 bytes"),
            (f"http://{host}/endless", "larger than 1000 bytes"),
            (f"http://{host}/redirect", "redirect"),
            (f"http://{host}/gone", "status 404"),
            (f"http://user@{host}/good", "no user name"),
            ("http://127.0.0.1:1/good", r"not allowed. Allowed hosts: 127\.0\.0\.1:"),
            ("http://[::1/good", "malformed"),
        ):
            with pytest.raises(ApiError, match=why):
                await fetch_image(url, config)
        with pytest.raises(ApiError, match=r"images\.hosts is empty"):
            await fetch_image(f"http://{host}/good", ImagesConfig())
        with pytest.raises(ApiError, match="cannot be fetched"):
            await fetch_image("http://127.0.0.1:1/good", ImagesConfig(hosts=("127.0.0.1",)))
    finally:
        await runner.cleanup()
