"""`headrace bench reference`: show what techniques gain, beside ways to serve that lack them.

Maps flags to measurements and prints tables.
"""

from __future__ import annotations

import random
import sys
from typing import Annotated, Final, Literal, get_args

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from headrace.bench.machine import cpu_name
from headrace.bench.references.allocation import (
    POLICIES,
    AllocationResult,
    MemoryRequest,
    simulate_allocation,
)
from headrace.bench.references.engine_modes import ModeResult, compare_modes, reference_jobs
from headrace.bench.references.kernels import KernelResult, compare_attention, compare_fusion
from headrace.bench.results.formatting import milliseconds, number, share
from headrace.errors import RequestError
from headrace.models.model_folder import find_model, open_model
from headrace.variant import DEFAULT_MODEL, KV_BLOCKS, Variant

Subject = Literal["engine", "memory", "kernels"]
_COLUMNS: Final = 100
_KERNEL_TOKENS: Final = (128, 512, 2048)


class ReferenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of --json."""

    model: str
    cpu: str
    engine: list[ModeResult] = []
    memory: list[AllocationResult] = []
    kernels: list[KernelResult] = []


def reference(
    model: str = DEFAULT_MODEL,
    /,
    *,
    what: Annotated[list[Subject] | None, Parameter(negative=())] = None,
    requests: int = 16,
    prompt: int = 96,
    answer: int = 16,
    weights: str = "auto",
    batch: int = 8,
    rounds: int = 3,
    kv_tokens: int = 8192,
    context: int = 2048,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    cache: bool = True,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Show what techniques gain: run the same requests without each of them.

    Usage: headrace bench reference mini --requests 16

    `engine` runs the model on this machine without prefix reuse, with static batches, one request at a time, and
    without a KV cache; all give the same tokens. `memory` simulates KV memory in blocks of several sizes, and reserved
    in one piece. `kernels` times attention and products in numpy, tiled and joined and not.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled model (mini, draft), or a downloaded model's name.
    what
        What to show: engine, memory or kernels. Repeatable. Default: all.
    requests
        Requests that arrive together.
    prompt
        Tokens of a prompt; half of them are the same in all. For `memory` the longest prompt, and half of it the
        shortest.
    answer
        Tokens of an answer, on average.
    weights
        Precision of the weights.
    batch
        Requests of a static batch.
    rounds
        Rounds in which the modes take turns. Medians count.
    kv_tokens
        Tokens of KV memory for `memory`.
    context
        Longest sequence for `memory`: what a server reserves that knows no better.
    threads
        Threads to compute with. Default: the machine's cores.
    cache
        Keep the packed weights in the cache folder for the next start.
    seed
        Seed of the prompts.
    json
        Print one JSON object instead of the tables.
    """
    for name, value in (("requests", requests), ("prompt", prompt), ("answer", answer), ("rounds", rounds)):
        if not 1 <= value <= 100_000:
            raise RequestError(f"{name} must be 1 to 100000, not {value}.", parameter=name)
    if not 1 <= batch <= 64:
        raise RequestError(f"--batch must be 1 to 64, not {batch}.", parameter="batch")
    if not 2 * answer + prompt <= context <= kv_tokens:
        raise RequestError(
            f"context must be from {2 * answer + prompt}, the longest request, to {kv_tokens}, the KV memory, "
            f"not {context}.",
            parameter="context",
        )
    subjects = what or list(get_args(Subject))
    report = ReferenceReport(
        model=model,
        cpu=cpu_name(),
        engine=_engine(model, requests, prompt, answer, weights, batch, rounds, threads, cache, seed)
        if "engine" in subjects
        else [],
        memory=_memory(requests, prompt, answer, kv_tokens, context, seed) if "memory" in subjects else [],
        kernels=_kernels(rounds, seed) if "kernels" in subjects else [],
    )
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report, Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS))


