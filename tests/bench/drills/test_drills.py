"""Each drill is held, and what it promises beside times is kept: times on a busy machine say nothing."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.drills import overload, redis_frozen, upstream_down, worker_crash
from headrace.bench.drills.drill_client import ChatReply
from headrace.bench.drills.drill_server import DrillError, DrillServer
from headrace.bench.drills.promises import Promise, percentile
from headrace.cli import main
from headrace.cli.drill import DRILLS

PLAYBOOKS = Path(__file__).parents[3] / "docs" / "how-to" / "playbooks.md"


def broken(promises: Sequence[Promise], *timed: str) -> list[str]:
    """What was not kept of the promises, without those that are about times."""
    return [each.promised for each in promises if not each.kept and not any(word in each.promised for word in timed)]


def test_a_worker_that_crashes_changes_no_stream() -> None:
    promises = asyncio.run(worker_crash.run())
    assert len(promises) == 3
    assert broken(promises, "pause") == []


def test_an_upstream_that_goes_down_is_gone_round() -> None:
    promises = asyncio.run(upstream_down.run())
    assert len(promises) == 4
    assert broken(promises, "costs nothing") == []


@pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")), reason="no redis-server (make services)"
)
def test_a_frozen_redis_stops_nobody_who_is_not_to_be_stopped() -> None:
    promises = asyncio.run(redis_frozen.run())
    assert len(promises) == 4
    assert broken(promises, "waits longer") == []


def test_overload_is_answered_or_refused() -> None:
    promises = asyncio.run(overload.run(seconds=3.0, most=200))
    assert len(promises) == 6
    assert broken(promises, "patience") == []


@pytest.mark.parametrize("signs", [{"extracted": True}, {"finish": "length", "tokens": overload.ASKED_TOKENS - 1}])
def test_a_degraded_answer_without_the_header_breaks_the_promise(signs: dict[str, Any]) -> None:
    full = ChatReply(200, finish="length", tokens=overload.ASKED_TOKENS)
    told = ChatReply(200, {"x-headrace-degraded": "extract"}, **{"finish": "stop", **signs})
    silent = ChatReply(200, **{"finish": "stop", **signs})
    assert overload.declared([full, told]).kept
    assert not overload.declared([full, told, silent]).kept


def test_a_server_that_keeps_up_breaks_no_promise() -> None:
    promise = overload.declared([ChatReply(200, finish="stop")] * 3)
    assert promise.kept
    assert "kept up" in promise.found


def test_a_promise_that_is_not_kept_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> list[Promise]:
        return [Promise("it holds", "it does", kept=True), Promise("it stays", "it does not", kept=False)]

    monkeypatch.setitem(DRILLS, "overload", run)
    with pytest.raises(SystemExit) as ended:
        main(["drill", "overload"])
    assert ended.value.code == 1
    assert "it stays" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["drill", "overload", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [each["kept"] for each in told["promises"]] == [True, False]


def test_a_server_that_cannot_start_says_why() -> None:
    async def start() -> None:
        async with DrillServer("[models.none]\npath = '/nowhere'\n"):
            pass

    with pytest.raises(DrillError, match="did not start"):
        asyncio.run(start())


def test_percentiles_are_values_that_were_there() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([], 0.5) != percentile([], 0.5)


def test_every_drill_has_its_playbook() -> None:
    assert set(re.findall(r"^headrace drill (\S+)", PLAYBOOKS.read_text(), re.MULTILINE)) == set(DRILLS)
