"""How an upstream is reached: certificates are checked, proxies are used where asked for, and vectors come back."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.upstream_section import UpstreamConfig, UpstreamFeatures
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.upstream_answers.upstream_embeddings import count_embedding_tokens, embed_texts
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import UpstreamError
from tests.support.fake_upstream import (
    ANSWER,
    Fake,
    Handler,
    faking,
    pieces_of,
    refuses,
    says,
    soon,
    sse,
    streams,
    text_of,
    tokenizer,
    upstream_of,
    used,
)
from tests.support.running_server import asynchronous


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself; and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to check")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return made, key


@asynchronous
async def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    fake = Fake([streams()])
    fake.server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=context)
    url = fake.url.replace("http:", "https:")
    try:
        async with upstream_of(url) as upstream:
            with pytest.raises(UpstreamError) as error:
                await soon(pieces_of(upstream))
            assert error.value.reason == "connect"
            assert fake.heard == []
        async with upstream_of(url.replace("127.0.0.1", "localhost"), ca_file=str(made)) as upstream:
            with pytest.raises(UpstreamError):  # it is another one's
                await soon(pieces_of(upstream))
            assert fake.heard == []
        async with upstream_of(url, ca_file=str(made)) as upstream:
            assert text_of(await soon(pieces_of(upstream))) == "Hello!"
    finally:
        await fake.close()


@asynchronous
async def test_a_proxy_of_the_environment_is_used_only_where_asked_for() -> None:
    async with faking(streams()) as direct, faking(says(sse(*ANSWER, used()))) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
            patch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
            patch.delenv("no_proxy", raising=False)
            patch.delenv("NO_PROXY", raising=False)
            for asks, (went, stayed) in ((False, (direct, proxy)), (True, (proxy, direct))):
                before = len(stayed.heard)
                async with upstream_of(direct, proxy_env=asks) as upstream:
                    assert text_of(await soon(pieces_of(upstream))) == "Hello!"
                assert len(went.heard) == 1
                assert len(stayed.heard) == before
            assert proxy.heard[0].path == f"{direct.url}/chat/completions"
            patch.setenv("no_proxy", "127.0.0.1")
            async with upstream_of(direct, proxy_env=True) as upstream:
                await soon(pieces_of(upstream))
            assert len(proxy.heard) == 1


def test_a_key_that_is_not_there_is_told_before_anything_starts() -> None:
    config = UpstreamConfig(url="http://127.0.0.1:1/v1", key_env="NO_SUCH_KEY")
    with pytest.raises(HeadraceError, match="NO_SUCH_KEY"):
        Upstream.of("mini", config, {})
    assert Upstream.of("mini", config, {"NO_SUCH_KEY": "x"}).secret == "x"


def test_a_tokenizer_is_found_by_its_models_name() -> None:
    upstream = Upstream.of("mini", UpstreamConfig(url="http://127.0.0.1:1/v1", tokenizer="mini"), {})
    assert upstream.tokenizer is not None


@asynchronous
async def test_what_an_upstream_says_of_itself_is_numbers_and_names() -> None:
    async with faking(streams()) as fake, upstream_of(fake, key="sk-geheim") as upstream:
        await soon(pieces_of(upstream))
        state = upstream.state()
        assert (state["requests"], state["attempts"], state["running"], state["waiting"]) == (1, 1, 0, 0)
        assert state["available"] is True
        assert state["ttft_s"] > 0
        told = json.dumps(state)
        assert "geheim" not in told
        assert "127.0.0.1" not in told


# Vectors


def vectors(*rows: list[float], **fields: Any) -> Handler:
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(rows)]
    body = {"object": "list", "data": data[::-1], "usage": {"prompt_tokens": 5, "total_tokens": 5}} | fields
    return says(json.dumps(body).encode(), kind="application/json")


EMBEDS = UpstreamFeatures(embeddings=True)


@asynchronous
async def test_vectors_come_in_the_order_of_their_texts() -> None:
    async with (
        faking(refuses(503), vectors([1.0, 2.0], [3.0, 4.0])) as fake,
        upstream_of(fake, takes=EMBEDS) as upstream,
    ):
        found, usage = await soon(embed_texts(upstream, ["a", "b"], tokens=2, due=upstream.clock() + 10.0))
        assert np.array_equal(found, np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
        assert usage.prompt_tokens == 5
        assert fake.heard[1].path == "/v1/embeddings"
        assert fake.heard[1].json == {"model": "theirs", "input": ["a", "b"]}


@pytest.mark.parametrize(
    "handler",
    [
        vectors([1.0]),
        vectors([1.0], [1.0, 2.0]),
        vectors([1.0], []),
        says(b"{", kind="application/json"),
        says(b'{"data":[{"embedding":"no"}]}', kind="application/json"),
    ],
)
@asynchronous
async def test_other_vectors_than_asked_for_are_an_error(handler: Handler) -> None:
    async with faking(handler) as fake, upstream_of(fake, takes=EMBEDS) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(embed_texts(upstream, ["a", "b"], tokens=2, due=upstream.clock() + 10.0))
        assert error.value.reason == "garbled"


@asynchronous
async def test_vectors_have_their_time_and_their_place() -> None:
    async def hangs(line: Any) -> None:
        await line.head(200, "application/json")
        await line.gone()

    async with faking(hangs) as fake, upstream_of(fake, takes=EMBEDS) as upstream:
        with pytest.raises(UpstreamError) as error:
            await soon(embed_texts(upstream, ["a"], tokens=1, due=upstream.clock() + 0.1))
        assert error.value.reason == "timeout"


@asynchronous
async def test_a_usage_that_cannot_be_is_not_that_of_texts() -> None:
    for told, counted in (({}, 7), ({"prompt_tokens": 0}, 7), ({"prompt_tokens": 10**6}, 7), ({"prompt_tokens": 3}, 3)):
        handler = vectors([1.0], usage=told)
        async with faking(handler) as fake, upstream_of(fake, takes=EMBEDS) as upstream:
            _, usage = await soon(embed_texts(upstream, ["abc"], tokens=7, due=upstream.clock() + 10.0))
            assert usage.prompt_tokens == counted
            wrong = upstream.state()["usage_wrong"]
            assert wrong == (counted == 7 and "prompt_tokens" in told)


@asynchronous
async def test_texts_are_counted_and_checked_before_anything_is_sent() -> None:
    texts = {"one": "Hello there", "two": [1, 2, 3]}
    takes = UpstreamFeatures(embeddings=True, token_prompts=True)
    async with faking(vectors()) as fake, upstream_of(fake, takes=takes) as upstream:
        assert await count_embedding_tokens(upstream, texts) == 3 + 3
    async with faking(vectors()) as fake, upstream_of(fake, takes=takes, tokenizer=tokenizer()) as upstream:
        assert await count_embedding_tokens(upstream, texts) == len(tokenizer().encode("Hello there")) + 3
    async with faking(vectors()) as fake, upstream_of(fake, takes=EMBEDS, tokenizer=tokenizer(), context=4) as upstream:
        wrong = {"model": {}, "two": texts, "long": {"long": "word " * 9}, "half": {"half": "\ud800"}}
        upstream.takes = UpstreamFeatures(chat=True)
        for parameter, each in wrong.items():
            with pytest.raises(ApiError) as error:
                await count_embedding_tokens(upstream, each)
            assert (error.value.status, error.value.parameter) == (400, parameter)
            upstream.takes = EMBEDS
        assert fake.heard == []
