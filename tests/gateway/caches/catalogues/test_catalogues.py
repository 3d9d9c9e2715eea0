"""A server answers known questions from its catalogue: who gets which text, what it costs, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config.catalogue_section import CatalogueConfig
from headrace.config.ledger_section import PriceConfig
from headrace.gateway.caches.catalogues.catalogue_file import CatalogueText, read_texts, write_texts
from headrace.gateway.caches.catalogues.catalogues import Catalogues
from headrace.gateway.images.message_images import MARK
from headrace.gateway.requests.text_request import TextRequest
from tests.support.admin_server import Administered, administered
from tests.support.running_server import asynchronous, until, words

RETURNS = CatalogueText(
    name="returns",
    questions=("How do I return {product}?",),
    text="Send {product} back within 30 days.",
    approved=True,
    output_tokens=9,
    machine_s=0.5,
)


async def ask(server: Administered, text: str = "how do i return shoes", **changes: Any) -> Any:
    return await server.chat("caller-secret", messages=[{"role": "user", "content": text}], **changes)


def is_written(answer: Any) -> bool:
    return answer.json["choices"][0]["message"]["content"] == "Send shoes back within 30 days."


@asynchronous
async def test_a_known_question_is_answered_without_a_model_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    write_texts(path, [RETURNS])
    shop = {"shop": CatalogueConfig(file=str(path), tenants=("red",), models=("mini",), surfaces=("chat",))}
    prices = {"mini": PriceConfig(input=1.0, output=1000.0, hit_percent=10)}
    async with administered(tmp_path / "storage", catalogues=shop, prices=prices) as server:
        server.engine.answer = words("from the model")
        answer = await ask(server)
        assert is_written(answer)
        assert not server.engine.streams
        version = answer.json["headrace"]["catalogue"]["version"]
        assert answer.headers["x-headrace-cache"] == f"catalogue; name=shop; version={version}"
        assert answer.json["headrace"]["cache"] == "catalogue"
        assert answer.json["headrace"]["catalogue"] == {"name": "shop", "version": version, "text": "returns"}
        assert answer.json["usage"]["completion_tokens"] == 9
        assert answer.json["headrace"]["cost_micros"] == pytest.approx(900, abs=20)  # a tenth
        streamed = await ask(server, stream=True)
        assert streamed.text == "Send shoes back within 30 days."
        (row,) = (await server.did("GET", "latency?by=route"))["data"]
        assert (row["route"], row["cache_hits"], row["saved_s"]) == ("catalogue", 2, 1.0)

        for changes in (
            {"text": "How do I return"},
            {"tools": [{"type": "function", "function": {"name": "look"}}]},
            {"sources": [{"id": "a", "text": "Shoes cannot be sent back."}]},
            {"stop": ["x"]},
            {"max_tokens": 8},
            {"surface": "voice"},
            {"cache": "off"},
            {"logprobs": True},
            {"response_format": {"type": "json_object"}},
        ):
            assert not is_written(await ask(server, **changes)), changes
        system = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "How do I return shoes?"}]
        assert not is_written(await server.chat("caller-secret", messages=system))


@asynchronous
async def test_a_changed_file_is_read_and_a_broken_one_leaves_the_former_texts(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    shop = {"shop": CatalogueConfig(file=str(path), system="any")}
    async with administered(tmp_path / "storage", catalogues=shop) as server:
        server.engine.answer = words("from the model")
        assert not is_written(await ask(server))
        catalogues = server.server.services.catalogues
        assert catalogues is not None
        (loaded,) = catalogues._catalogues
        write_texts(path, [RETURNS])
        await until(lambda: len(loaded.table) == 1)
        assert is_written(await ask(server))
        system = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How do I return shoes?"}]
        assert is_written(await server.chat("caller-secret", messages=system))
        path.write_text("{broken")
        os.utime(path, (1, 1))
        await asyncio.to_thread(loaded.load)
        assert is_written(await ask(server))
        write_texts(path, [])
        await asyncio.to_thread(loaded.load)
        assert not is_written(await ask(server))


def test_a_question_with_an_image_is_left_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    write_texts(path, [RETURNS])
    catalogues = Catalogues({"shop": CatalogueConfig(file=str(path))})
    message: dict[str, Any] = {"role": "user", "content": f"How do I return {MARK}?"}

    def found(message: dict[str, Any]) -> bool:
        asked = TextRequest(model="mini", messages=[message])
        return catalogues.find(asked, tenant="", variant="mini", surface="chat") is not None

    assert found(message)
    assert not found({**message, "images": [{"url": "data:image/png;base64,aa"}]})


@asynchronous
async def test_texts_of_one_tenant_do_not_answer_another(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    write_texts(path, [RETURNS])
    shop = {"shop": CatalogueConfig(file=str(path), tenants=("blue",))}
    async with administered(tmp_path / "storage", catalogues=shop) as server:
        server.engine.answer = words("from the model")
        assert not is_written(await ask(server))


SOURCE = """
model = "mini"
system = "You write for a shop."
max_tokens = 40
[[texts]]
name = "returns"
questions = ["How do I return {product}?"]
prompt = "Say how to return {product}."
slots = { product = ["shoes", "hats"] }
[[texts]]
name = "hello"
questions = ["I am {name}"]
text = "Hello {name}!"
"""


@asynchronous
async def test_texts_are_written_on_the_batch_surface_approved_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tmp_path / "shop.toml", tmp_path / "shop.jsonl"
    source.write_text(SOURCE)
    patch = pytest.MonkeyPatch()
    patch.setenv("OPENAI_API_KEY", "caller-secret")
    async with administered(tmp_path / "storage") as server:
        server.engine.answer = words("Send ", "it ", "back.")

        async def run(*arguments: str) -> int:
            return await asyncio.to_thread(main, ["catalogue", *arguments])

        build = ("build", str(source), "-o", str(path), "--url", server.url)
        assert await run("build", str(source), "-o", str(tmp_path / "none" / "shop.jsonl"), "--url", server.url) == 2
        assert not server.engine.streams  # no text was written for a place that does not exist
        assert await run(*build) == 0
        assert {stream.request.surface for stream in server.engine.streams} == {"batch"}
        texts = {each.name: each for each in read_texts(path)}
        assert sorted(texts) == ["hello", "returns[product=hats]", "returns[product=shoes]"]
        shoes = texts["returns[product=shoes]"]
        assert (shoes.text, shoes.model, shoes.output_tokens, shoes.approved) == ("Send it back.", "mini", 3, False)
        assert await run("approve", str(path), "returns") == 0
        assert await run("approve", str(path), "nothing") == 2
        assert await run("approve", str(path)) == 2
        source.write_text(SOURCE.replace('"hats"', '"hats", "bags"'))
        assert await run(*build) == 0
        assert len(server.engine.streams) == 3  # the bags alone were new
        approved = {each.name for each in read_texts(path) if each.approved}
        assert approved == {"returns[product=hats]", "returns[product=shoes]"}
        capsys.readouterr()
        assert await run("list", str(path), "--pending") == 0
        assert "hello (pending)" in capsys.readouterr().out
        source.write_text("texts = 3")
        assert await run(*build) == 2
        assert "shop.toml" in capsys.readouterr().err
        assert len(read_texts(path)) == 4
        assert json.loads(path.read_text().splitlines()[0])["name"] == "returns[product=shoes]"
    patch.undo()
