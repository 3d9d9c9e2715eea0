"""Measures Headrace's server beside CPU peers over HTTP with `headrace bench`, in one interleaved run.

    python benchmarks/serve/run.py --peers llama.cpp,openvino,vllm --repeat 3 --out FILE.json

The results file is rewritten after every load, so an interrupted run keeps what it has. See ../README.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "core"))  # its environments, models and places

import convert
import install
import loads
import places
import servers
from commands import CommandError, without_places
from loads import LOADS, Load, LoadError
from probes import Prober, describe
from report import HIGHER_IS_BETTER, table
from runs import commit, end, listed, now, save
from servers import PEERS, SERVERS, Running, Server, ServerError

FORMAT: Final = 1  # of the results file
FAILURES_ALLOWED: Final = 2  # of one server on one shape, before it gets no more turns
BEHIND: Final = 2.5  # times the best peer's: a peer that is further behind in every metric of a load is not asked again
SLOW_START: Final = 120.0  # seconds: a peer that takes longer to start takes part in the first round alone
PRECISIONS: Final = ("int8", "int4", "bf16")


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, end)
    try:
        return Run(options).play()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loads = [load for load in LOADS if load.name in options.loads]
        self.failures: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []
        self.versions = self._set_up()
        self.results: dict[str, Any] = {}

    def play(self) -> int:
        options = self.options
        entrants = [(shape, each, self._model(shape, each)) for shape in options.shapes for each in self._servers()]
        if options.setup:
            return 1 if self.failures else 0
        self.results = {
            "format": FORMAT,
            "command": f"python benchmarks/serve/run.py {shlex.join(sys.argv[1:])}",
            "started": now(),
            "finished": None,
            "quick": options.quick,
            "repeat": options.repeat,
            "seed": options.seed,
            "machine": describe(Prober(servers.THREADS).machine),
            "versions": {"headrace": {"commit": commit()}, **self.versions},
            "configuration": servers.CONFIGURATION,
            "loads": {load.name: " ".join(load.chosen_flags(quick=options.quick)) for load in self.loads},
            "failures": self.failures,
            "timings": self.timings,
        }
        if options.warm and not options.quick:
            for shape, server, model in entrants:  # packed weights and compiled models are there from now on
                self._turn(0, shape, server, model, warm=True)
        for number in range(1, options.repeat + 1):
            shift = number % len(entrants)
            for shape, server, model in entrants[shift:] + entrants[:shift]:
                self._turn(number, shape, server, model)
        self.results["finished"] = now()
        save(self.results, self.options.out)
        print(table(self.results))
        return 0

    def _set_up(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for peer in install.with_converters(self.options.peers):
            try:
                found[peer] = install.set_up(peer)
                if peer in self.options.peers:
                    install.set_up_server(peer)
            except (CommandError, OSError, subprocess.SubprocessError) as failure:
                found.pop(peer, None)
                self._failed(f"set-up: {without_places(str(failure))}", peer=peer)
        return found

    def _servers(self) -> list[Server]:
        options = self.options
        return [
            server
            for server in SERVERS
            if server.precision in options.precisions
            and (server.peer == "headrace" or (server.peer in options.peers and server.peer in self.versions))
        ]

    def _model(self, shape: str, server: Server) -> Path | None:
        try:
            return convert.model(shape, server.form)
        except (CommandError, OSError) as failure:
            self._failed(f"conversion: {without_places(str(failure))}", peer=server.peer, server=server.name)
            return None

    def _turn(self, number: int, shape: str, server: Server, model: Path | None, *, warm: bool = False) -> None:
        mine = [load for load in self.loads if not self._far_behind(shape, server, load)]
        failed = sum(each.get("server") == server.name and each.get("shape") == shape for each in self.failures)
        if model is None or not mine or failed >= FAILURES_ALLOWED or self._slow_to_start(shape, server):
            return
        begun = time.monotonic()
        try:
            with servers.started(server, model) as (running, first):
                if warm:
                    return
                self._note(number, shape, server, "start", first)
                for load in mine:
                    self._ask(number, shape, server, load, running)
                self._note(number, shape, server, "memory", float(running.memory()))
        except (ServerError, OSError) as failure:
            self._failed(without_places(str(failure)), peer=server.peer, server=server.name, shape=shape, round=number)
        print(f"  {server.name}: turn of {time.monotonic() - begun:.0f} s", flush=True)
        save(self.results, self.options.out)

    def _ask(self, number: int, shape: str, server: Server, load: Load, running: Running) -> None:
        if load.name == "goodput" and self._cannot_be_good(number, shape, server):
            self._note(number, shape, server, "goodput", 0.0)
            return
        try:
            found = loads.measure(
                load, running.url, running.flags, seed=self.options.seed + number, quick=self.options.quick
            )
        except LoadError as failure:
            if not running.alive:
                raise ServerError(f"it ended: {running.why()}") from None
            self._failed(str(failure), peer=server.peer, server=f"{server.name}, {load.name}", shape=shape)
            return
        for metric, value in found.items():
            self._note(number, shape, server, metric, value)
        save(self.results, self.options.out)

    def _note(self, number: int, shape: str, server: Server, metric: str, value: float) -> None:
        self.timings.append(
            {
                "round": number,
                "shape": shape,
                "peer": server.peer,
                "server": server.name,
                "precision": server.precision,
                "metric": metric,
                "value": value,
                "load": os.getloadavg()[0],
            }
        )
        print(f"  {server.name:22} {metric:16} {value:12.5g}", flush=True)

    def _slow_to_start(self, shape: str, server: Server) -> bool:
        mine = [each for each in self.timings if (each["shape"], each["server"]) == (shape, server.name)]
        return server.peer != "headrace" and any(
            each["metric"] == "start" and each["value"] > SLOW_START for each in mine
        )

    def _cannot_be_good(self, number: int, shape: str, server: Server) -> bool:
        """Whether a single stream was slower per token than the goodput objective."""
        mine = [
            each
            for each in self.timings
            if (each["shape"], each["server"], each["round"]) == (shape, server.name, number)
        ]
        return any(each["metric"] == "c1-itl" and each["value"] > loads.OBJECTIVE_TPOT for each in mine)

    def _far_behind(self, shape: str, server: Server, load: Load) -> bool:
        """Whether a peer is so far behind the best one that its first numbers suffice."""
        if server.peer == "headrace":
            return False
        mine = [each for each in self.timings if (each["shape"], each["precision"]) == (shape, server.precision)]
        behind: list[bool] = []
        for metric in {each["metric"] for each in mine if each["server"] == server.name}:
            if metric.partition("-")[0] != load.name and metric != load.name:
                continue
            choose = max if metric in HIGHER_IS_BETTER else min
            own = [each["value"] for each in mine if each["server"] == server.name and each["metric"] == metric]
            peers = [each["value"] for each in mine if each["peer"] != "headrace" and each["metric"] == metric]
            best, other = choose(peers), choose(own)
            ratio = best / max(other, 1e-9) if choose is max else other / max(best, 1e-9)
            behind.append(ratio > BEHIND)
        return bool(behind) and all(behind)

    def _failed(self, reason: str, **what: Any) -> None:
        self.failures.append({**what, "reason": reason})
        print(f"  {what.get('server', what.get('peer'))}: failed: {reason}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Headrace's server beside CPU peers' servers.")
    parser.add_argument("--peers", type=listed(PEERS), default=["llama.cpp", "openvino", "vllm"])
    parser.add_argument("--shapes", type=listed(convert.SHAPES), default=["qwen2.5-0.5b"])
    parser.add_argument("--precisions", type=listed(PRECISIONS), default=["int8", "int4"])
    parser.add_argument("--loads", type=listed([load.name for load in LOADS]), default=[load.name for load in LOADS])
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--setup", action="store_true", help="install the peers, convert the models, and no more")
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="start each untimed first")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--out", type=Path, default=places.BUILD / "serve.json")
    options = parser.parse_args()
    if options.quick:
        options.repeat = 1
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
