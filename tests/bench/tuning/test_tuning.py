"""A tuning on a real engine: traffic, gate, state, configuration and report."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.bench.engine_runs import EngineJob
from headrace.bench.evaluation.documents import read_prompts, read_text
from headrace.bench.roofline import Floor
from headrace.bench.step_measurement import MeasuredStep, StepMeasurement, measure_steps
from headrace.bench.traffic_profile import of_lengths
from headrace.bench.tuning.bottleneck import judge
from headrace.bench.tuning.engine_machine import EngineMachine
from headrace.bench.tuning.levels import NO_PROMPTS, TuningInputs, default_setting, naive_setting, tuning_levels
from headrace.bench.tuning.quality_gate import GateRules, pass_gate
from headrace.bench.tuning.search import OUT_OF_TIME, Gate, LevelResult, Rules, Setting, SettingComparison
from headrace.bench.tuning.tune_report import TuneReport, tune_html, tuned_toml
from headrace.bench.tuning.tuning import TuneOptions, tune
from headrace.bench.tuning.tuning_traffic import make_jobs, tuning_traffic
from headrace.cli import main
from headrace.errors import RequestError
from headrace.models.model_folder import open_model
from headrace.server.config_checks import load_config
from headrace.variant import Variant
from tests.support.tiny_engine import open_tiny

FAST = Rules(least_pairs=1, most_pairs=1, finalists=1, passes=1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Mill {number} stands by", "completion": " the river and turns"} for number in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def inputs(folder: Path, **changes: object) -> TuningInputs:
    defaults = TuningInputs(
        spec=open_model(folder).spec,
        traffic=of_lengths(100, 20, reused=0.5),
        cores=2,
        stored=False,
        gate=True,
        users=4,
    )
    return replace(defaults, **changes)


def test_the_traffic_keeps_lengths_and_shares_prefixes_only_within_a_measurement(tiny_folder: Path) -> None:
    traffic = tuning_traffic(None, "rag", requests=60, users=4, scale=0.1)
    tokenizer = open_model(tiny_folder).tokenizer
    first = make_jobs(traffic, tokenizer, number=1, context=1024)
    assert first == make_jobs(traffic, tokenizer, number=1, context=1024)
    again = make_jobs(traffic, tokenizer, number=2, context=1024)
    assert [(len(job.prompt), job.answer) for job in first] == [(len(job.prompt), job.answer) for job in again]
    starts = [job.prompt[:32] for job in first]
    assert len(set(starts)) < len(starts)  # two of 60 have the same document
    assert not {job.prompt[:32] for job in again} & set(starts)
    cut = make_jobs(traffic, tokenizer, number=1, context=64)
    assert max(len(job.prompt) + job.answer for job in cut) <= 64


def test_requests_send_your_prompts_without_their_answers(tiny_folder: Path, prompts: Path) -> None:
    tokenizer = open_model(tiny_folder).tokenizer
    traffic = tuning_traffic(None, "extract", requests=3, users=1, scale=0.01)
    jobs = make_jobs(traffic, tokenizer, number=0, context=512, prompts=read_prompts(prompts))
    for job in jobs:
        text = tokenizer.decode(list(job.prompt))
        assert "stands by" in text
        assert "turns" not in text


def test_a_trace_is_replayed_at_its_times(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "prompt": 10, "answer": 3}\n{"at": 5.5, "prompt": 20, "answer": 4, "tenant": "a"}\n')
    traffic = tuning_traffic(path, "chat", requests=10, users=4, scale=1.0)
    assert traffic.users is None
    jobs = make_jobs(traffic, open_model(tiny_folder).tokenizer, number=0, context=256)
    assert [(len(job.prompt), job.answer, job.at, job.tenant) for job in jobs] == [(10, 3, 0.0, ""), (20, 4, 5.5, "a")]


def test_levels_that_cannot_help_say_why(tiny_folder: Path) -> None:
    levels = {level.name: level for level in tuning_levels(inputs(tiny_folder))}
    assert [name for name, level in levels.items() if not level.lossy][:3] == ["batching", "prefix cache", "threads"]
    assert all(level.lossy for level in list(levels.values())[8:])
    assert not levels["weights"].skip
    assert "doctor" in levels["huge pages"].skip
    assert "--smaller" in levels["smaller model"].skip
    bare = {level.name: level for level in tuning_levels(inputs(tiny_folder, gate=False, traffic=of_lengths(9, 9)))}
    assert bare["KV precision"].skip == bare["weights"].skip == NO_PROMPTS
    assert "no prompt" in bare["prefix cache"].skip
    stored = {level.name: level for level in tuning_levels(inputs(tiny_folder, stored=True))}
    assert stored["weights"].skip == "the files are quantised"


def test_a_choice_that_changes_nothing_equals_the_setting(tiny_folder: Path) -> None:
    found = inputs(tiny_folder)
    options = {name for level in tuning_levels(found) for choice in level.choices for name in choice.options}
    for setting in (naive_setting(found), default_setting(found)):
        assert options <= {*setting, "model"}
    speculation = next(level for level in tuning_levels(found) if level.name == "speculation")
    same = [
        choice.label
        for choice in speculation.choices
        if {**naive_setting(found), **choice.options} == naive_setting(found)
    ]
    assert same == ["none"]


@pytest.mark.parametrize("has_module", [False, True])
def test_a_checkpoints_own_module_is_tried(tiny_folder: Path, has_module: bool) -> None:
    found = tuning_levels(inputs(tiny_folder, has_module=has_module))
    speculation = next(level for level in found if level.name == "speculation")
    tried = [choice.options["most_drafts"] for choice in speculation.choices if choice.options["speculation"] == "mtp"]
    assert tried == ([1, 2, 4] if has_module else [])


def test_a_setting_is_measured_and_its_tokens_are_those_of_the_naive_one(tiny_folder: Path) -> None:
    traffic = tuning_traffic(None, "chat", requests=4, users=2, scale=0.05)
    found = inputs(tiny_folder, traffic=traffic.profile)
    start, served = naive_setting(found), {**default_setting(found), "weights": "f32", "kv": "f32", "kv_block": 64}
    machine = EngineMachine(str(tiny_folder), traffic, objectives={"ttft_p95": 1e-9}, reference=start, cache=False)
    naive = machine.measure(start, 7)
    assert machine.last_run is not None
    tokens = machine.last_run.tokens
    sample = machine.measure(served, 7)
    assert machine.last_run.tokens == tokens  # batching, threads, prefix cache and drafts and blocks are lossless
    assert sample.figures["memory"] == machine.memory(served)
    assert sample.score < sample.figures["tokens_per_s"]  # an objective that is missed costs score
    assert set(naive.figures) >= {"ttft_p95", "itl_p50", "tokens_per_s"}
    assert machine.predict(start, served) is None  # nothing predicts drafts
    assert (machine.predict(start, {**start, "weights": "int8"}) or 0.0) > 1.0
    assert machine.impossible({**served, "context": 16}) is not None


def test_the_gate_passes_the_model_itself_and_fails_a_model_that_differs(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 20)
    documents = read_text(text)
    plain = Variant.of(str(tiny_folder), weights="f32", kv="f32", cache=False, threads=2)
    same = pass_gate(plain, plain, documents, GateRules(tokens=200), source="notes")
    assert same.passed
    assert same.figures["kl"] == 0.0
    worse = pass_gate(
        replace(plain, weights="int4-channel"), plain, documents, GateRules(tokens=200, most_kl=1e-6), source="notes"
    )
    assert not worse.passed
    assert "KL up to" in worse.reason


def test_a_tuning_from_naive_writes_state_configuration_and_report(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    options = TuneOptions(
        workload="chat",
        requests=3,
        users=2,
        scale=0.05,
        prompts=prompts,
        gate=GateRules(tokens=40),
        origin="naive",
        levels=("batching", "huge pages", "weights"),
        rules=FAST,
        state=state,
        cache=False,
        bottleneck=False,
    )
    report = tune(str(tiny_folder), options)
    assert [result.level for result in report.results] == ["batching", "huge pages", "weights"]
    assert report.measurements > 0
    # The same state: nothing is measured again.
    again = tune(str(tiny_folder), options)
    assert [result.outcome for result in again.results] == [result.outcome for result in report.results]
    assert again.measurements == 0
    with pytest.raises(RequestError, match="belongs to a tuning with another model"):
        tune(str(tiny_folder), replace(options, requests=4))
    advice: list[str] = []
    none = tune(str(tiny_folder), replace(options, state=None, minutes=1e-9), advise=advice.append)
    assert none.measurements == 1
    assert [result.reason for result in none.results if result.level != "huge pages"] == [OUT_OF_TIME] * 2
    assert re.match(r"One measurement takes .* Raise --minutes, or measure fewer", advice[0])
    with pytest.raises(RequestError, match="Unknown level 'pages'"):
        tune(str(tiny_folder), replace(options, levels=("pages",), state=None))


def made_report(final: Setting) -> TuneReport:
    start: Setting = {"batching": "serial", "threads": 1, "weights": "f32", "kv": "f32", "context": 512}
    figures = {"tokens_per_s": 100.0, "ttft_p50": 0.2, "memory": 5e6}
    kept = LevelResult(
        level="batching",
        what="",
        lossy=False,
        walk=1,
        outcome="kept",
        choice="continuous, 8",
        reason="2.00 times (1.90 to 2.10)",
        setting=final,
        gain=2.0,
        low=1.9,
        high=2.1,
        figures=figures,
    )
    failed = replace(
        kept,
        level="weights",
        lossy=True,
        outcome="rolled back",
        reason="the gate failed: KL <up>",
        choice="int4",
        gate=Gate(passed=False, reason="KL <up>"),
    )
    return TuneReport(
        model="mini",
        cpu="a <fast> CPU",
        isa="avx2",
        traffic="chat",
        profile=of_lengths(100, 20),
        requests=12,
        users=4,
        objectives={"ttft_p95": 0.3, "itl_p95": 0.05},
        start=start,
        final=final,
        results=[kept, failed],
        overall=SettingComparison(2.02, 1.9, 2.1, figures, figures),
        before=None,
        after=None,
        measurements=30,
        seconds=60.0,
    )


def test_the_configuration_says_what_was_kept_and_why_and_loads(tmp_path: Path) -> None:
    final: Setting = {
        "batching": "continuous",
        "threads": 2,
        "weights": "int4",
        "keep": ["layers.*.mlp.down=int8"],
        "kv": "int8",
        "context": 512,
        "draft_model": None,
    }
    text = tuned_toml(made_report(final), "mini")
    assert "# kept: batching continuous, 8: 2.00 times" in text
    assert "# rolled back: weights int4: the gate failed" in text
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    options = load_config(path, environ={}).models["mini"].options
    assert options == {
        "threads": 2,
        "weights": "int4",
        "keep": ("layers.*.mlp.down=int8",),
        "kv": "int8",
        "context": 512,
    }
    assert tomllib.loads(text)["surfaces"]["chat"] == {"ttft_ms": 300, "itl_ms": 50}


def test_the_report_draws_a_bar_for_each_kept_level_and_escapes_texts() -> None:
    found = tune_html(made_report({"batching": "continuous", "threads": 2}))
    assert found.count("<rect") == 3  # the first setting, batching, and the whole
    assert "a &lt;fast&gt; CPU" in found
    assert "KL &lt;up&gt;" in found
    assert "Content-Security-Policy" in found
    assert "https://" not in found


def test_steps_are_measured_apart_and_fit_a_model(tiny_folder: Path) -> None:
    opened = open_tiny(tiny_folder)
    ticks = iter(range(10**7))
    try:
        found = measure_steps(opened, batches=(1, 4), prompts=(32, 100), rounds=1, clock=lambda: float(next(ticks)))
    finally:
        opened.engine.close()
    assert {step.rows for step in found.steps} == {1, 4, 32, 100}
    assert found.batch == 4
    assert found.prefill == 100.0  # a clock that ticks once per reading: each step takes one
    assert found.decode == 1.0
    assert found.decode_batch == 4.0


def test_the_bottleneck_is_what_takes_most_of_a_requests_time() -> None:
    steps = StepMeasurement(
        steps=[MeasuredStep(1, 32, 0.01)],
        prefill=1000.0,
        decode=100.0,
        decode_batch=300.0,
        batch=4,
        host_share=0.1,
    )
    least = Floor("int8", 1, 1, 1.0, 1.0, decode_ms=5.0, prefill_ms=256.0)
    jobs = [EngineJob(prompt=(1,) * 200, answer=50)]
    waits = judge(steps, least, jobs, {"ttft_p50": 5.0, "itl_p50": 0.01}, tokeniser=0.0, reused=0.0)
    assert waits.bound == "queueing"
    assert waits.seconds["queueing"] == pytest.approx(4.8)
    assert (waits.prefill_share, waits.decode_share) == (pytest.approx(0.5), pytest.approx(0.5))
    calm = {"ttft_p50": 0.2, "itl_p50": 0.01, "preempted": 0.0}
    assert judge(steps, least, jobs, calm, tokeniser=0.0, reused=0.0).bound == "bandwidth"
    long = [EngineJob(prompt=(1,) * 2000, answer=5)]
    assert judge(steps, least, long, {"ttft_p50": 2.0}, tokeniser=0.0, reused=0.0).bound == "compute"
    assert judge(steps, least, jobs, calm, tokeniser=9.0, reused=0.0).bound == "tokeniser"
    assert judge(replace(steps, host_share=0.9), least, jobs, calm, tokeniser=0.0, reused=0.0).bound == "host"
    assert judge(steps, least, jobs, {**calm, "preempted": 3.0}, tokeniser=0.0, reused=0.0).bound == "KV memory"
    assert math.isclose(sum(waits.seconds.values()), 5.5)


def test_the_command_explains_and_rejects_mistakes(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "headrace.toml"
    arguments = f"tune {tiny_folder} --requests 2 --scale 0.03 --level weights --level speculation --minutes 0"
    assert main([*arguments.split(), "--no-cache", "--explain", "--config", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "out of time" in shown
    assert "pass --prompts" in " ".join(shown.replace("│", " ").split())
    assert "Before, bound by" in shown
    assert tomllib.loads(out.read_text())["models"]
    assert main(["tune", "mini", "--workload", "chatt"]) == 2
    assert "Unknown workload 'chatt'" in capsys.readouterr().err
    assert main(["tune", "mini", "--scale", "0"]) == 2
