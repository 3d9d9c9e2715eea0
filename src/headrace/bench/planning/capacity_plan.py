"""Chooses devices, precision, parallelism and replicas for a load, and says what that costs and what breaks first.

Compares every device of the table, and ranks what meets the objectives by price. Lossy precisions are compared and
never recommended: they need a gate on your own prompts first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from headrace.bench.objectives import Objectives
from headrace.bench.planning.devices import Device, DeviceTable, EngineKind
from headrace.bench.planning.model_costs import LOSSLESS, ONLY_NAMED, WEIGHTS, ModelCosts, model_costs
from headrace.bench.planning.operating_point import OperatingPoint, ReplicaLimits, most_load, operating_point
from headrace.bench.planning.step_costs import RooflineCost, StepCost
from headrace.bench.traffic_profile import TrafficProfile
from headrace.errors import RequestError
from headrace.models.spec import ModelSpec

MOST_REPLICAS: Final = 10_000
HERE: Final = "here"
_ROWS: Final[Mapping[EngineKind, int]] = {"headrace": 512, "vllm": 2048}  # of a step
_SEQUENCES: Final[Mapping[EngineKind, int]] = {"headrace": 64, "vllm": 256}
_HOURS: Final = 730.0  # in a month
_BROKEN: Final = 64.0  # times the load up to which it is asked what breaks


class Load(msgspec.Struct, frozen=True, kw_only=True):
    traffic: TrafficProfile
    rate: float  # mean requests per second
    peak: float = 1.0  # times the mean rate that must be served

    @property
    def tokens(self) -> float:
        """Tokens per second, in and out."""
        return self.rate * (self.traffic.prompt + self.traffic.answer)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one replica, over all of its devices."""

    usable: float
    weights: float
    activations: float
    kv: float  # what is left
    kv_token: float
    kv_tokens: float
    needed: float  # tokens that the load holds at once


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    title: str
    engine: EngineKind
    weights: str
    kv_type: str
    lossless: bool
    tensor: int
    pipeline: int
    replicas: int
    most: int  # devices in a machine
    memory: MemoryPlan
    expected: OperatingPoint  # of a replica, at the peak
    capacity: float  # requests per second of all replicas, within the objectives
    price: float  # USD per hour
    per_million: float  # USD per million tokens, at the mean rate
    per_million_full: float  # at the capacity
    step: dict[str, float] = {}  # seconds of a decode step, by what takes them

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.replicas


class RejectedDevice(msgspec.Struct, frozen=True):
    device: str
    weights: str
    why: str


class Breaking(msgspec.Struct, frozen=True):
    """What breaks first when the load grows and nothing is added."""

    times: float  # the peak load
    what: str


class HostedComparison(msgspec.Struct, frozen=True, kw_only=True):
    input_price: float  # USD per million tokens
    output_price: float
    per_month: float
    own_per_month: float
    break_even: float  # requests per second at which both cost the same with these devices


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    parameters: int
    active_parameters: int
    load: Load
    objectives: dict[str, float]  # seconds
    context: int
    candidates: list[Candidate]  # that meet the objectives, cheapest first
    rejected: list[RejectedDevice]
    chosen: Candidate | None
    breaks: Breaking | None = None
    hosted: HostedComparison | None = None
    advice: list[str] = []


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    weights: Sequence[str] = ()  # empty: all that the device's engine has
    kv: str = "bf16"
    context: int | None = None
    allow_lossy: bool = False  # may the recommended candidate be lossy: only after a gate
    api_input: float | None = None
    api_output: float | None = None