def _engine(
    model: str,
    requests: int,
    prompt: int,
    answer: int,
    weights: str,
    batch: int,
    rounds: int,
    threads: int | None,
    cache: bool,
    seed: int,
) -> list[ModeResult]:
    folder = open_model(find_model(model))
    if folder.spec.kind != "decoder":
        raise RequestError(f"{folder.spec.architecture} generates no text. Pass a decoder.", parameter="model")
    jobs = reference_jobs(folder.spec.vocab_size, requests=requests, prompt=prompt, answer=answer, seed=seed)
    longest = max(len(job.prompt) + job.answer for job in jobs)
    if longest > folder.spec.context:
        raise RequestError(
            f"Prompt and answer take {longest} tokens, and the model has {folder.spec.context}.", parameter="prompt"
        )
    variant = Variant.of(
        str(folder.path),
        weights=weights,
        threads=threads,
        context=longest,
        kv_tokens=(longest + 16) * min(requests, 64),
        cache=cache,
    )

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    found = compare_modes(folder, variant, jobs, batch=batch, rounds=rounds, progress=progress)
    progress("")
    return found


def _memory(requests: int, prompt: int, answer: int, kv_tokens: int, context: int, seed: int) -> list[AllocationResult]:
    jobs = reference_jobs(1000, requests=16 * requests, prompt=prompt, answer=answer, seed=seed)
    dice = random.Random(f"{seed} lengths")
    # Prompts of many lengths fill blocks to every degree. Clients ask for more than they get: max_tokens is twice the
    # mean answer.
    wanted = [
        MemoryRequest(dice.randint(-(-prompt // 2), prompt), job.answer, max(job.answer, 2 * answer)) for job in jobs
    ]
    sizes = {"paged": KV_BLOCKS}
    return [
        simulate_allocation(wanted, policy, kv_tokens=kv_tokens, context=context, block=block)
        for policy in POLICIES
        for block in sizes.get(policy, (0,))
    ]


def _kernels(rounds: int, seed: int) -> list[KernelResult]:
    return [
        *(compare_attention(tokens, rounds=rounds, seed=seed) for tokens in _KERNEL_TOKENS),
        *(compare_fusion(tokens, rounds=rounds, seed=seed) for tokens in (1, *_KERNEL_TOKENS)),
    ]


def _show(report: ReferenceReport, console: Console) -> None:
    console.print(f"{report.model} on {report.cpu}")
    if report.engine:
        table = Table(title="The same requests and the same tokens", title_justify="left")
        table.add_column("mode")
        for heading in ("tokens/s", "TTFT p50", "E2EL p50", "tokens computed", "the engine gains"):
            table.add_column(heading, justify="right")
        for row in report.engine:
            table.add_row(
                row.mode,
                number(row.tokens_per_s),
                milliseconds(row.ttft_p50 * 1e3),
                milliseconds(row.e2el_p50 * 1e3),
                f"{row.rows:,}",
                f"{row.times:.2f} times",
            )
        console.print(table)
    if report.memory:
        table = Table(title="KV memory, simulated", title_justify="left")
        table.add_column("reserved")
        for heading in ("sequences at once", "reserved, no token", "free, unusable", "time", "preempted"):
            table.add_column(heading, justify="right")
        for each in report.memory:
            table.add_row(
                f"{each.policy}, {each.block}" if each.block else each.policy,
                f"{each.at_once:.1f}",
                share(each.wasted),
                share(each.unusable),
                f"{each.time:,}",
                f"{each.preempted:,}",
            )
        console.print(table)
    if report.kernels:
        table = Table(title="In numpy, both ways", title_justify="left")
        table.add_column("technique")
        for heading in ("tokens", "without", "with", "gain", "bytes without", "bytes with"):
            table.add_column(heading, justify="right")
        for one in report.kernels:
            table.add_row(
                one.technique,
                f"{one.tokens:,}",
                milliseconds(one.plain_s * 1e3),
                milliseconds(one.better_s * 1e3),
                f"{one.times:.2f} times",
                f"{one.plain_bytes:,}",
                f"{one.better_bytes:,}",
            )
        console.print(table)
