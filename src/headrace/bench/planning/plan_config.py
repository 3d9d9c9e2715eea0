"""Writes the configuration of a planned variant: for the own engine, or for vLLM engines that Headrace manages."""

from __future__ import annotations

import json
import math

from headrace.bench.planning.capacity_plan import Candidate, CapacityPlan

_MOST_UPSTREAMS = 8  # of one machine
_VLLM_QUANTISATION = {"fp8": "fp8", "int8": "compressed-tensors", "int4": "awq"}


def plan_toml(plan: CapacityPlan, candidate: Candidate) -> str:
    """Return a headrace.toml with comments."""
    expected = candidate.expected.latencies
    head = [
        f"# {plan.model} for {plan.load.rate:.3g} requests/s of {plan.load.traffic.prompt:.0f} tokens in and "
        f"{plan.load.traffic.answer:.0f} out,",
        f"# as planned for {candidate.devices} x {candidate.title}: TTFT p95 {expected['ttft_p95'] * 1e3:.0f} ms, "
        f"between tokens p95 {expected['itl_p95'] * 1e3:.0f} ms.",
        "# A plan is a prediction. Measure before you promise: headrace bench.",
        "",
    ]
    if not candidate.lossless:
        head.insert(
            3, f"# {candidate.weights} changes the model: gate it on your own prompts first (headrace evaluate)."
        )
    body = _own(plan, candidate) if candidate.engine == "headrace" else _vllm(plan, candidate)
    return "\n".join([*head, *body]) + "\n"


def _sequences(candidate: Candidate) -> int:
    return min(4096, max(4, math.ceil(1.5 * candidate.expected.batch)))


def _own(plan: CapacityPlan, candidate: Candidate) -> list[str]:
    name = _key(plan.model)
    sequences = _sequences(candidate)
    held = plan.load.traffic.prompt + plan.load.traffic.answer
    tokens = max(plan.context, math.ceil(sequences * held / 256) * 256)
    tokens = min(tokens, int(candidate.memory.kv_tokens))
    lines = [
        f"[models.{name}]",
        f"path = {json.dumps(plan.model)}",
        f"replicas = 1  # on each of {candidate.replicas} machines" if candidate.replicas > 1 else "replicas = 1",
        "",
        f"[models.{name}.options]",
        f'weights = "{candidate.weights}"',
        f'kv = "{candidate.kv_type}"',
        f"context = {plan.context}  # p95 of prompt and answer together, rounded up",
        f"kv_tokens = {tokens}",
        f"max_sequences = {sequences}",
    ]
    return [*lines, *_surface(plan)]


def _vllm(plan: CapacityPlan, candidate: Candidate) -> list[str]:
    """Return a managed vLLM for each replica that one machine holds, and a split between them."""
    name = _key(plan.model)
    split = candidate.tensor * candidate.pipeline
    shown = min(candidate.replicas, max(1, candidate.most // split), _MOST_UPSTREAMS)
    lines: list[str] = ["# Replace `model` by the folder or hub name of your weights."]
    if candidate.replicas > shown:
        lines += [
            f"# {shown} of {candidate.replicas} replicas: those of one machine. Serve this file on each of "
            f"{math.ceil(candidate.replicas / shown)} machines.",
        ]
    for number in range(1, shown + 1):
        table = f"models.{name}.upstream" if number == 1 else f"models.{name}.upstreams.replica-{number}"
        first = (number - 1) * split
        lines += [
            "",
            f"[{table}]",
            'kind = "vllm"',
            f"context = {plan.context}",
            "",
            f"[{table}.managed]",
            f"model = {json.dumps(plan.model)}",
            f"gpus = {list(range(first, first + split))}",
            f"sequences = {_sequences(candidate)}",
        ]
        if candidate.tensor > 1:
            lines.append(f"tensor_parallel = {candidate.tensor}")
        if candidate.pipeline > 1:
            lines.append(f"pipeline_parallel = {candidate.pipeline}")
        if candidate.weights in _VLLM_QUANTISATION:
            lines.append(f'quantisation = "{_VLLM_QUANTISATION[candidate.weights]}"')
        if candidate.kv_type != "bf16":
            lines.append('kv_dtype = "fp8"')
    if shown > 1:
        each = round(100.0 / shown, 2)
        names = [plan.model, *(f"{plan.model}@replica-{number}" for number in range(2, shown + 1))]
        shares = [*[each] * (shown - 1), round(100.0 - each * (shown - 1), 2)]
        percent = ", ".join(f"{json.dumps(one)} = {part}" for one, part in zip(names, shares, strict=True))
        lines += [
            "",
            "[[routing.rules]]",
            'name = "replicas"',
            f"when = {{ models = [{json.dumps(plan.model)}] }}",
            'split = "replicas"',
            "",
            "[routing.splits.replicas]",
            f"percent = {{ {percent} }}",
        ]
    return [*lines, *_surface(plan)]


def _surface(plan: CapacityPlan) -> list[str]:
    keys = {"ttft": "ttft_ms", "itl": "itl_ms"}
    found: dict[str, float] = {}
    for objective, value in plan.objectives.items():
        key = keys.get(objective.partition("_")[0])
        if key is not None:
            found[key] = min(value * 1e3, found.get(key, math.inf))
    if not found:
        return []
    return ["", "[surfaces.chat]", *(f"{key} = {value:g}" for key, value in found.items())]


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else json.dumps(name)