def plan_capacity(
    name: str,
    spec: ModelSpec,
    load: Load,
    objectives: Objectives,
    table: DeviceTable,
    devices: Mapping[str, Device],
    options: PlanOptions,
    *,
    parameters: int,
    active: int,
    measured: Mapping[str, StepCost] | None = None,
) -> CapacityPlan:
    """Plan. `measured` has step times of the device `here`, by precision of the weights."""
    context = options.context or max(load.traffic.context, 256)
    if context > spec.context:
        raise RequestError(
            f"The traffic needs a context of {context:,} tokens, and the model has {spec.context:,}.",
            parameter="prompt",
        )
    candidates: list[Candidate] = []
    rejected: list[RejectedDevice] = []
    for device_name, device in devices.items():
        engine = table.kind_of(device).engine
        for weights in WEIGHTS[engine]:
            if weights not in options.weights and (options.weights or weights in ONLY_NAMED):
                continue
            best: Candidate | None = None
            why = ""
            for cost, costs in _splits(spec, device, table, weights, options.kv):
                own = (measured or {}).get(weights) if device_name == HERE else None
                found = _candidate(device_name, cost, own or cost, costs, spec, load, objectives, options)
                if isinstance(found, str):
                    why = why or found
                elif best is None or _rank(found) < _rank(best):
                    best = found
            if best is not None:
                candidates.append(best)
            else:
                rejected.append(RejectedDevice(device_name, weights, why))
    candidates.sort(key=_rank)
    chosen = next((each for each in candidates if each.lossless or options.allow_lossy), None)
    plan = CapacityPlan(
        model=name,
        parameters=parameters,
        active_parameters=active,
        load=load,
        objectives=dict(objectives),
        context=context,
        candidates=candidates,
        rejected=rejected,
        chosen=chosen,
    )
    if chosen is None:
        return plan
    costs = model_costs(spec, chosen.weights, chosen.engine, kv=options.kv)
    device = devices[chosen.device]
    roofline = RooflineCost(
        costs=costs,
        device=device,
        kind=table.kind_of(device),
        tensor=chosen.tensor,
        pipeline=chosen.pipeline,
    )
    own = (measured or {}).get(chosen.weights) if chosen.device == HERE else None
    return msgspec.structs.replace(
        plan,
        breaks=_breaking(own or roofline, chosen, load, objectives),
        hosted=_hosted(chosen, load, table, options, active),
        advice=[*_split_advice(roofline, chosen, load), *_lossy_advice(candidates, chosen)],
    )


def _rank(candidate: Candidate) -> tuple[float, int, float]:
    return candidate.price, candidate.devices, candidate.expected.latencies["e2el_p50"]


def _splits(
    spec: ModelSpec, device: Device, table: DeviceTable, weights: str, kv: str
) -> Iterator[tuple[RooflineCost, ModelCosts]]:
    kind = table.kind_of(device)
    costs = model_costs(spec, weights, kind.engine, kv=kv)
    for tensor in (1, 2, 4, 8, 16):
        if tensor > device.most or spec.heads % tensor or (tensor > 1 and not device.link):
            continue
        for pipeline in (1, 2, 4):
            if tensor * pipeline > device.most or (pipeline > 1 and pipeline > len(spec.layers)):
                continue
            yield RooflineCost(costs=costs, device=device, kind=kind, tensor=tensor, pipeline=pipeline), costs


def _candidate(
    name: str,
    roofline: RooflineCost,
    cost: StepCost,
    costs: ModelCosts,
    spec: ModelSpec,
    load: Load,
    objectives: Objectives,
    options: PlanOptions,
) -> Candidate | str:
    """Return the candidate, or why it does not work."""
    device, kind = roofline.device, roofline.kind
    devices = roofline.tensor * roofline.pipeline
    rows, sequences = _ROWS[kind.engine], _SEQUENCES[kind.engine]
    usable = device.memory * 1e9 * kind.memory_share * devices
    # Every device of a tensor split holds its own activations.
    activations = costs.activations(rows, sequences, spec.vocab_size) * (1.0 if devices == 1 else 1.5)
    kv = usable - costs.weights - activations
    held = load.traffic.prompt + load.traffic.answer
    if kv < costs.kv_token * held:
        return f"memory: {(costs.weights + activations) / 1e9:.1f} GB before any KV, {usable / 1e9:.1f} GB usable"
    limits = ReplicaLimits(kv_tokens=kv / costs.kv_token, max_sequences=sequences, max_rows=rows)
    traffic = load.traffic
    best = most_load(cost, traffic, limits, objectives)
    if not best.ok:
        return f"alone already: {best.breaks}"
    wanted = load.rate * load.peak
    replicas = math.ceil(wanted / best.rate)
    if replicas > MOST_REPLICAS:
        return f"needs {replicas:,} replicas"
    expected = operating_point(cost, traffic, wanted / replicas, limits, objectives)
    price = device.price * devices * replicas
    hourly = 3600.0 * load.tokens / 1e6
    capacity = best.rate * replicas
    full = 3600.0 * capacity * held / 1e6
    return Candidate(
        device=name,
        title=device.title,
        engine=kind.engine,
        weights=costs.precision,
        kv_type=options.kv,
        lossless=costs.precision in LOSSLESS and options.kv in LOSSLESS,
        tensor=roofline.tensor,
        pipeline=roofline.pipeline,
        replicas=replicas,
        most=device.most,
        memory=MemoryPlan(
            usable=usable,
            weights=costs.weights,
            activations=activations,
            kv=kv,
            kv_token=costs.kv_token,
            kv_tokens=limits.kv_tokens,
            needed=expected.kv_tokens,
        ),
        expected=expected,
        capacity=capacity,
        price=price,
        per_million=price / hourly,
        per_million_full=price / full,
        step=roofline.parts(expected.batch, traffic.prompt + traffic.answer / 2.0) if cost is roofline else {},
    )


