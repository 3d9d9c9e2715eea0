"""Measures Headrace's core or engine against CPU peers in one interleaved run.

    python benchmarks/core/run.py --peers llama.cpp,openvino --shapes qwen2.5-0.5b --repeat 5 --out FILE.json
    python benchmarks/core/run.py --board engine --repeat 5 --out FILE.json

The results file is rewritten after every turn, so an interrupted run keeps what it has. See ../README.md.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

import convert
import install
import places
from commands import CommandError, without_places
from engines import BOARDS, CONFIGURATION, NAMES, PEERS, PRECISION_BITS, THREADS, Engine, engines
from probes import Prober, describe
from report import table
from runs import commit, end, listed, now, save
from turns import Entrant, Stage, play_round, warm
from workloads import KINDS, WORKLOADS, Prompts

from headrace.models.model_folder import open_model

FORMAT: Final = 1  # of the results file


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, end)
    try:
        return _measure(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _measure(options: argparse.Namespace) -> int:
    versions, failures = _set_up(options.peers)
    peers = [peer for peer in options.peers if peer in versions]
    found = engines(options.board, peers, options.precisions, options.only)
    found = [engine for engine in found if engine.name not in options.leave_out]
    entrants = {shape: _entrants(found, shape, failures) for shape in options.shapes}
    if options.setup:
        for failure in failures:
            print(f"failed: {failure['peer']}: {failure['reason']}", file=sys.stderr)
        return 1 if failures else 0

    prober = Prober(THREADS)
    results: dict[str, Any] = {
        "format": FORMAT,
        "board": options.board,
        "command": f"python benchmarks/core/run.py {shlex.join(sys.argv[1:])}",
        "started": now(),
        "finished": None,
        "quick": options.quick,
        "repeat": options.repeat,
        "seed": options.seed,
        "machine": describe(prober.machine),
        "versions": {"headrace": {"commit": commit()}, **versions},
        "configuration": {peer: CONFIGURATION[peer] for peer in dict.fromkeys(each.peer for each in found)},
        "facts": {},
        "floors": [],
        "failures": failures,
        "timings": [],
    }

    prompts = Prompts(options.seed)
    for shape in options.shapes:
        spec = open_model(places.model(shape, "hf")).spec
        workloads = [workload.short() if options.quick else workload for workload in WORKLOADS]
        stage = Stage(
            shape,
            workloads,
            options.only,
            prober,
            prompts,
            results["timings"],
            failures,
            results["facts"],
            lambda: save(results, options.out),
        )
        starting = [entrant for entrant in entrants[shape] if "start" in entrant.engine.kinds]
        if starting and "start" in options.only:
            print(f"{shape}: first starts", flush=True)
            warm(stage, starting)
        for number in range(1, options.repeat + 1):
            print(f"{shape}: round {number} of {options.repeat}", flush=True)
            for entry in prober.floors(spec, options.precisions):
                results["floors"].append({"round": number, "shape": shape, **entry})
            play_round(stage, entrants[shape], number)
    results["finished"] = now()
    save(results, options.out)
    print()
    print(table(results))
    return 0


def _set_up(peers: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[dict[str, Any]]]:
    """Return the installed peers' versions, and why the others are missing."""
    versions: dict[str, dict[str, str]] = {}
    failures: list[dict[str, Any]] = []
    for peer in install.with_converters(peers):
        try:
            versions[peer] = install.set_up(peer)
        except (CommandError, OSError, subprocess.SubprocessError) as failure:
            failures.append({"peer": peer, "reason": f"set-up: {without_places(str(failure))}"})
            print(f"{peer}: cannot be set up: {failure}", file=sys.stderr, flush=True)
        else:
            print(f"{peer}: {', '.join(f'{name} {version}' for name, version in versions[peer].items())}", flush=True)
    return versions, failures


def _entrants(found: list[Engine], shape: str, failures: list[dict[str, Any]]) -> list[Entrant]:
    entrants: list[Entrant] = []
    for engine in found:
        try:
            entrants.append(Entrant(engine, convert.model(shape, engine.form)))
        except (CommandError, OSError) as failure:
            reason = f"conversion: {without_places(str(failure))}"
            failures.append({"peer": engine.peer, "engine": engine.name, "shape": shape, "reason": reason})
            print(f"{engine.name}: no model: {failure}", file=sys.stderr, flush=True)
    return entrants


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Headrace's bare core against CPU peers.")
    parser.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    parser.add_argument("--shapes", type=listed(convert.SHAPES), default=list(convert.SHAPES))
    parser.add_argument("--precisions", type=listed(PRECISION_BITS), default=list(PRECISION_BITS))
    parser.add_argument("--leave-out", type=listed(NAMES), default=[], help="engines, such as 'llama.cpp Q8_0'")
    parser.add_argument("--only", type=listed(KINDS), default=list(KINDS), help="kinds of workloads")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--setup", action="store_true", help="install the peers, convert the models, and no more")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--out", type=Path, default=places.BUILD / "results.json")
    parser.add_argument("--board", choices=BOARDS, default="core", help="the bare core, or the engine with its process")
    options = parser.parse_args()
    if options.quick:
        options.repeat = 1
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
