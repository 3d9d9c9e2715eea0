"""Whole benchmarks in this process, against a tiny server: what it is asked, and what comes out."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.load_generator.benchmark import run_benchmark
from headrace.bench.load_generator.benchmark_options import (
    BenchmarkOptions,
    LoadTenant,
    SweepOptions,
    WorkloadOptions,
    build_mix,
)
from headrace.bench.results.benchmark_result import BenchmarkResult, RunSnapshot
from headrace.errors import RequestError
from tests.support.programs.fake_openai_server import Fake, Heard, OpenAI

CHAT = "/v1/chat/completions"


def measured(fake: Fake, *, asked: WorkloadOptions | None = None, watch: Any = None, **options: Any) -> BenchmarkResult:
    mix = build_mix(asked or WorkloadOptions(input_tokens=40, output_tokens=6))
    usual: dict[str, Any] = {"url": fake.url, "warmup": 2, "requests": 12, "concurrency": (3,)}
    usual["tenants"] = (LoadTenant(mix=mix),)
    if options.keys() & {"rates", "ramp", "sweep", "trace"}:
        del usual["concurrency"]
    if "seconds" in options:
        del usual["requests"]
    return run_benchmark(BenchmarkOptions(**(usual | options)), watch=watch)


def sent(fake: Fake, path: str = CHAT) -> list[Heard]:
    """The requests of the run and of its warm-up: probes ask for one token."""
    return [heard for heard in fake.asked(path) if heard.body.get("max_tokens") != 1]


def test_a_closed_loop_asks_as_often_as_it_was_told() -> None:
    with Fake(OpenAI(told={"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0})) as fake:
        result = measured(fake, objectives={"ttft": 60_000.0})
        total = result.figures
        assert (total.requests, total.completed, total.failed) == (12, 12, 0)
        assert (total.prompt_tokens, total.output_tokens) == (12 * 40, 12 * 6)
        assert total.good == 12
        assert 1 <= total.peak_running <= 3
        assert len(sent(fake)) == 14
        assert (result.load, result.model, result.warmup, result.warnings) == ("closed", "words", 2, [])
        assert result.tokenizer == "the server's /tokenize"
        for each in (total.queue, total.prefill, total.decode):
            assert each is not None
            assert each.count == 12
        assert [row.number for row in result.rows] == list(range(12))
        assert all(row.chunks == 6 and len(row.gaps) == 5 and row.tokens_from == "usage" for row in result.rows)
        assert result.token_check is not None
        assert (result.token_check.difference, result.token_check.by) == (0.0, "server")


def test_each_request_is_as_openai_has_it() -> None:
    with Fake(OpenAI()) as fake:
        measured(fake, body={"top_p": 0.5}, headers={"X-Mine": "1"})
        heard = sent(fake)[-1]
        body = heard.body
        assert body.pop("messages")[0]["role"] == "user"
        assert body == {
            "model": "words",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.5,
            "max_tokens": 6,
            "ignore_eos": True,
        }
        assert heard.headers["x-mine"] == "1"


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("tokenize", [True, False])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_lengths_are_right_in_the_servers_own_tokens(usage: bool, tokenize: bool, endpoint: Any) -> None:
    with Fake(OpenAI(usage=usage, tokenize=tokenize)) as fake:
        if not usage and not tokenize:
            with pytest.raises(Exception, match="tokenizer"):
                measured(fake, endpoint=endpoint)
            return
        result = measured(fake, endpoint=endpoint, warmup=0)
        frame = 5 if endpoint == "chat" else 0
        words = [len(heard.prompt.split()) for heard in sent(fake, result.endpoint)]
        if usage:
            assert {row.prompt_tokens for row in result.rows} == {40}
            assert set(words) == {40 - frame}
        else:
            assert set(words) == {40}
            assert {row.tokens_from for row in result.rows} == {"text"}
            assert any("usage" in warning for warning in result.warnings)
        assert result.figures.output_tokens == 12 * 6


def test_whole_answers_have_no_times_of_tokens() -> None:
    with Fake(OpenAI()) as fake:
        result = measured(fake, stream=False)
        assert result.figures.completed == 12
        assert result.figures.e2el is not None
        assert (result.figures.ttft, result.figures.itl, result.figures.output_tokens) == (None, None, 72)


def test_several_tokens_in_a_chunk_are_reported() -> None:
    with Fake(OpenAI(by_chunk=3)) as fake:
        found = measured(fake).figures.chunk_tokens
        assert found is not None
        assert found.mean == 3.0


def test_two_runs_ask_for_the_same_and_begin_differently() -> None:
    with Fake(OpenAI()) as fake:
        asked = WorkloadOptions(workload="chat", scale=0.1)
        rows = [measured(fake, asked=asked, seed=3, concurrency=(1,)).rows for _ in range(2)]
        assert [row.asked_input for row in rows[0]] == [row.asked_input for row in rows[1]]
        assert [row.asked_output for row in rows[0]] == [row.asked_output for row in rows[1]]
        # Each run has two beginnings: its system prompt's, and that of the probe which looks at the template.
        begins = Counter(heard.prompt.split()[1:6][0:5].__str__() for heard in sent(fake))
        assert sorted(begins.values()) == [14, 14]
        fake.heard.clear()
        for _ in range(2):
            measured(fake, asked=asked, seed=3, concurrency=(1,), nonce="")
        assert len({heard.prompt.split()[1] for heard in sent(fake)}) == 1


def test_an_open_loop_sends_by_its_plan() -> None:
    with Fake(OpenAI()) as fake:
        result = measured(fake, rates=(400.0,), requests=40)
        assert result.figures.requests == 40
        planned = [row.planned for row in result.rows]
        assert planned == sorted(planned)
        assert result.stages[0].rate == 400.0
        assert result.arrivals == "poisson"
        again = measured(fake, rates=(400.0,), requests=40)
        first, other = ([row.planned - found.rows[0].planned for row in found.rows] for found in (result, again))
        assert first == pytest.approx(other, abs=1e-6)
        assert all(row.lag >= 0.0 and row.start >= row.planned - 0.002 for row in result.rows)


def test_a_rate_may_have_a_most_at_once() -> None:
    with Fake(OpenAI(seconds=0.01)) as fake:
        result = measured(fake, rates=(float("inf"),), concurrency=(2,), requests=20)
        assert (result.figures.completed, result.figures.peak_running) == (20, 2)
        assert any(row.waited > 0.0 for row in result.rows)


def test_past_the_bound_on_requests_at_once_nothing_is_sent() -> None:
    with Fake(OpenAI(seconds=0.05)) as fake:
        result = measured(fake, rates=(float("inf"),), requests=20, running=5, warmup=0)
        assert result.figures.errors["not sent"] + result.figures.completed == 20
        assert len(sent(fake)) == result.figures.completed


def test_several_loads_are_several_stages_of_different_prompts() -> None:
    with Fake(OpenAI()) as fake:
        result = measured(fake, concurrency=(1, 2), requests=5)
        assert [(stage.name, stage.figures.requests) for stage in result.stages] == [("1 at once", 5), ("2 at once", 5)]
        assert [row.stage for row in result.rows] == [0] * 5 + [1] * 5
        assert len({heard.prompt for heard in sent(fake)}) == 12


def test_a_ramp_is_cut_into_stages() -> None:
    with Fake(OpenAI()) as fake:
        result = measured(fake, ramp=(50.0, 150.0), seconds=0.5)
        assert result.figures.requests == sum(stage.figures.requests for stage in result.stages)
        assert 20 <= result.figures.requests <= 90
        rates = [stage.rate for stage in result.stages if stage.rate is not None]
        assert rates == sorted(rates)
        assert 50.0 < rates[0] < rates[-1] < 150.0
        assert {row.stage for row in result.rows} == set(range(len(result.stages)))


def test_a_sweep_stops_where_the_server_does_not_keep_up() -> None:
    with Fake(OpenAI()) as fake:
        result = measured(
            fake,
            sweep=SweepOptions(low=100.0, high=400.0, refine=0, stages=4),
            requests=10,
            objectives={"e2el": 60_000.0},
        )
        assert [stage.rate for stage in result.stages] == [100.0, 200.0, 400.0]
        assert result.knee == 2
        assert any("knee is higher" in warning for warning in result.warnings)
        result = measured(
            fake, sweep=SweepOptions(low=100.0, refine=0, stages=8), requests=10, objectives={"e2el": 1e-3}
        )
        assert [stage.rate for stage in result.stages] == [100.0, 50.0, 25.0, 12.5]
        assert result.knee is None
        assert all("objectives" in stage.why for stage in result.stages)


def test_conversations_carry_the_servers_answers() -> None:
    with Fake(OpenAI()) as fake:
        asked = WorkloadOptions(input_tokens=20, output_tokens=3, turns="3", prefix_tokens=10)
        result = measured(fake, asked=asked, requests=6, warmup=0, concurrency=(1,))
        assert sorted((row.session, row.turn) for row in result.rows) == [(s, t) for s in (0, 1) for t in (0, 1, 2)]
        last = max(sent(fake), key=lambda heard: len(heard.body["messages"])).body["messages"]
        assert [each["role"] for each in last] == ["system", *["user", "assistant"] * 2, "user"]
        assert last[2]["content"] == "w0 w1 w2 "


def test_tenants_send_at_once_each_with_its_own() -> None:
    mix = build_mix(WorkloadOptions(input_tokens=20, output_tokens=3))
    tenants = (
        LoadTenant(name="a", key="sk-a", surface="voice", mix=mix, rate=200.0, arrivals="constant"),
        LoadTenant(name="b", key="sk-b", mix=mix, concurrency=2),
    )
    with Fake(OpenAI()) as fake:
        result = measured(fake, tenants=tenants, concurrency=(), seconds=0.2)
        assert [(group.name, group.requests > 5) for group in result.tenants] == [("a", True), ("b", True)]
        assert [group.name for group in result.surfaces] == ["-", "voice"]
        keys = {(heard.headers.get("authorization"), heard.headers.get("x-headrace-surface")) for heard in sent(fake)}
        assert keys == {("Bearer sk-a", "voice"), ("Bearer sk-b", None)}
        assert "sk-" not in str(result)


def test_a_trace_is_replayed_by_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"at": {place * 0.02}, "prompt": {30 + place}, "answer": 3, "tenant": "t"}}\n' for place in range(8)]
    trace.write_text("".join(lines))
    with Fake(OpenAI()) as fake:
        result = measured(fake, trace=trace, requests=None, speed=2.0)
        assert [row.prompt_tokens for row in result.rows] == list(range(30, 38))
        gaps = [after.planned - before.planned for before, after in zip(result.rows, result.rows[1:], strict=False)]
        assert gaps == pytest.approx([0.01] * 7, abs=1e-6)
        assert (result.load, result.rows[0].tenant) == ("trace", "t")


def test_a_data_set_is_sent_as_it_is_at_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "prompts.jsonl"
    trace.write_text('{"prompt": "one two", "output_tokens": 3}\n{"prompt": "three"}\n')
    with Fake(OpenAI()) as fake:
        result = measured(fake, trace=trace, concurrency=(1,), requests=None)
        assert [row.prompt_tokens for row in result.rows] == [7, 6]
        assert [heard.prompt for heard in fake.asked(CHAT)] == ["one two", "three"]
        with pytest.raises(RequestError, match="no arrival times"):
            measured(fake, trace=trace, concurrency=())


def test_failures_are_counted_by_kind() -> None:
    with Fake(OpenAI(refuse_each=3)) as fake:
        result = measured(fake, requests=12)
        assert result.figures.errors == {"http 429": 4}
        assert result.figures.completed == 8
        assert {row.why for row in result.rows if not row.ok} == {"too many"}


def test_counts_that_are_not_true_are_found() -> None:
    with Fake(OpenAI(lie=1.5)) as fake:
        result = measured(fake)
        assert result.token_check is not None
        assert result.token_check.difference > 0.3
        assert any("output tokens" in warning for warning in result.warnings)
        assert measured(fake, mismatch="off").token_check is None


def test_tokens_past_the_end_of_an_answer_are_no_miscount() -> None:
    asked = WorkloadOptions(input_tokens=40, output_tokens=20)
    with Fake(OpenAI(silent_past=10, ends_after=10)) as fake:
        result = measured(fake, asked=asked)
        check = result.token_check
        assert check is not None
        assert (check.answers, check.difference, check.past_ends) == (8, 0.0, 0.5)
        assert any("on past its end tokens" in warning for warning in result.warnings)
    with Fake(OpenAI(silent_past=5, ends_after=10)) as fake:
        check = measured(fake, asked=asked).token_check
        assert check is not None
        assert check.difference == 0.5


def test_answers_shorter_than_asked_are_said() -> None:
    with Fake(OpenAI(knows_eos=False)) as fake:
        assert any("ignore_eos" in warning for warning in measured(fake).warnings)
        assert measured(fake, ignore_eos=False).warnings == []


def test_texts_are_kept_where_they_are_wanted() -> None:
    with Fake(OpenAI()) as fake:
        assert measured(fake).rows[0].text == ""
        assert measured(fake, texts=True).rows[0].text == "w0 w1 w2 w3 w4 w5 "


def test_seconds_bound_a_stage_and_what_hangs_is_cut() -> None:
    class Hanging(OpenAI):
        async def __call__(self, heard: Heard, writer: Any) -> None:
            if heard.path == CHAT and heard.body.get("stream"):
                return  # says nothing, ever
            await super().__call__(heard, writer)

    with Fake(Hanging()) as fake:
        result = measured(fake, seconds=0.5, drain=0.05, warmup=0)
        assert result.figures.errors == {"unfinished": 3}
        result = measured(fake, seconds=0.5, timeout=0.02, warmup=0)
        assert set(result.figures.errors) == {"timeout"}


def test_a_run_shows_how_it_goes() -> None:
    seen: list[RunSnapshot] = []
    with Fake(OpenAI()) as fake:
        measured(fake, concurrency=(1, 2), requests=5, watch=seen.append)
    last = seen[-1]
    assert seen[0].doing == "warming up"
    assert (last.sent, last.done, last.failed, last.running) == (10, 10, 0, 0)
    assert (last.stage, last.stages, last.load, last.stage_done) == (1, 2, "2 at once", 5)
    assert last.ttft_p50 is not None


def test_ctrl_c_ends_a_run_with_what_it_has() -> None:
    def interrupt(snapshot: RunSnapshot) -> None:
        if snapshot.doing == "running":
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
    try:
        with Fake(OpenAI()) as fake:
            result = measured(fake, rates=(50.0,), seconds=60.0, watch=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.figures.completed > 5
    assert [stage.name for stage in result.stages] == ["interrupted"]
    assert any("interrupted" in warning for warning in result.warnings)


def test_a_server_that_is_not_there_or_refuses_is_said() -> None:
    with Fake(OpenAI(refuse_each=1)) as fake:
        with pytest.raises(ConnectionError, match="429"):
            measured(fake)
        with pytest.raises(RequestError, match="404"):
            measured(fake, endpoint="completions", url=f"{fake.url}/elsewhere", model="m")
    with pytest.raises(ConnectionError, match="refused"):
        measured(fake)


def test_a_server_whose_streams_all_fail_is_not_measured() -> None:
    class Broken(OpenAI):
        async def __call__(self, heard: Heard, writer: Any) -> None:
            if heard.path == CHAT and heard.body.get("stream"):
                writer.close()
            else:
                await super().__call__(heard, writer)

    with Fake(Broken()) as fake, pytest.raises(ConnectionError, match="reset"):
        measured(fake)
