"""A capacity plan: memory and steps from the shape, replicas for a load, what breaks, a configuration that loads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.bench.objectives import parse_objectives
from headrace.bench.planning.capacity_plan import CapacityPlan, Load, PlanOptions, plan_capacity
from headrace.bench.planning.devices import device_table
from headrace.bench.planning.model_costs import model_costs
from headrace.bench.planning.model_shapes import LARGE_SHAPES, PLANNED_SHAPES, model_shape
from headrace.bench.planning.operating_point import ReplicaLimits, most_load, operating_point
from headrace.bench.planning.plan_config import plan_toml
from headrace.bench.planning.step_costs import MeasuredCost, RooflineCost
from headrace.bench.roofline import parameters
from headrace.bench.simulation.scenarios import ScenarioSetup, capacity
from headrace.bench.simulation.simulator import Hardware
from headrace.bench.simulation.synthetic_traffic import LogNormalLengths, SurfaceProfile, TrafficMix
from headrace.bench.traffic_profile import of_lengths
from headrace.cli import main
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.errors import RequestError
from headrace.models.spec import LatentSpec
from headrace.models.step_work import active_parameters
from headrace.server.config_checks import load_config


def plan(name: str, *, rate: float = 8.0, slo: str = "ttft_p95=800ms,itl_p95=50ms", **options: object) -> CapacityPlan:
    shape = model_shape(name)
    table = device_table()
    names = options.pop("devices", [])
    return plan_capacity(
        name,
        shape.spec,
        Load(traffic=of_lengths(1000, 200), rate=rate),
        parse_objectives(slo),
        table,
        table.chosen(names, {}),  # pyright: ignore
        PlanOptions(**options),  # pyright: ignore
        parameters=parameters(shape.spec),
        active=active_parameters(shape.spec),
    )


def test_every_device_names_its_source_and_has_plausible_numbers() -> None:
    table = device_table()
    expected = "h100 h200 b200 a100 l40s l4 rtx4090 mi300x tpu-v5e inferentia2 epyc-7763 xeon-8480 raspberry-pi-5"
    assert set(expected.split()) <= set(table.devices)
    for device in table.devices.values():
        assert device.source
        assert device.priced
        assert device.kind in table.kinds
        assert 1 <= device.memory <= 1024
        assert 10 <= device.bandwidth <= 10_000
        assert device.rate("bf16") <= device.rate("int8") * 1.01
        assert device.most == 1 or device.link > 0


def test_public_shapes_have_the_parameters_of_their_names() -> None:
    billions = {name: parameters(model_shape(name).spec) / 1e9 for name in LARGE_SHAPES}
    assert billions == pytest.approx(
        {
            "llama-3.1-8b": 8.03,
            "llama-3.1-70b": 70.6,
            "llama-3.1-405b": 406,
            "qwen2.5-14b": 14.8,
            "qwen2.5-32b": 32.8,
            "qwen2.5-72b": 72.7,
            "mixtral-8x7b": 46.7,
        },
        rel=0.01,
    )
    assert "tiny" in PLANNED_SHAPES
    with pytest.raises(RequestError, match="a shape will do: tiny"):
        model_shape("llama-9")


def test_memory_is_that_of_weights_and_kv() -> None:
    spec = model_shape("llama-3.1-8b").spec
    costs = model_costs(spec, "bf16", "vllm")
    assert costs.weights == pytest.approx(16.06e9, rel=0.01)
    assert costs.kv_token == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert model_costs(spec, "bf16", "vllm", kv="fp8").kv_token == 65_536
    assert model_costs(spec, "int4", "vllm").weights < 0.4 * costs.weights
    own = [model_costs(spec, name, "headrace").weights for name in ("int4", "int3", "int2")]
    assert own[2] < 0.7 * own[0]
    assert own[1] < 0.85 * own[0]
    # Embedding and head stay at 16 bits, so fp8 is more than half.
    assert 0.5 < model_costs(spec, "fp8", "vllm").weights / costs.weights < 0.6
    latent = replace(spec, latent=LatentSpec(rank=512, turning=64, value_size=128))
    theirs = model_costs(latent, "bf16", "vllm")
    assert theirs.kv_token == 36_864  # 32 layers x (512 + 64) x 2 bytes
    # Prompts are expanded to keys of 128 and values of 128 for each of 32 heads; decoding meets the latent twice.
    assert theirs.prefill_pair == 2 * 32 * 32 * (128 + 128)
    assert theirs.pair == 2 * 32 * 32 * (64 + 2 * 512)
    half = 2 * 32 * 32 * (64 + 128) * 512  # bytes of what expands the latent, which is there in two forms
    assert theirs.weights - theirs.shared == pytest.approx(half + 2 * 128_256 * 4096)


def test_a_mixture_reads_more_experts_with_more_rows() -> None:
    costs = model_costs(model_shape("mixtral-8x7b").spec, "bf16", "vllm")
    assert costs.read(1) == pytest.approx(costs.shared + 2 * costs.expert)
    assert costs.read(64) == pytest.approx(costs.weights - 2 * 32000 * 4096, rel=1e-6)
    assert costs.operations < 2 * 14e9


def test_a_decode_step_takes_the_time_to_read_the_weights() -> None:
    table = device_table()
    device = table.devices["h100"]
    costs = model_costs(model_shape("llama-3.1-8b").spec, "bf16", "vllm")
    cost = RooflineCost(costs=costs, device=device, kind=table.kind_of(device))
    read = costs.shared / (3350e9 * 0.75)
    assert cost.seconds(1, 0) == pytest.approx(read + 2e-3, rel=0.01)
    halved = RooflineCost(costs=costs, device=device, kind=table.kind_of(device), tensor=2)
    exchange = 2 * 32 * (10e-6 + 2 * 4096 / 450e9)
    assert halved.seconds(1, 0) == pytest.approx(read / 2 + 2e-3 + exchange, rel=0.01)
    # A prompt is bound by compute.
    parts = cost.parts(0, 0, 2048)
    assert parts["weights"] == 0.0
    assert parts["compute"] > 0.05


def test_a_70b_model_is_split_and_the_advice_compares_both_ways() -> None:
    found = plan("llama-3.1-70b", devices=["h100", "l4"])
    chosen = found.chosen
    assert chosen is not None
    assert chosen.device == "h100"
    assert chosen.tensor >= 2
    assert chosen.lossless
    assert chosen.memory.weights + chosen.memory.activations + chosen.memory.kv == pytest.approx(chosen.memory.usable)
    assert "tensor parallel" in found.advice[0]
    assert "PCIe" in found.advice[1]
    alone = [each for each in found.rejected if each.device == "l4" and each.weights == "bf16"]
    assert "memory" in alone[0].why or "alone" in alone[0].why


def test_more_load_needs_more_replicas_and_costs_less_than_proportionally_per_token() -> None:
    small, large = plan("llama-3.1-8b", devices=["h100"]), plan("llama-3.1-8b", devices=["h100"], rate=200.0)
    assert small.chosen is not None
    assert large.chosen is not None
    assert large.chosen.devices > small.chosen.devices
    assert large.chosen.capacity >= 200.0
    assert large.chosen.per_million <= small.chosen.per_million
    for found in (small, large):
        assert found.chosen is not None
        for name, most in found.objectives.items():
            assert found.chosen.expected.latencies[name] <= most


def test_what_breaks_first_breaks_at_that_load() -> None:
    found = plan("llama-3.1-8b", devices=["h100"], weights=("bf16",))
    assert found.chosen is not None
    assert found.breaks is not None
    grown = plan("llama-3.1-8b", devices=["h100"], weights=("bf16",), rate=8.0 * found.breaks.times * 1.05)
    assert grown.chosen is not None
    assert grown.chosen.devices > found.chosen.devices
    assert found.chosen.capacity == pytest.approx(8.0 * found.breaks.times, rel=0.05)


def test_lossy_precisions_are_listed_and_not_recommended_unless_you_allow_it() -> None:
    found = plan("llama-3.1-8b")
    assert found.chosen is not None
    assert found.chosen.weights == "bf16"
    assert any(not each.lossless and each.price < found.chosen.price for each in found.candidates)
    assert any("Gate it on your own prompts" in line for line in found.advice)
    allowed = plan("llama-3.1-8b", allow_lossy=True).chosen
    assert allowed is not None
    assert allowed.price < found.chosen.price


def test_three_and_two_bits_are_considered_only_if_named() -> None:
    devices = ["epyc-7763"]
    found = plan("tiny", devices=devices)
    assert {each.weights for each in (*found.candidates, *found.rejected)} == {"bf16", "int8", "int4"}
    found = plan("tiny", devices=devices, weights=("int3",))
    assert {each.weights for each in (*found.candidates, *found.rejected)} == {"int3"}


def test_the_hosted_api_is_cheaper_below_the_break_even_rate_only() -> None:
    found = plan("llama-3.1-8b", devices=["h100"], weights=("bf16",), api_input=0.1, api_output=0.15)
    hosted = found.hosted
    assert hosted is not None
    assert hosted.per_month == pytest.approx(8.0 * (1000 * 0.1 + 200 * 0.15) / 1e6 * 3600 * 730)
    assert (hosted.own_per_month < hosted.per_month) == (hosted.break_even < 8.0)


def test_objectives_that_no_device_meets_say_why() -> None:
    found = plan("llama-3.1-70b", slo="ttft_p95=1ms", devices=["h100"])
    assert found.chosen is None
    assert {each.weights for each in found.rejected} == {"bf16", "fp8", "int8", "int4"}
    assert all(each.why for each in found.rejected)


@pytest.mark.parametrize(("name", "devices"), [("llama-3.1-70b", ["h100"]), ("tiny", ["epyc-7763"])])
def test_the_configuration_loads(name: str, devices: list[str], tmp_path: Path) -> None:
    found = plan(name, devices=devices, rate=30.0)
    assert found.chosen is not None
    text = plan_toml(found, found.chosen)
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    config = load_config(path, environ={})
    model = config.models[name]
    if found.chosen.engine == "vllm":
        assert model.upstream is not None
        assert model.upstream.kind == "vllm"
        assert model.upstream.managed is not None
        assert model.upstream.managed.tensor_parallel == found.chosen.tensor
        every = [model.upstream, *model.upstreams.values()]
        used = [gpu for each in every if each.managed for gpu in each.managed.gpus or ()]
        assert used == list(range(len(every) * found.chosen.tensor * found.chosen.pipeline))
        assert len(used) <= 8
    else:
        assert model.options["context"] == found.context
        assert model.options["kv_tokens"] >= found.context
    assert tomllib.loads(text)["surfaces"]["chat"] == {"ttft_ms": 800, "itl_ms": 50}


def test_the_scheduler_serves_what_the_operating_point_predicts_for_1000_tenants() -> None:
    """The engine's own scheduler over the same step times: its capacity is within 20 % of the prediction."""
    hardware = Hardware(noise=0.0)

    class Linear:
        def seconds(self, decoding: float, context: float, prefill: int = 0, before: int = 0) -> float:
            pairs = decoding * context + prefill * (before + prefill / 2)
            return hardware.fixed + hardware.per_row * (decoding + prefill) + hardware.per_pair * pairs

    for prompt, answer in ((200, 40), (60, 60), (400, 10)):
        kind = SurfaceProfile(
            share=1.0,
            prefix=LogNormalLengths(median=1, spread=0.0),
            own=LogNormalLengths(median=prompt - 1, spread=0.0),
            answer=LogNormalLengths(median=answer, spread=0.0),
        )
        mix = TrafficMix(tenants=1000, kinds={"chat": kind}, cold=1.0, bursts=0.0, seed=3)
        setup = ScenarioSetup(mix=mix, hardware=hardware, limits=SchedulerLimits(), policy=Policy(), orders=["fair"])
        limits = ReplicaLimits(kv_tokens=131_072, max_sequences=64, max_rows=512)
        predicted = most_load(Linear(), of_lengths(prompt, answer), limits, {}).rate
        assert predicted == pytest.approx(capacity(setup), rel=0.2)


