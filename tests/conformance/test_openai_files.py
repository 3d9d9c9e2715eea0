"""`/v1/files` and `/v1/batches` as the openai package uses them."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import httpx2
import openai
import pytest

PATIENCE_S = 120.0


def upload(client: openai.OpenAI, content: bytes, name: str = "requests.jsonl", **wishes: Any) -> Any:
    return client.files.create(file=(name, io.BytesIO(content)), **{"purpose": "batch", **wishes})


def lines(*bodies: dict[str, Any], url: str = "/v1/chat/completions") -> bytes:
    found = ({"custom_id": f"line {i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies))
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def ended(client: openai.OpenAI, batch: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (found := client.batches.retrieve(batch)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def results(client: openai.OpenAI, file: str) -> dict[str, Any]:
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    return {each["custom_id"]: each for each in found}


def test_a_file_comes_back_as_it_went(client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 1000 + b"\r\n--boundary--\r\n"
    file = upload(client, content, "bytes.bin", purpose="user_data")
    assert file.id.startswith("file-")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "bytes.bin", "user_data")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert file.id in [each.id for each in client.files.list(purpose="user_data")]
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)


def test_a_file_may_expire(client: openai.OpenAI) -> None:
    file = upload(client, b"{}", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    client.files.delete(file.id)


def test_files_are_listed_page_by_page(client: openai.OpenAI) -> None:
    made = [upload(client, b"x", f"{place}.txt", purpose="user_data").id for place in range(5)]
    first = client.files.list(purpose="user_data", limit=2, order="asc")
    assert [each.id for each in first.data] == made[:2]
    assert first.has_more
    assert [each.id for each in first] == made  # the package asks for the next pages by itself
    assert [each.id for each in client.files.list(purpose="user_data", order="desc", limit=1).data] == made[-1:]
    for id in made:
        client.files.delete(id)


def test_a_file_s_name_is_no_path(client: openai.OpenAI) -> None:
    file = upload(client, b"x", "../../etc/passwd")
    assert "/" not in file.filename
    assert client.files.content(file.id).read() == b"x"
    client.files.delete(file.id)


@pytest.mark.parametrize(
    "id", ["file-nothing", "..", "../batches", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "file-" + "x" * 500]
)
def test_no_path_leads_out(http: httpx2.Client, id: str) -> None:
    reply = http.get(f"/v1/files/{id.replace('..', '%2e%2e')}/content")
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("fields", "file", "parameter"),
    [
        ({}, True, "purpose"),
        ({"purpose": "nonsense"}, True, "purpose"),
        ({"purpose": "batch", "purposes": "red"}, True, "purposes"),
        ({"purpose": "batch"}, False, "file"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, True, "expires_after"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, True, "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "-5"}, True, "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, True, "expires_after"),
    ],
)
def test_what_is_wrong_with_an_upload_is_named(
    http: httpx2.Client, fields: dict[str, str], file: bool, parameter: str
) -> None:
    # Without a file, it is a part with no content that makes the body multipart.
    files: Any = {"file": ("a", b"x")} if file else {name: (None, value) for name, value in fields.items()}
    reply = http.post("/v1/files", data=fields if file else None, files=files)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, parameter)


def test_a_field_after_the_file_is_no_silent_loss(http: httpx2.Client) -> None:
    parts: Any = [
        ("purpose", (None, "batch")),
        ("file", ("a", b"x" * 200_000)),
        ("expires_after[seconds]", (None, "3600")),
    ]
    reply = http.post("/v1/files", files=parts)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "expires_after[seconds]")


def test_what_is_no_upload_is_refused(http: httpx2.Client) -> None:
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
        reply = http.post("/v1/files", content=b"{}", headers={"content-type": kind})
        assert reply.status_code == 400
    reply = http.post("/v1/files", content=b"hello", headers={"content-type": "multipart/form-data; boundary=x"})
    assert reply.status_code == 400


def test_a_batch_runs_to_its_results(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {
        "model": "mini",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "seed": 1,
    }
    file = upload(client, lines(chat, {**chat, "temperature": 9}, {**chat, "stop": 5}))
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "tests"},
    )
    assert batch.id.startswith("batch_")
    assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", "/v1/chat/completions", file.id)
    assert batch.metadata == {"of": "tests"}
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    good = results(client, batch.output_file_id)
    assert set(good) == {"line 0"}
    response = good["line 0"]["response"]
    assert response["status_code"] == 200
    assert good["line 0"]["error"] is None
    live = client.chat.completions.create(**chat)
    assert response["body"]["choices"][0]["message"]["content"] == live.choices[0].message.content
    bad = results(client, batch.error_file_id)
    assert {id: each["response"]["status_code"] for id, each in bad.items()} == {"line 1": 400, "line 2": 400}
    assert bad["line 1"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [each.id for each in client.batches.list(limit=5)]


def test_batches_of_completions_and_embeddings(client: openai.OpenAI) -> None:
    for endpoint, body in (
        ("/v1/completions", {"model": "mini", "prompt": "a", "max_tokens": 2}),
        ("/v1/embeddings", {"model": "mini", "input": ["a", "b"], "dimensions": 3}),
    ):
        file = upload(client, lines(body, url=endpoint))
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # pyright: ignore
        batch = ended(client, batch.id)
        assert batch.status == "completed"
        found = results(client, batch.output_file_id)["line 0"]["response"]["body"]
        assert found["usage"]["prompt_tokens"] > 0


def test_a_batch_may_be_cancelled(client: openai.OpenAI) -> None:
    body = {"model": "mini", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "max_tokens": 1500}
    file = upload(client, lines(*[body] * 40))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert ended(client, batch.id).status == "cancelled"


@pytest.mark.parametrize(
    ("wishes", "status", "parameter"),
    [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
        ({"meta_data": {}}, 400, "meta_data"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after.anchor"),
    ],
)
def test_what_is_wrong_with_a_batch_is_named(
    client: openai.OpenAI, http: httpx2.Client, wishes: dict[str, Any], status: int, parameter: str
) -> None:
    file = upload(client, lines({"messages": []}))
    asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **wishes}
    reply = http.post("/v1/batches", json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, parameter)


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "limit=0", "colour=red", "after=nothing", "order=up"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_listing_takes_what_it_knows(http: httpx2.Client, path: str, query: str) -> None:
    reply = http.get(f"{path}?{query}")
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == query.partition("=")[0]
