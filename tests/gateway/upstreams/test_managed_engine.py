"""Managed engines: their commands and metrics, and a real llama.cpp that is killed, frozen, slow and broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.managed_section import ManagedConfig
from headrace.config.upstream_section import (
    UpstreamConfig,
    UpstreamHealthConfig,
    UpstreamKind,
    UpstreamRetries,
    check_upstream,
)
from headrace.engine.interface.grammar_spec import Grammar
from headrace.errors import HeadraceError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.serving.fingerprint import of_upstream
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.engine_commands import EngineLoad, command_of, environment_of, load_of
from headrace.gateway.upstreams.managed_engine import ManagedEngine
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError
from headrace.models.model_folder import BUNDLED
from tests.support.fake_upstream import answered, exchange, pieces_of, soon
from tests.support.running_server import asynchronous, until

ROOT = Path(__file__).parents[3]
CONVERTER = ROOT / "benchmarks" / "core" / "convert" / "gguf_file.py"
FAKE_VLLM = (sys.executable, "-P", str(ROOT / "tests" / "support" / "programs" / "fake_vllm.py"), "serve")
LLAMA = (sys.executable, "-P", str(ROOT / "tests" / "support" / "programs" / "llama_program.py"))
QUICK = UpstreamHealthConfig(interval_s=0.2, timeout_s=1.0, failures=2)


def command(kind: str, **config: Any) -> str:
    managed = ManagedConfig(**{"model": "m", **config})
    return " ".join(
        command_of(kind, managed, served_name="big", port=7, key="secret", context=config.get("context", 64))
    )


def test_each_engine_gets_its_own_arguments() -> None:
    sized: dict[str, Any] = {"tensor_parallel": 4, "pipeline_parallel": 2, "sequences": 8, "adapters": {"law": "/law"}}
    found = command("vllm", **sized, quantisation="awq", kv_dtype="fp8", arguments=("--enforce-eager",))
    assert found == (
        "vllm serve m --host 127.0.0.1 --port 7 --served-model-name big --enable-lora --lora-modules law=/law "
        "--tensor-parallel-size 4 --pipeline-parallel-size 2 --quantization awq --kv-cache-dtype fp8 "
        "--max-model-len 64 --max-num-seqs 8 --enforce-eager"
    )
    found = command("sglang", **sized, quantisation="fp8")
    assert found.endswith(
        "-m sglang.launch_server --model-path m --host 127.0.0.1 --port 7 --served-model-name big --api-key secret "
        "--enable-metrics --lora-paths law=/law --tp-size 4 --pp-size 2 --quantization fp8 --context-length 64 "
        "--max-running-requests 8"
    )
    found = command("llama.cpp", gpus=(0, 1), tensor_parallel=2, sequences=8, kv_dtype="q8_0")
    assert found == (
        "llama-server --model m --host 127.0.0.1 --port 7 --alias big --metrics --split-mode row --n-gpu-layers 999 "
        "--cache-type-k q8_0 --cache-type-v q8_0 --ctx-size 512 --parallel 8"
    )
    found = command("openvino", gpus=(1,), sequences=8, kv_dtype="u8")
    assert found.endswith(
        "-m headrace.server.openvino_server m --host 127.0.0.1 --port 7 --served-model-name big --device GPU.1 "
        "--kv-cache-dtype u8 --max-model-len 64 --max-num-seqs 8"
    )
    assert command("vllm") == "vllm serve m --host 127.0.0.1 --port 7 --served-model-name big --max-model-len 64"
    assert command("llama.cpp", command=("nice", "llama-server")).startswith("nice llama-server --model m")


def test_the_key_is_in_the_environment_and_not_in_the_arguments() -> None:
    for kind, variable in (("vllm", "VLLM_API_KEY"), ("llama.cpp", "LLAMA_API_KEY"), ("openvino", "OPENVINO_API_KEY")):
        config = ManagedConfig(model="m", gpus=(2, 3), environment={"A": "b"})
        found = environment_of(kind, config, {"PATH": "/bin"}, key="secret")
        gpus = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert found == {"PATH": "/bin", "A": "b", **gpus, variable: "secret"}
        assert "secret" not in command(kind)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "vllm",
            'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
            'vllm:num_requests_waiting{engine="0"} 7.0\nvllm:gpu_cache_usage_perc{engine="0"} 0.25\n',
            EngineLoad(5, 7, 0.25),
        ),
        (
            "sglang",
            "sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n",
            EngineLoad(1, 2, 0.5),
        ),
        (
            "llama.cpp",
            "# TYPE x gauge\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n",
            EngineLoad(1, 4),
        ),
        ("vllm", "vllm:num_requests_running nan\nrubbish\n", EngineLoad()),
    ],
)
def test_the_load_is_read_from_the_engines_metrics(kind: str, text: str, expected: EngineLoad) -> None:
    assert load_of(kind, text) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "processes", "expected"),
    [
        ("vllm", {"url": "http://a/v1"}, 1, "x.url"),
        ("openai", {}, 1, "x.kind"),
        ("vllm", {}, 2, "x.managed"),
        ("llama.cpp", {"managed": {"quantisation": "awq"}}, 1, "x.managed.quantisation"),
        ("openvino", {"managed": {"quantisation": "awq"}}, 1, "x.managed.quantisation"),
        ("openvino", {"managed": {"tensor_parallel": 2}}, 1, "x.managed.tensor_parallel"),
        ("openvino", {"managed": {"adapters": {"a": "b"}}}, 1, "x.managed.adapters"),
        ("vllm", {"managed": {"gpus": (0, 1), "tensor_parallel": 4}}, 1, "x.managed.gpus"),
        ("vllm", {"managed": {"gpus": (0, 1), "tensor_parallel": 2}}, 1, None),
    ],
)
def test_what_does_not_fit_is_a_finding(
    kind: UpstreamKind, changes: dict[str, Any], processes: int, expected: str | None
) -> None:
    managed = ManagedConfig(**{"model": "m", **changes.pop("managed", {})})
    config = UpstreamConfig(kind=kind, managed=managed, **changes)
    found = [where for where, _ in check_upstream(config, {}, "x", processes=processes)]
    assert found == ([] if expected is None else [expected])
    assert [where for where, _ in check_upstream(UpstreamConfig(), {}, "x")] == ["x"]


def test_the_fingerprint_follows_the_model_and_not_the_port() -> None:
    def print_of(**config: Any) -> str:
        managed = ManagedConfig(**{"model": "m", **config})
        return of_upstream(Upstream.of("a", UpstreamConfig(kind="vllm", managed=managed), {}).config)

    assert print_of() == print_of() == print_of(gpus=(0,))
    assert len({print_of(), print_of(model="n"), print_of(kv_dtype="fp8"), print_of(quantisation="awq")}) == 4


@contextlib.asynccontextmanager
async def managed(kind: UpstreamKind, config: ManagedConfig, **changes: Any) -> AsyncIterator[Upstream]:
    defaults: dict[str, Any] = {"health": QUICK, "retries": UpstreamRetries(most=0), "context": 512}
    upstream = Upstream.of("mini@far", UpstreamConfig(kind=kind, managed=config, **(defaults | changes)), os.environ)
    try:
        await upstream.start()
        yield upstream
    finally:
        await upstream.close()
    assert upstream.engine is not None
    assert upstream.engine.pid is None


class HungOnce:
    """An engine that starts, fails one health check, and never answers for its metrics."""

    def __init__(self) -> None:
        self.checks = 0

    async def probe(self) -> bool:
        self.checks += 1
        return self.checks != 2

    async def read_load(self) -> EngineLoad:
        return await asyncio.get_running_loop().create_future()


@asynchronous
async def test_metrics_that_do_not_come_delay_no_health_check() -> None:
    engine = ManagedEngine("a", ManagedConfig(model="m"), ("sleep", "600"), os.environ, check_s=0.01, failures=1)
    probe = HungOnce()
    await engine.start(probe)
    try:
        await until(lambda: engine.restarts == 1 and engine.status == "ready")
        assert engine.load == EngineLoad()
    finally:
        await engine.close()
    assert engine.pid is None


# vLLM, played by a program


@asynchronous
async def test_a_vllm_is_started_asked_and_crowded_by_its_own_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.upstreams.managed_engine._LOAD_S", 0.01)
    notes = tmp_path / "notes.json"
    config = ManagedConfig(
        model="org/model", command=FAKE_VLLM, gpus=(0, 1), tensor_parallel=2, environment={"FAKE_VLLM": str(notes)}
    )
    async with managed("vllm", config) as upstream:
        assert upstream.ready
        told = json.loads(notes.read_text())
        assert told["gpus"] == "0,1"
        assert told["arguments"][:2] == ["serve", "org/model"]
        sized = ["--tensor-parallel-size", "2", "--max-model-len", "512"]
        assert told["arguments"][-6:] == [*sized, "--scheduling-policy", "priority"]
        schema = Grammar("json_schema", '{"type":"object"}')
        pieces = await soon(pieces_of(upstream, grammar=schema, priority=5))
        assert "".join(piece.content for piece in pieces) == "one two three"
        asked = json.loads(notes.with_suffix(".asked").read_text())
        assert asked["response_format"]["type"] == "json_schema"
        assert asked["cache_salt"]
        assert asked["priority"] == -5  # vLLM runs the smallest value first
        assert asked["model"] == "mini@far"
        notes.with_suffix(".metrics").write_text("vllm:num_requests_running 9\nvllm:num_requests_waiting 33\n")
        await until(lambda: not upstream.available)
        assert upstream.ready  # a request that has no other place to go is sent all the same
        assert upstream.state()["engine"]["running"] == 9
        notes.with_suffix(".metrics").write_text("vllm:num_requests_waiting 0\n")
        await until(lambda: upstream.available)


@asynchronous
async def test_a_program_that_is_not_there_is_an_error_with_advice() -> None:
    with pytest.raises(HeadraceError, match=r"no-such-engine: No such file or directory\. Install it"):
        async with managed("vllm", ManagedConfig(model="m", command=("no-such-engine",))):
            pass


# llama.cpp


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: no llama.cpp server to manage")
    file = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    subprocess.run([sys.executable, str(CONVERTER), str(BUNDLED / "mini"), str(file)], check=True, timeout=120)
    return file


async def streaming(upstream: Upstream) -> tuple[UpstreamGeneration, list[ChoiceDelta], asyncio.Task[bool]]:
    """A long answer that has begun, its pieces so far, and the task that reads it."""
    answering = UpstreamGeneration(exchange(stream=True, max_tokens=400, ignore_eos=True), upstream)
    await answering.begin()
    pieces: list[ChoiceDelta] = []
    return answering, pieces, asyncio.create_task(answering.run(lambda piece: pieces.append(piece) is None))


@asynchronous
async def test_a_real_llama_cpp_is_started_used_killed_frozen_and_stopped(model: Path) -> None:
    config = ManagedConfig(model=str(model), command=LLAMA, sequences=2, stop_s=10.0, restart_s=0.05)
    async with managed("llama.cpp", config) as upstream:
        engine = upstream.engine
        assert engine is not None
        found = await soon(pieces_of(upstream, max_tokens=8, ignore_eos=True), 60.0)
        assert found[-1].usage is not None
        assert found[-1].usage.output_tokens == 8
        schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}')
        (choice,) = await soon(answered(upstream, max_tokens=64, grammar=schema), 60.0)
        assert choice.content.lstrip().startswith("{")

        # A client that leaves frees its slot.
        answering, pieces, running = await streaming(upstream)
        await until(lambda: bool(pieces))
        answering.cancel()
        assert await soon(running, 60.0) is True
        answering.settle()
        assert upstream.slots.taken == 0
        await until(lambda: engine.load.running == 0)

        # kill -9 in the middle of a stream
        first = engine.pid
        assert first is not None
        answering, pieces, running = await streaming(upstream)
        await until(lambda: bool(pieces))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BrokenStreamError):
            await soon(running, 60.0)
        answering.settle()
        await until(lambda: engine.status == "ready" and engine.restarts == 1)
        assert engine.pid not in (None, first)
        assert len(await soon(pieces_of(upstream, max_tokens=4, ignore_eos=True), 60.0)) >= 2

        # a process that hangs
        second = engine.pid
        assert second is not None
        os.kill(second, signal.SIGSTOP)
        await until(lambda: engine.status == "ready" and engine.restarts == 2)
        assert engine.pid not in (None, second)
        assert len(await soon(pieces_of(upstream, max_tokens=4, ignore_eos=True), 60.0)) >= 2
        last = engine.pid
        assert last is not None
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


@asynchronous
async def test_a_slow_start_is_waited_for_and_one_that_fails_says_what_the_engine_said(model: Path) -> None:
    slow, broken = model.with_name("slow"), model.with_name("broken")
    slow.touch()
    try:
        with pytest.raises(HeadraceError, match=r"did not answer within 0\.3 s"):
            async with managed("llama.cpp", ManagedConfig(model=str(model), command=LLAMA, start_s=0.3)):
                pass
        async with managed("llama.cpp", ManagedConfig(model=str(model), command=LLAMA)) as upstream:
            assert upstream.ready
        broken.touch()
        with pytest.raises(HeadraceError, match=r"ended during its start \(exit code 3\).*the model is broken"):
            async with managed("llama.cpp", ManagedConfig(model=str(model), command=LLAMA)):
                pass
    finally:
        slow.unlink(missing_ok=True)
        broken.unlink(missing_ok=True)