def test_a_measured_cost_is_the_engines_own_model() -> None:
    model = StepTimeModel(fixed=2e-3, per_row=1e-4, per_pair=1e-8)
    cost = MeasuredCost(model)
    assert cost.seconds(4, 100, 10, 5) == model.predict(14, 400 + 10 * 5 + 55)
    point = operating_point(
        cost, of_lengths(100, 50), 1.0, ReplicaLimits(kv_tokens=1e6, max_sequences=64, max_rows=512), {}
    )
    assert point.ok
    assert point.batch == pytest.approx(50 * point.latencies["tpot_p50"], rel=0.01)


def test_the_command_prints_json_and_writes_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "headrace.toml"
    arguments = "plan llama-3.1-8b --users 500 --slo ttft_p95=500ms,itl_p95=50ms --device h100 --price h100=2 --json"
    assert main([*arguments.split(), "--config", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"]["rate"] == pytest.approx(500 / 60)
    assert found["chosen"]["price"] == 2.0 * found["chosen"]["tensor"] * found["chosen"]["replicas"]
    assert out.read_text() == found["config"]
    assert main(["plan", "llama-3.1-8b", "--device", "h100", "--slo", "ttft_p95=500ms"]) == 0
    shown = capsys.readouterr().out
    assert "Breaks first" in shown
    assert '[models."llama-3.1-8b".upstream.managed]' in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--slo speed=3", "Invalid objective 'speed=3'"),
        ("--device h1000", "Unknown device 'h1000'"),
        ("--users 0", "users must be at least"),
        ("--reused 1.5", "reused must be 0 to below 1"),
        ("--prompt 900000", "context"),
        ("--weights int5", "Unknown precision 'int5'"),
        ("--price h100", "Invalid price 'h100'"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", *arguments.split()]) == 2
    assert reason in capsys.readouterr().err
