"""Compares the throughput that `headrace plan --device here` predicts with the measured one.

    python benchmarks/tuning/predict.py [MODEL ...] [--users 1,4,8] [--prompt N] [--answer N] [--rounds N]

For each model it fits the engine's step-time model to measured steps, predicts the tokens per second of so many users
who send without a pause, and runs them. Step measurements and runs take turns, so that a change of the machine's speed
hits both; the medians of the rounds count.
"""

from __future__ import annotations

import argparse
import random
import statistics

import headrace._core as _core
from headrace.bench.engine_runs import EngineJob, run_jobs
from headrace.bench.machine import cpu_name
from headrace.bench.planning.step_costs import MeasuredCost, StepCost
from headrace.bench.step_measurement import measure_steps
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.models.model_folder import find_model, open_model
from headrace.variant import Variant


def opened(model: str, weights: str) -> OpenedVariant:
    folder = open_model(find_model(model))
    variant = Variant.of(str(folder.path), weights=weights, speculation="none", prefix_cache=False, context=1152)
    return open_variant(variant, folder=folder, cuts_texts=False)


def predicted(cost: StepCost, users: int, prompt: int, answer: int) -> float:
    """Return tokens per second: each answer's steps, and what the prompts of the others add to them."""
    context = prompt + answer / 2
    step = cost.seconds(users, context)
    prompts = users * (cost.seconds(users - 1, context, prompt) - cost.seconds(max(users - 1, 1), context))
    return users * answer / (answer * step + prompts)


def measured(engine: OpenedVariant, users: int, prompt: int, answer: int, seed: int) -> float:
    rng = random.Random(seed)
    vocab = engine.executor.spec.vocab_size
    jobs = [
        EngineJob(prompt=tuple(rng.randrange(vocab) for _ in range(prompt)), answer=answer, surface="batch")
        for _ in range(3 * users)
    ]
    return run_jobs(engine, jobs, users=users).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured throughput.")
    parser.add_argument("models", nargs="*", default=["mini", "draft"])
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--users", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{cpu_name()}, {_core.isa_default()}; {options.prompt} tokens in, {options.answer} out\n")
    print("| model | users | predicted tokens/s | measured tokens/s | predicted / measured |")
    print("|---|---:|---:|---:|---:|")
    for model in options.models:
        engine = opened(model, options.weights)
        users = [int(each) for each in options.users.split(",")]
        rates: dict[int, list[tuple[float, float]]] = {count: [] for count in users}
        for number in range(options.rounds):
            cost = MeasuredCost(measure_steps(engine, rounds=1, seed=number, prompts=(64, 256)).model())
            for count in users:
                rates[count].append(
                    (
                        predicted(cost, count, options.prompt, options.answer),
                        measured(engine, count, options.prompt, options.answer, number),
                    )
                )
        engine.engine.close()
        for count, pairs in rates.items():
            one, other = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
            row = f"| {model} {options.weights} | {count} | {one:,.0f} | {other:,.0f} | {one / other:.2f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
