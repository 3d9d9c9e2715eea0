"""Canaries over real engines behind a real server: planted regressions are rolled back, a better variant is promoted.

Half of the requests are copied to the other arm, and the server looks ten times a second. A defect in the answers as
large as this one takes 12 pairs, a slowness as large some 30 of the control's requests and as many pairs; the bounds
below leave room for pairs that tell less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.conformance.conftest import Server, end, start
from tests.support.models.planted_defects import with_noise

MOST_REQUESTS = 240  # of both arms
MOST_OF_CANDIDATE = 120
JUDGED_S = 120.0  # after the last request, on a machine that is busy with other things
CONFIG = """
[[keys]]
name = "ops"
key = "key-of-ops"
admin = "write"

[models.draft.options]
{options}

[models.noisy]
path = "{noisy}"

[models.noisy.options]
{options}

[models.slow]
path = "draft"

[models.slow.options]
{options}
max_rows = 6

[canary]
stages = [50]
stage_requests = 20
stage_s = 0.001
stage_pairs = 5
promote = "auto"
reference = "draft"
pairs = 0.5
when = "always"
queue = 4096
every_s = 0.1
"""
OPTIONS = 'threads = 1\nprefix_cache = false\ncontext = 512\nspeculation = "none"'
# Long enough that steps of 6 tokens take several times as long as one step.
MANUAL = " ".join(f"Rule {number}: answer in one short sentence and stay polite." for number in range(12))


class Administrator:
    def __init__(self, client: httpx2.Client) -> None:
        self.client = client

    def start(self, candidate: str, control: str, **changes: str) -> None:
        body = {"candidate": candidate, "control": control} | changes
        self.client.post("/admin/v1/canary", json=body).raise_for_status()

    def canary(self, control: str) -> dict[str, Any]:
        rows = self.client.get("/admin/v1/canary").raise_for_status().json()["data"]
        return next(each for each in rows if each["control"] == control)

    def ask(self, control: str, number: int) -> str:
        """Return the variant that answered a conversation's request."""
        body = {
            "model": control,
            "messages": [
                {"role": "system", "content": MANUAL},
                {"role": "user", "content": f"What is {number} plus {number % 7}?"},
            ],
            "max_tokens": 8,
            "temperature": 0,
            "metadata": {"conversation": f"{control} {number}"},
        }
        return self.client.post("/v1/chat/completions", json=body).raise_for_status().json()["model"]

    def ended(self, control: str) -> dict[str, Any]:
        """Send requests until the canary has ended by itself; return it."""
        for number in range(MOST_REQUESTS):
            self.ask(control, number)
            if number % 4 == 3 and (found := self.canary(control))["phase"] != "running":
                return found
        deadline = time.monotonic() + JUDGED_S
        while (found := self.canary(control))["phase"] == "running":
            assert time.monotonic() < deadline, found
            time.sleep(0.05)  # until the copies that wait are judged
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("canaries")
    noisy = with_noise(folder / "noisy", "model.layers.1.mlp.down_proj.weight", 6.0, "draft")
    config = folder / "headrace.toml"
    config.write_text(CONFIG.format(options=OPTIONS, noisy=noisy))
    found = start(folder / "server", "--config", str(config))
    yield found
    assert end(found) == 0


@pytest.fixture
def ops(server: Server) -> Iterator[Administrator]:
    headers = {"authorization": "Bearer key-of-ops"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield Administrator(client)


def test_noise_in_the_weights_is_rolled_back(ops: Administrator) -> None:
    ops.start("noisy", "draft")
    found = ops.ended("draft")
    assert (found["phase"], found["by"]) == ("rolled_back", "canary")
    assert "quality" in found["reason"]
    evidence = found["evidence"]
    assert evidence["candidate"]["requests"] <= MOST_OF_CANDIDATE
    assert evidence["control"]["quality"] == 1.0  # it is the reference
    assert evidence["candidate"]["quality"] < 0.7
    assert {ops.ask("draft", number) for number in range(6)} == {"draft"}


def test_a_slower_variant_is_rolled_back_for_its_latency(ops: Administrator) -> None:
    ops.start("slow", "draft", promote="manual")
    found = ops.ended("draft")
    assert (found["phase"], found["by"]) == ("rolled_back", "canary")
    worse = set(found["reason"].removeprefix("worse than draft: ").split(", "))
    assert worse <= {"ttft", "e2e", "itl"}
    assert found["evidence"]["candidate"]["requests"] <= MOST_OF_CANDIDATE
    assert found["evidence"]["candidate"]["quality"] == 1.0  # the same weights, so the same bytes


def test_a_faster_variant_of_the_same_quality_is_promoted(ops: Administrator) -> None:
    ops.start("draft", "slow")
    found = ops.ended("slow")
    assert (found["phase"], found["percent"], found["by"]) == ("promoted", 100.0, "canary")
    assert found["evidence"]["candidate"]["requests"] >= 20
    assert {ops.ask("slow", number) for number in range(4)} == {"draft"}
