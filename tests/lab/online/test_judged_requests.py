"""Double-checks feed the cascade: what they judge of recorded tenants is kept, exported and fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli import main
from headrace.config import KeyConfig
from headrace.config.tenant_section import TenantConfig
from headrace.engine.interface.outputs import FinishReason, SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.process.output_stream import OutputStream
from headrace.lab.tuning.judged_pair import JudgedPair
from tests.lab.online.test_shadows import seen, shadowed
from tests.support.caching_server import BLUE, BOSS, KEYS, RED
from tests.support.config_text import mistakes
from tests.support.config_text import read as read_config
from tests.support.running_server import asynchronous, say, until, words

PAIRS = "/admin/v1/shadows/trial/pairs"
JUDGING: dict[str, Any] = {"judge": "shadow", "pairs": 2}
RECORDED = {"red": TenantConfig(record=True)}


def sure(stream: OutputStream) -> None:
    """Answer with a log-probability of -0.5 where it was asked for."""
    usage = SequenceUsage(len(stream.request.prompt), 1, 0, 0, 0, 0.001, 0.002, 0.003)
    chosen = None
    if stream.request.sampling.logprobs is not None:
        chosen = [SampledToken(100, -0.5, ((100, -0.5), (101, -1.5)))]
    ending = SequenceEnd(FinishReason.STOP, usage)
    stream.push(SequenceOutput("", 0, [100], "the served answer", chosen=chosen, ending=ending))


def read(body: bytes) -> list[JudgedPair]:
    return [msgspec.json.decode(line, type=JudgedPair) for line in body.splitlines()]


@asynchronous
async def test_a_judged_request_is_kept_with_the_confidence_of_the_small_variant(tmp_path: Path) -> None:
    async with shadowed(tmp_path, accounts=RECORDED, **JUDGING) as (running, engine, shadow):
        running.engine.answer = sure
        engine.answer = words("the ", "served ", "answer")
        await running.chat("Mail ada@example.org, please.", key=RED)
        await seen(running, shadow, "asked_again")
        again = running.engine.streams[1].request
        assert (again.surface, again.sampling.logprobs, len(running.engine.streams)) == ("batch", 5, 2)
        [pair] = read((await running.ask("GET", PAIRS, **BOSS)).body)
        assert "ada@" not in pair.question
        assert (pair.small, pair.large, pair.answer) == (1.0, 1.0, "the served answer")
        assert pair.confidence["mean"] == pytest.approx(0.606531)
        assert pair.small_cost > 0
        assert pair.large_cost > 0
        assert shadow.total.compared == 1


@asynchronous
async def test_others_are_judged_and_not_kept_and_the_newest_stay(tmp_path: Path) -> None:
    async with shadowed(tmp_path, accounts=RECORDED, **JUDGING) as (running, _, shadow):
        running.engine.answer = sure
        await running.chat("Of a tenant that is not recorded", key=BLUE)
        await seen(running, shadow, "copied")
        for place in range(3):
            await running.chat(f"Question {place}", key=RED)
            await seen(running, shadow, "asked_again", place + 1)
        pairs = read((await running.ask("GET", PAIRS, **BOSS)).body)
        assert [pair.question for pair in pairs] == ["Question 1", "Question 2"]
        assert all(pair.small < 1.0 for pair in pairs)  # "the served answer" beside "the other answer"


@asynchronous
async def test_deleted_tenants_are_forgotten(tmp_path: Path) -> None:
    keys = (*KEYS, KeyConfig(name="root", key="root-secret", admin="write"))
    root = {"authorization": "Bearer root-secret"}
    async with shadowed(tmp_path, keys=keys, **JUDGING) as (running, _, shadow):
        running.engine.answer = sure
        await running.ask("POST", "/admin/v1/tenants", {"name": "green", "record": True}, **root)
        key = (await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **root)).json["secret"]
        await running.chat("Hello", key={"authorization": f"Bearer {key}"})
        await seen(running, shadow, "asked_again")
        assert (await running.ask("GET", PAIRS, **root)).body
        assert (await running.ask("DELETE", "/admin/v1/tenants/green", **root)).status == 200
        assert (await running.ask("GET", PAIRS, **root)).body == b""


@asynchronous
async def test_the_texts_of_pairs_are_bounded(tmp_path: Path) -> None:
    async with shadowed(tmp_path, accounts=RECORDED, judge="shadow", pairs=9) as (running, _, shadow):
        assert shadow._pairs is not None
        shadow._pairs._most_bytes = 60
        running.engine.answer = sure
        for place in range(5):
            await running.chat(f"Question {place}", key=RED)
            await seen(running, shadow, "asked_again", place + 1)
        pairs = read((await running.ask("GET", PAIRS, **BOSS)).body)
        assert [pair.question for pair in pairs] == ["Question 3", "Question 4"]  # 10 bytes each, answers 16
        await running.chat("Question " + "5" * 60, key=RED)
        await seen(running, shadow, "asked_again", 6)
        assert (await running.ask("GET", PAIRS, **BOSS)).body.count(b"\n") == 2  # larger than the bound


@asynchronous
@pytest.mark.parametrize(("method", "body"), [("DELETE", None), ("PATCH", {"record": False})])
async def test_a_copy_that_ends_after_its_tenant_left_is_not_kept(tmp_path: Path, method: str, body: Any) -> None:
    keys = (*KEYS, KeyConfig(name="root", key="root-secret", admin="write"))
    root = {"authorization": "Bearer root-secret"}
    async with shadowed(tmp_path, keys=keys, **JUDGING) as (running, engine, shadow):
        running.engine.answer = sure
        engine.answer = None
        await running.ask("POST", "/admin/v1/tenants", {"name": "green", "record": True}, **root)
        key = (await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **root)).json["secret"]
        await running.chat("Hello", key={"authorization": f"Bearer {key}"})
        await until(lambda: len(engine.streams) == 1)  # the shadow reads its copy
        running.engine.answer = None
        say(engine.streams[0], "the other answer", end=True)
        await until(lambda: len(running.engine.streams) == 2)  # the small variant is asked again
        assert (await running.ask(method, "/admin/v1/tenants/green", body, **root)).status == 200
        sure(running.engine.streams[1])
        await seen(running, shadow, "asked_again")
        assert (await running.ask("GET", PAIRS, **root)).body == b""


@asynchronous
async def test_a_variant_without_log_probabilities_gives_no_pairs(tmp_path: Path) -> None:
    async with shadowed(tmp_path, accounts=RECORDED, **JUDGING) as (running, _, shadow):
        await running.chat("Hello", key=RED)
        await seen(running, shadow, "asked_again")
        assert (await running.ask("GET", PAIRS, **BOSS)).body == b""


@asynchronous
async def test_a_shadow_that_keeps_no_pairs_is_named(tmp_path: Path) -> None:
    async with shadowed(tmp_path, judge="shadow") as (running, _, _):
        answer = await running.ask("GET", PAIRS, **BOSS)
        assert (answer.status, answer.error["code"]) == (404, "no_judged_pairs")
        assert "trial" in answer.error["message"]


def test_pairs_without_a_double_check_are_a_mistake() -> None:
    shadow = '[models.mini]\n[models.mini.variants.new]\n[routing.shadows.trial]\nvariant = "mini@new"\npairs = 10\n'
    [found] = mistakes(shadow)
    assert 'routing.shadows.trial.pairs: no pairs are kept without judge = "shadow"' in found
    assert read_config(shadow + 'judge = "shadow"\n').routing.shadows["trial"].pairs == 10


def test_the_command_fits_what_a_server_has_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.lab import tune_cascade
    from headrace.lab.tuning.judged_pair import pair_lines
    from tests.lab.tuning.test_cascade_fit import traffic

    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, ...]] = []

    def request(*call: str) -> bytes:
        asked.append(call)
        return pair_lines(traffic())

    monkeypatch.setattr(tune_cascade, "request", request)
    arguments = ["--shadow", "check", "--url", "http://localhost:1", "--small", "draft", "--large", "mini"]
    assert main(["tune", "cascade", *arguments]) == 0
    assert asked == [("http://localhost:1", "GET", "shadows/check/pairs")]
    assert "cascade, " in capsys.readouterr().out
    assert 'small = "draft"' in (tmp_path / "cascade" / "cascade.toml").read_text()
    assert main(["tune", "cascade", *arguments, "--pairs", "cascade/pairs.jsonl"]) == 2
    assert "--shadow" in capsys.readouterr().err
    monkeypatch.setattr(tune_cascade, "request", lambda *call: b"")
    assert main(["tune", "cascade", *arguments]) == 2
    assert "record = true" in capsys.readouterr().err


def test_the_command_keeps_the_pairs_of_an_earlier_run_until_it_has_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.lab import tune_cascade

    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "cascade" / "pairs.jsonl"
    kept.parent.mkdir()
    kept.write_text("earlier\n")
    for body, problem in ((b"<html>", "The server's answer is not pairs, line 1"), (b"", "no judged pairs yet")):
        monkeypatch.setattr(tune_cascade, "request", lambda *call, body=body: body)
        assert main(["tune", "cascade", "--shadow", "check"]) == 2
        assert problem in capsys.readouterr().err
        assert kept.read_text() == "earlier\n"
    for source in ("--prompts", "--recorded"):
        assert main(["tune", "cascade", "--shadow", "check", source, "some.jsonl"]) == 2
        assert f"Pass either {source} or --shadow." in capsys.readouterr().err
