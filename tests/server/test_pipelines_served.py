"""Pipelines with a real engine: what they keep warm outlives other traffic, and no deadline is too short for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LocalGateway
from headrace.config.pipeline_section import GenerateStage
from headrace.pipelines.pipelines import Pipelines

FERRY = "The ferry to the island leaves from the northern harbour every second hour, also in winter. " * 3
CONFIG: dict[str, Any] = {
    "models": {"mini": {"options": {"threads": 1, "kv_tokens": 1024, "max_sequences": 1}}},
    "pipelines": {
        "notes": {
            "stages": ["search", "assemble", "generate"],
            "deadline_ms": 60_000,
            "search": {"collection": "notes"},
            "assemble": {"warm": 1},
            "generate": {"max_tokens": 1, "instructions": "Answer from the sources."},
        },
        "other": {"stages": ["generate"], "deadline_ms": 60_000, "generate": {"max_tokens": 1}},
    },
}


def kept(gateway: LocalGateway) -> dict[str, Any]:
    pipelines = gateway.context.services.pipelines
    assert isinstance(pipelines, Pipelines)

    async def settled() -> dict[str, Any]:
        while any(each.is_settling for each in pipelines.services.warm._pipelines.values()):  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        return pipelines.described(gateway.caller)[0]["warm"]

    return gateway.call(settled())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    folder = str(tmp_path_factory.mktemp("storage"))
    with LocalGateway(CONFIG, storage={"folder": folder}) as opened:
        opened.collection("notes", mode="keyword").add(texts={"harbour.md": FERRY})
        yield opened


def test_a_deadline_that_the_engine_cannot_meet_leaves_what_is_known(gateway: LocalGateway) -> None:
    short = gateway.pipeline("other").run("Where is the ferry?", deadline_ms=1)
    assert (short.text, short.finish) == (GenerateStage().no_answer, "deadline")
    assert short.report["skipped"] == ["generate"]


def test_a_popular_passage_is_not_computed_again_until_its_document_changes(gateway: LocalGateway) -> None:
    ask, other = gateway.pipeline("notes"), "7 3 9 1 5 " * 80
    for question in ("Where is the ferry?", "When does the ferry leave?"):
        ask.run(question)
    assert kept(gateway)["kept"] == 1
    for number in range(4):
        gateway.pipeline("other").run(f"{number} {other}")
    answer = ask.run("Does the ferry go in winter?")
    cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= kept(gateway)["tokens"] - 16
    assert kept(gateway)["warm"]["answers"] == 1
    gateway.collection("notes").add(texts={"harbour.md": FERRY.replace("northern", "southern")})
    assert (kept(gateway)["kept"], kept(gateway)["tokens"]) == (0, 0)
