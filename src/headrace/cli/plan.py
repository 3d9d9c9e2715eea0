"""`headrace plan`: devices, precision, parallelism and replicas for a load, with latencies and costs.

Maps flags to a load and prints the plan.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.bench.objectives import parse_objectives
from headrace.bench.planning.capacity_plan import HERE, Load, PlanOptions, plan_capacity
from headrace.bench.planning.devices import device_table
from headrace.bench.planning.model_costs import WEIGHTS
from headrace.bench.planning.model_shapes import ModelShape, model_shape
from headrace.bench.planning.plan_config import plan_toml
from headrace.bench.planning.plan_table import show_plan
from headrace.bench.planning.step_costs import StepCost
from headrace.bench.planning.this_machine import measured_costs, this_machine
from headrace.bench.roofline import parameters
from headrace.bench.traffic_profile import TrafficProfile, of_lengths, of_trace
from headrace.cli.output_path import check_output_folder
from headrace.errors import RequestError
from headrace.models.formats.atomic_file import new_file
from headrace.models.step_work import active_parameters
from headrace.variant import DEFAULT_MODEL

_COLUMNS: Final = 120  # width of a table that is not printed on a terminal
_KV: Final = ("bf16", "int8", "fp8", "int4")


def plan(
    model: str = DEFAULT_MODEL,
    /,
    *,
    users: float = 100.0,
    per_minute: float = 1.0,
    rate: float | None = None,
    peak: float | None = None,
    prompt: int = 1000,
    answer: int = 200,
    reused: float = 0.0,
    traffic: Path | None = None,
    slo: Annotated[list[str] | None, Parameter(negative=())] = None,
    device: Annotated[list[str] | None, Parameter(negative=())] = None,
    weights: Annotated[list[str] | None, Parameter(negative=())] = None,
    kv: str = "bf16",
    context: int | None = None,
    price: Annotated[list[str] | None, Parameter(negative=())] = None,
    lossy: bool = False,
    api_input: float | None = None,
    api_output: float | None = None,
    measure: bool = True,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    cache: bool = True,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    config: Path | None = None,
    json: bool = False,
) -> None:
    """Plan the devices for a load: how many of which, at what latency and cost, and what breaks first.

    Usage: headrace plan llama-3.1-8b --users 500 --prompt 1000 --answer 200 --slo ttft_p95=500ms,itl_p95=50ms

    It predicts from the model's shape, the devices' data sheets and the share of them that engines reach. `--device
    here` probes this machine, and measures the model's own steps if its files are here.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled or downloaded model, or the shape of a public model, such as llama-3.1-70b.
    users
        Users at the same time.
    per_minute
        Requests of one user per minute.
    rate
        Requests per second; replaces --users and --per-minute.
    peak
        Highest load to serve, as a multiple of the mean. Default: that of --traffic, else 1.
    prompt
        Tokens of a prompt.
    answer
        Tokens of an answer.
    reused
        Share of the prompt tokens that the prefix cache has, 0 to 1.
    traffic
        JSONL trace whose lengths, shared prefixes and rate replace --prompt, --answer, --reused and --users. The
        context follows from the p95 of its lengths.
    slo
        Objectives, such as ttft_p95=300ms,itl_p95=50ms: ttft, itl, tpot or e2el, at p50, p90, p95 or p99. Repeatable.
    device
        Device to consider: a name of the table, or `here`, this machine. Repeatable. Default: the whole table.
    weights
        Precision to consider: bf16, fp8, int8, int4, int3 or int2. Repeatable. Default: all that a device's engine
        has, but not int3 and int2, which cost most models too much.
    kv
        Precision of the KV cache: bf16, int8, fp8 or int4. vLLM has no int8 and int4 and takes fp8 for them.
    context
        Context to configure in tokens. Default: prompt and answer, rounded up.
    price
        Price of a device, NAME=USD per hour. Repeatable.
    lossy
        Recommend precisions that change the model too. Gate them on your own prompts before they get traffic.
    api_input
        Price of a hosted API in USD per million input tokens, to compare with. Default: a typical price for the size.
    api_output
        The same for output tokens.
    measure
        Load the model to measure its steps, for `--device here`.
    threads
        Threads of this machine. Default: its cores.
    cache
        Keep the packed weights in the cache folder for the next start.
    every
        Show every candidate, and why the others do not work.
    config
        Write the configuration of the recommended candidate to this TOML file.
    json
        Print one JSON object instead of the tables.
    """
    objectives = parse_objectives(slo)
    if kv not in _KV:
        raise RequestError(f"Unknown KV precision '{kv}'. Expected one of {', '.join(_KV)}.", parameter="kv")
    known = sorted({name for names in WEIGHTS.values() for name in names})
    for name in weights or ():
        if name not in known:
            raise RequestError(f"Unknown precision '{name}'. Expected one of {', '.join(known)}.", parameter="weights")
    check_output_folder(config, "config")
    shape = model_shape(model)
    load = _load(traffic, users=users, per_minute=per_minute, rate=rate, peak=peak, lengths=(prompt, answer, reused))
    prices = _prices(price or ())
    table = device_table()
    names = device or []
    devices = table.chosen([name for name in names if name != HERE], _without(prices, HERE))
    if names and all(name == HERE for name in names):
        devices = {}
    measured: dict[str, StepCost] = {}
    if HERE in names:
        devices = {HERE: this_machine(threads=threads, price=prices.get(HERE, 0.0)), **devices}
        if measure:
            measured = _measured(shape, weights or (), kv=kv, load=load, threads=threads, cache=cache)
    found = plan_capacity(
        model,
        shape.spec,
        load,
        objectives,
        table,
        devices,
        PlanOptions(
            weights=weights or (),
            kv=kv,
            context=context,
            allow_lossy=lossy,
            api_input=api_input,
            api_output=api_output,
        ),
        parameters=parameters(shape.spec),
        active=active_parameters(shape.spec),
        measured=measured,
    )
    text = None if found.chosen is None else plan_toml(found, found.chosen)
    if config is not None:
        if text is None:
            raise RequestError(
                "No candidate meets the objectives, so there is no configuration to write. Pass --lossy, other "
                "objectives or other devices.",
                parameter="config",
            )
        with new_file(config) as file:
            file.write(text.encode())
    if json:
        print(msgspec.json.encode({**msgspec.to_builtins(found), "config": text}).decode())
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    show_plan(found, console, every=every)
    if config is not None:
        console.print(f"\nWrote {config}.")
    elif text is not None:
        console.print("\nConfiguration (--config FILE writes it):\n", style="bold")
        print(text, end="")


def _load(
    traffic: Path | None,
    *,
    users: float,
    per_minute: float,
    rate: float | None,
    peak: float | None,
    lengths: tuple[int, int, float],
) -> Load:
    prompt, answer, reused = lengths
    for name, value, least in (
        ("users", users, 1e-6),
        ("per_minute", per_minute, 1e-9),
        ("rate", 1.0 if rate is None else rate, 1e-9),
        ("peak", 1.0 if peak is None else peak, 1.0),
        ("prompt", prompt, 1),
        ("answer", answer, 1),
    ):
        if not least <= value < math.inf:
            raise RequestError(f"{name} must be at least {least:g}, not {value:g}.", parameter=name)
    if not 0.0 <= reused < 1.0:
        raise RequestError(f"--reused must be 0 to below 1, not {reused:g}.", parameter="reused")
    found: TrafficProfile = of_lengths(prompt, answer, reused=reused) if traffic is None else of_trace(traffic)
    own = found.rate if rate is None else rate
    return Load(
        traffic=found,
        rate=users * per_minute / 60.0 if own is None else own,
        peak=found.peak if peak is None else peak,
    )


def _prices(given: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in given:
        name, _, value = entry.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not 0.0 <= found[name] < math.inf:
            raise RequestError(f"Invalid price '{entry}'. Expected NAME=USD, such as h100=2.5.", parameter="price")
    return found


def _without(prices: Mapping[str, float], name: str) -> dict[str, float]:
    return {key: value for key, value in prices.items() if key != name}


def _measured(
    shape: ModelShape, weights: Sequence[str], *, kv: str, load: Load, threads: int | None, cache: bool
) -> dict[str, StepCost]:
    if shape.folder is None:
        return {}  # only the shape is known: the roofline of the probes it is
    precisions = [name for name in WEIGHTS["headrace"] if not weights or name in weights]
    return measured_costs(
        shape.folder,
        precisions,
        kv=kv,
        context=load.traffic.context,
        threads=threads,
        cache=cache,
    )