def _breaking(cost: StepCost, chosen: Candidate, load: Load, objectives: Objectives) -> Breaking:
    limits = ReplicaLimits(
        kv_tokens=chosen.memory.kv_tokens,
        max_sequences=_SEQUENCES[chosen.engine],
        max_rows=_ROWS[chosen.engine],
    )
    times = 1.0
    while times < _BROKEN:
        times *= 1.02
        found = operating_point(cost, load.traffic, chosen.expected.rate * times, limits, objectives)
        if not found.ok:
            return Breaking(times, found.breaks)
    return Breaking(times, "nothing up to this load")


def _hosted(chosen: Candidate, load: Load, table: DeviceTable, options: PlanOptions, active: int) -> HostedComparison:
    listed = table.hosted_price(active)
    paid_in = listed.input if options.api_input is None else options.api_input
    paid_out = listed.output if options.api_output is None else options.api_output
    each = (load.traffic.prompt * paid_in + load.traffic.answer * paid_out) / 1e6
    return HostedComparison(
        input_price=paid_in,
        output_price=paid_out,
        per_month=each * load.rate * 3600.0 * _HOURS,
        own_per_month=chosen.price * _HOURS,
        break_even=chosen.price / 3600.0 / each if each > 0.0 else math.inf,
    )


def _split_advice(cost: RooflineCost, chosen: Candidate, load: Load) -> list[str]:
    """Compare tensor with pipeline parallelism over the same devices, and this link with PCIe."""
    split = chosen.tensor * chosen.pipeline
    if split == 1:
        return []
    context = load.traffic.prompt + load.traffic.answer / 2.0
    batch = chosen.expected.batch

    def itl(tensor: int, pipeline: int, link: float | None = None) -> float:
        device = cost.device if link is None else msgspec.structs.replace(cost.device, link=link, latency_us=30.0)
        return msgspec.structs.replace(cost, tensor=tensor, pipeline=pipeline, device=device).seconds(batch, context)

    parts = cost.parts(batch, context)
    lines = [
        f"Split over {split} devices: tensor parallel {itl(split, 1) * 1e3:.1f} ms per token, pipeline parallel "
        f"{itl(1, split) * 1e3:.1f} ms. Exchange takes {parts['exchange'] / sum(parts.values()):.0%} of a step."
    ]
    if cost.device.link > 64:
        over_pcie = itl(chosen.tensor, chosen.pipeline, 25.0)
        lines.append(
            f"Without this link, over PCIe 4.0, a token would take {over_pcie * 1e3:.1f} ms: take machines with NVLink "
            "or its like."
            if over_pcie > 1.15 * cost.seconds(batch, context)
            else "PCIe 4.0 in place of this link would cost less than 15 %: cheaper machines may do."
        )
    elif chosen.tensor > 1:
        lines.append("The devices have no NVLink: keep tensor parallelism within one machine and below 4 devices.")
    return lines


def _lossy_advice(candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    cheaper = [each for each in candidates if not each.lossless and each.price < 0.9 * chosen.price]
    if not chosen.lossless or not cheaper:
        return []
    best = cheaper[0]
    return [
        f"{best.weights} on {best.device} would cost {best.price:.2f} USD per hour instead of {chosen.price:.2f}, and "
        "changes the model. Gate it on your own prompts first: headrace evaluate, headrace tune."
    ]
