"""`headrace status`: what it makes of two looks at the metrics, and a real server's."""

from __future__ import annotations

import asyncio
import io
import json
import math

import pytest
from rich.console import Console

from headrace.cli import FAILED, main
from headrace.cli.status import Snapshot, WorkerStatus, compare, quantile, render
from headrace.observe import metrics
from tests.support.running_server import asynchronous, serving, words

METRICS = """
# TYPE headrace_requests_running gauge
headrace_requests_running 3.0
# TYPE headrace_connections gauge
headrace_connections 7.0
# TYPE headrace_answers_total counter
headrace_answers_total{{model="mini",tenant="acme",ended="finished"}} {answers}
# TYPE headrace_tokens_total counter
headrace_tokens_total{{model="mini",tenant="acme",kind="output"}} {tokens}
headrace_tokens_total{{model="mini",tenant="",kind="output"}} 5.0
# TYPE headrace_engine_running gauge
headrace_engine_running{{model="mini",replica="0"}} 2.0
headrace_engine_running{{model="mini",replica="1"}} 1.0
headrace_engine_waiting{{model="mini",replica="0"}} 4.0
headrace_engine_blocks_used{{model="mini",replica="0"}} 25.0
headrace_engine_blocks_cached{{model="mini",replica="0"}} 25.0
headrace_engine_blocks_free{{model="mini",replica="0"}} 50.0
# TYPE headrace_time_to_first_token_seconds histogram
headrace_time_to_first_token_seconds_bucket{{model="mini",le="0.1"}} {fast}
headrace_time_to_first_token_seconds_bucket{{model="mini",le="0.2"}} {slow}
headrace_time_to_first_token_seconds_bucket{{model="mini",le="+Inf"}} {slow}
"""


def snapshot(at: float, **values: float) -> Snapshot:
    health = {"status": "ready", "models": ["mini"], "unavailable": ["big"]}
    return Snapshot(health, METRICS.format(**values), at)


def test_rates_and_times_are_those_since_the_view_before() -> None:
    before = snapshot(10.0, answers=10, tokens=100, fast=100, slow=100)
    found = compare(before, snapshot(12.0, answers=14, tokens=300, fast=100, slow=110))
    assert (found.state, found.running, found.connections, found.requests_per_s) == ("ready", 3, 7, 2.0)
    big, mini = found.variants
    assert (big.model, big.responsive) == ("big", False)
    assert (mini.running, mini.waiting, mini.kv_used, mini.output_tokens_per_s) == (3, 4, 0.25, 100.0)
    assert (mini.ttft_p50_ms, mini.ttft_p95_ms) == (150.0, 195.0)  # the ten slow ones alone
    assert [(each.tenant, each.output_tokens, each.output_tokens_per_s) for each in found.tenants] == [
        ("acme", 300, 100.0),
        ("", 5, 0.0),
    ]


def test_the_first_view_has_no_rates() -> None:
    found = compare(None, snapshot(10.0, answers=10, tokens=100, fast=100, slow=100))
    assert (found.requests_per_s, found.variants[1].output_tokens_per_s) == (None, None)
    assert found.variants[1].ttft_p50_ms == 50.0


def test_workers_on_other_hosts_are_listed_with_their_state() -> None:
    labels = 'model="mini",address="tls://10.0.0.5:9000",state="draining"'
    before = snapshot(10.0, answers=10, tokens=100, fast=100, slow=100)
    exposition = METRICS.format(answers=1, tokens=1, fast=1, slow=1) + f"headrace_worker_requests{{{labels}}} 2.0\n"
    found = compare(None, Snapshot(before.health, exposition, 12.0))
    assert found.workers == [WorkerStatus("mini", "tls://10.0.0.5:9000", "draining", 2)]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render("http://a", found))
    assert "tls://10.0.0.5:9000" in console.export_text()
    assert compare(None, before).workers == []


def test_only_present_workers_have_a_gauge() -> None:
    try:
        metrics.workers([("gone", "tls://a:1", "ready", 1)])
        metrics.workers([("gone", "tls://b:1", "down", 0)])
        text = metrics.exposition().decode()
        assert 'headrace_worker_requests{address="tls://b:1",model="gone",state="down"} 0.0' in text
        assert "tls://a:1" not in text
    finally:
        metrics.workers([])


def test_quantiles_are_interpolated() -> None:
    buckets = {0.1: 50.0, 0.5: 90.0, math.inf: 100.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.05)
    assert quantile(buckets, 0.7) == pytest.approx(0.3)
    assert quantile(buckets, 0.99) == 0.5  # the last bound that is known
    assert quantile({}, 0.5) is None


@asynchronous
async def test_a_server_is_shown() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        await running.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
        from headrace.cli.status import take_snapshot

        found = compare(None, await asyncio.to_thread(take_snapshot, running.server.url))
        assert (found.state, [each.model for each in found.variants]) == ("ready", ["mini"])
        assert found.variants[0].responsive
        from rich.console import Console

        console = Console(record=True, width=120, quiet=True)
        console.print(render("http://x", found))


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "http://127.0.0.1:9", "--once"]) == FAILED
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli import COMMANDS

    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "interval-s" in script
    assert json.dumps(script)
