"""Writes the configuration of a planned variant: for the own engine, or for vLLM servers that Headrace routes to."""

from __future__ import annotations

import json
import math

from headrace.bench.planning.capacity_plan import Candidate, CapacityPlan

_PORT = 8001  # of the first vLLM server
_MOST_UPSTREAMS = 8  # written out; put a load balancer before more
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
    name = _key(plan.model)
    flags = [
        f"--max-model-len {plan.context}",
        f"--max-num-seqs {_sequences(candidate)}",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
    ]
    if candidate.tensor > 1:
        flags.append(f"--tensor-parallel-size {candidate.tensor}")
    if candidate.pipeline > 1:
        flags.append(f"--pipeline-parallel-size {candidate.pipeline}")
    if candidate.weights in _VLLM_QUANTISATION:
        flags.append(f"--quantization {_VLLM_QUANTISATION[candidate.weights]}")
    if candidate.kv_type in {"fp8", "int8"}:
        flags.append("--kv-cache-dtype fp8")
    lines = [
        f"# Start {candidate.replicas} of these servers, each on {candidate.tensor * candidate.pipeline} devices:",
        f"#   vllm serve YOUR_WEIGHTS --served-model-name {json.dumps(plan.model)} --port {_PORT} \\",
        *(f"#     {flag} \\" for flag in flags[:-1]),
        f"#     {flags[-1]}",
        f"[models.{name}.upstream]",
        f'url = "http://127.0.0.1:{_PORT}/v1"',
        'kind = "vllm"',
        f"model = {json.dumps(plan.model)}",
    ]
    shown = min(candidate.replicas, _MOST_UPSTREAMS)
    for number in range(2, shown + 1):
        lines += [
            "",
            f"[models.{name}.upstreams.replica-{number}]",
            f'url = "http://127.0.0.1:{_PORT + number - 1}/v1"',
            'kind = "vllm"',
            f"model = {json.dumps(plan.model)}",
        ]
    if shown > 1:
        each = round(100.0 / shown, 2)
        names = [plan.model, *(f"{plan.model}@replica-{number}" for number in range(2, shown + 1))]
        shares = [*[each] * (shown - 1), round(100.0 - each * (shown - 1), 2)]
        percent = ", ".join(f"{json.dumps(one)} = {share}" for one, share in zip(names, shares, strict=True))
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
