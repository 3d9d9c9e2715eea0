"""Multipart bodies: the same upload however it is cut, and errors for what is none."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.server.http.multipart_upload import Upload

TYPE = 'multipart/form-data; boundary="--line"'
FILE = b"one\r\n--\r\n----lin\r\n----line2\x00\xff"  # nearly the boundary


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    return f'----line\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"


END = b"----line--\r\n"
BODY = (
    part("purpose", b"batch") + part("expires_after[seconds]", b"3600") + part("file", FILE, filename="a.jsonl") + END
)


async def chunks_of(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def read(*pieces: bytes, type: str = TYPE) -> tuple[dict[str, str], str, bytes]:
    """Fields, the file's name, and its bytes."""

    async def all_of_it() -> tuple[dict[str, str], str, bytes]:
        upload = Upload(type, chunks_of(pieces))
        await upload.begin()
        fields = dict(upload.fields)
        content = b"".join([piece async for piece in upload.file()])
        return fields, upload.filename, content

    return asyncio.run(all_of_it())


def error_of(*pieces: bytes, type: str = TYPE) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(*pieces, type=type)
    assert raised.value.status == 400
    return raised.value


def test_an_upload_is_the_same_however_it_is_cut() -> None:
    wanted = ({"purpose": "batch", "expires_after[seconds]": "3600"}, "a.jsonl", FILE)
    assert read(BODY) == wanted
    for place in range(1, len(BODY)):
        assert read(BODY[:place], BODY[place:]) == wanted
    assert read(*(BODY[place : place + 1] for place in range(len(BODY)))) == wanted


def test_a_file_goes_on_as_it_comes() -> None:
    """Nothing waits for the end of the body."""

    async def first_bytes() -> bytes:
        async def chunks() -> AsyncIterator[bytes]:
            yield part("purpose", b"batch") + part("file", b"x" * 1000, filename="a")[:-2]
            raise AssertionError("more was read than is needed")

        upload = Upload(TYPE, chunks())
        await upload.begin()
        return await anext(upload.file())

    assert asyncio.run(first_bytes()).startswith(b"x" * 900)


def test_a_file_may_be_empty_and_without_a_name() -> None:
    assert read(part("purpose", b"batch") + part("file", b"") + END) == ({"purpose": "batch"}, "", b"")


@pytest.mark.parametrize("late", ["purpose", "expires_after[seconds]", "file"])
def test_a_field_after_the_file_is_an_error_however_it_is_cut(late: str) -> None:
    body = part("file", b"content", filename="a") + part(late, b"x") + END
    for place in range(1, len(body)):
        error = error_of(body[:place], body[place:])
        assert error.parameter == late
        assert "after the file" in error.message


@pytest.mark.parametrize("place", range(0, len(BODY) - len(END) - 4, 7))
def test_a_body_that_breaks_off_is_an_error(place: int) -> None:
    error_of(BODY[:place])


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=" + "x" * 300,
        "multipart/form-data; boundary*=utf-8''x%ff",
        "multipart/form-data; boundary=\x00\xff",
        ";;;===",
    ],
)
def test_what_is_no_upload_is_refused(kind: str) -> None:
    error_of(BODY, type=kind)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (part("purpose", b"batch") + END, "file"),
        (part("purpose", b"a") + part("purpose", b"b") + part("file", b"", filename="a") + END, "purpose"),
        (part("other", b"a", filename="b") + END, "file"),
        (part("purpose", b"x" * 5000) + END, "purpose"),
        (b"".join(part(f"field {place}", b"") for place in range(40)) + END, None),
        (b"----line\r\n" + b"x" * 100_000, None),
        (b"----line\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", None),
        (b"----line\r\n" + b"A: b\r\n" * 1000 + b"\r\n\r\n", None),
        (b"----line\r\nContent-Disposition: form-data; name=\xff\xfe\r\n\r\n\r\n" + END, "file"),
        (b"nothing of the kind", None),
        (b"\r\n" * 1000, None),
    ],
)
def test_what_is_wrong_is_named(body: bytes, parameter: str | None) -> None:
    error = error_of(body)
    if parameter is not None:
        assert error.parameter == parameter


def test_a_name_is_bounded_and_text() -> None:
    assert read(BODY.replace(b"a.jsonl", b"\xff" * 10))[1] == "\ufffd" * 10
    assert len(read(part("file", b"", filename="a" * 3000) + END)[1]) == 1024
    error_of(part("file", b"", filename="a" * 100_000) + END)  # the header alone is too long


def test_noise_is_never_anything_but_a_bad_request() -> None:
    """What went well is an upload, what went ill an ApiError; nothing else comes out."""
    source = random.Random(7)
    for _ in range(400):
        body = bytearray(BODY)
        for _ in range(source.randrange(1, 6)):
            place = source.randrange(len(body))
            match source.randrange(3):
                case 0:
                    body[place] = source.randrange(256)
                case 1:
                    del body[place : place + source.randrange(1, 20)]
                case _:
                    body[place:place] = source.randbytes(source.randrange(1, 8))
        cut = source.randrange(len(body))
        with contextlib.suppress(ApiError):
            read(bytes(body[:cut]), bytes(body[cut:]))
