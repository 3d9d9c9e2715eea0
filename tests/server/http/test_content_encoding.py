"""Compressed request bodies: inflated up to the body limit and never beyond it, or rejected with 415."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.server.http.content_encoding import ACCEPTED, Inflater, inflater_for
from tests.support.running_server import CHAT, asynchronous, serving, words

BODY = json.dumps(CHAT | {"metadata": {"filler": "abc" * 100}}).encode()


def zstd() -> Any:
    return pytest.importorskip("backports.zstd", reason="zstd bodies need the extra 'zstd'")


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


def compressed(coding: str, data: bytes) -> bytes:
    match coding:
        case "gzip" | "x-gzip":
            return gzip.compress(data)
        case "two gzip members":
            return gzip.compress(data[:50]) + gzip.compress(data[50:])
        case "deflate":
            return zlib.compress(data)
        case "raw deflate":
            return raw_deflate(data)
        case "zstd":
            return zstd().compress(data)
        case _:
            half = len(data) // 2
            return zstd().compress(data[:half]) + zstd().compress(data[half:])


CODINGS = {
    "gzip": "gzip",
    "x-gzip": "x-gzip",
    "two gzip members": "GZIP",
    "deflate": "deflate",
    "raw deflate": "deflate",
    "zstd": "zstd",
    "two zstd frames": "zstd",
}


@pytest.mark.parametrize("what", CODINGS)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_a_body_is_inflated_however_it_is_cut(what: str, step: int) -> None:
    data = bytes(range(256)) * 1000 + b"end"
    packed = compressed(what, data)
    inflater = inflater_for(CODINGS[what])
    assert inflater is not None
    pieces = [piece for at in range(0, len(packed), step) for piece in inflater.inflate(packed[at : at + step])]
    inflater.finish()
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 64 * 1024


@pytest.mark.parametrize("what", CODINGS)
def test_a_body_that_ends_early_or_is_corrupt_is_rejected(what: str) -> None:
    packed = compressed(what, b"some text " * 100)
    cut = inflater_for(CODINGS[what])
    assert cut is not None
    list(cut.inflate(packed[:-5]))
    with pytest.raises(ApiError, match="ends too early"):
        cut.finish()
    corrupt = inflater_for(CODINGS[what])
    assert corrupt is not None
    with pytest.raises(ApiError, match="is not valid") as caught:
        list(corrupt.inflate(packed + b"\xff" * 20))
    assert (caught.value.status, caught.value.code) == (400, "invalid_content_encoding")


def test_a_zstd_frame_with_a_huge_window_is_rejected_before_it_takes_memory() -> None:
    module = zstd()
    options = {module.CompressionParameter.window_log: 27, module.CompressionParameter.content_size_flag: 0}
    encoder = module.ZstdCompressor(options=options)
    packed = encoder.compress(b"a" * 1000) + encoder.flush()
    with pytest.raises(ApiError, match="is not valid zstd"):
        list(Inflater("zstd").inflate(packed))


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_empty_members_are_bounded(coding: str) -> None:
    with pytest.raises(ApiError, match="too many members"):
        list(Inflater(coding).inflate(compressed(coding, b"") * 1000))
    many = [bytes(range(256)) * 8 for _ in range(300)]
    packed = b"".join(compressed(coding, os.urandom(2000) + each) for each in many)
    assert sum(map(len, Inflater(coding).inflate(packed))) == 300 * (2000 + 2048)


def test_a_plain_body_has_no_inflater() -> None:
    assert inflater_for(None) is None
    assert inflater_for("") is None
    assert inflater_for(" Identity ") is None


@pytest.mark.parametrize("what", CODINGS)
@asynchronous
async def test_a_compressed_request_is_answered_as_the_plain_one(what: str) -> None:
    packed = compressed(what, BODY)
    async with serving() as running:
        running.engine.answer = words("ok")
        plain = await running.ask("POST", "/v1/chat/completions", BODY)
        answer = await running.ask("POST", "/v1/chat/completions", packed, content_encoding=CODINGS[what])
        assert answer.status == plain.status == 200, answer.body
        assert answer.json["choices"] == plain.json["choices"]
        assert running.engine.streams[0].request.prompt == running.engine.streams[1].request.prompt


@asynchronous
async def test_an_upload_may_be_compressed() -> None:
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"a": 1}\r\n--x--\r\n'
    )
    async with serving() as running:
        kind = {"content_type": "multipart/form-data; boundary=x", "content_encoding": "gzip"}
        made = await running.ask("POST", "/v1/files", gzip.compress(parts), **kind)
        assert made.json["bytes"] == len(b'{"a": 1}')


@pytest.mark.parametrize("what", ["gzip", "deflate", "raw deflate", "zstd"])
@asynchronous
async def test_a_decompression_bomb_is_refused_at_the_body_limit(what: str) -> None:
    bomb = compressed(what, b"\x00" * 100_000_000)
    async with serving(body_bytes=200_000) as running:
        running.engine.answer = words("ok")
        await running.ask("POST", "/v1/chat/completions", compressed(what, BODY), content_encoding=CODINGS[what])
        tracemalloc.start()
        answer = await running.ask("POST", "/v1/chat/completions", bomb, content_encoding=CODINGS[what])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert most < 20_000_000


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "utf-8", "x-" * 1000])
@asynchronous
async def test_an_unknown_encoding_gets_415_with_those_that_are_accepted(coding: str) -> None:
    async with serving() as running:
        answer = await running.ask("POST", "/v1/chat/completions", BODY, content_encoding=coding)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")
        assert answer.headers["accept-encoding"] == ", ".join(ACCEPTED)
        assert all(each in answer.error["message"] for each in ACCEPTED)
