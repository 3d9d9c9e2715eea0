"""Measures settings on this machine's engine: opens a variant, runs the traffic, closes it. Never asks a server.

Each measurement has an engine of its own, so no cache and no learnt step time carries over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

import headrace._core as _core
from headrace.bench.engine_runs import EngineJob, EngineRun, run_jobs
from headrace.bench.evaluation.documents import Document
from headrace.bench.machine import Machine, bandwidth, cpu_name, probe_machine
from headrace.bench.objectives import Objectives
from headrace.bench.roofline import best_peak, kv_bytes_per_token
from headrace.bench.tuning.quality_gate import AnswersGate, GateRules, pass_gate
from headrace.bench.tuning.search import Gate, Sample, Setting
from headrace.bench.tuning.tuning_traffic import TuningTraffic, make_jobs
from headrace.engine.executors.cpu_executor import memory_of
from headrace.engine.executors.default_sizes import usable_cores
from headrace.engine.executors.memory import gib, usable_memory
from headrace.engine.process.open_engine import open_variant
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import parse_plan
from headrace.models.step_work import active_parameters, decode_bytes
from headrace.surfaces import SurfaceOptions
from headrace.variant import Variant

_PATIENCE_S: Final = 86_400.0  # a measurement's requests are never rejected for waiting
_HOST_S: Final = 0.3e-3  # of a step, in predictions
_STATIC: Final = 0.65  # share of a static batch's places that work, in predictions
_WARM: Final = EngineJob(prompt=tuple(range(1, 17)), answer=2)


class EngineMachine:
    """A TuningMachine for a model and its traffic."""

    def __init__(
        self,
        model: str,
        traffic: TuningTraffic,
        *,
        objectives: Objectives,
        reference: Setting,
        prompts: Sequence[Document] = (),
        job_prompts: Sequence[Document] = (),
        prompts_name: str = "",
        rules: GateRules | None = None,
        answers_gate: AnswersGate | None = None,
        cache: bool = True,
        price: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.folder = open_model(find_model(model))
        self._folders: dict[str, ModelFolder] = {model: self.folder}
        self._model = model
        self._traffic = traffic
        self._objectives = objectives
        self._reference = reference
        self._prompts, self._prompts_name = prompts, prompts_name
        self._job_prompts = job_prompts  # that requests send, in place of words
        self._rules = rules or GateRules()
        self._answers_gate = answers_gate
        self._cache = cache
        self._price = price
        self._seed = seed
        self._context = min(self.folder.spec.context, traffic.profile.context)
        self._gates: dict[str, Gate] = {}
        self._machine: Machine | None = None
        self._bandwidths: dict[int, float] = {}  # by the power of two of the bytes
        self.measurements = 0
        self.last_run: EngineRun | None = None

    def variant(self, setting: Setting) -> Variant:
        options: dict[str, Any] = {key: value for key, value in setting.items() if key not in ("batching", "model")}
        ttft = min((value for name, value in self._objectives.items() if name.startswith("ttft")), default=None)
        itl = min((value for name, value in self._objectives.items() if name.startswith(("itl", "tpot"))), default=None)
        surfaces = {"chat": SurfaceOptions(ttft=ttft, itl=itl, patience=_PATIENCE_S)}
        folder = self.folder_of(setting)
        return msgspec.structs.replace(Variant.of(str(folder.path), **options, cache=self._cache), surfaces=surfaces)

    def jobs(self, number: int) -> list[EngineJob]:
        return make_jobs(
            self._traffic,
            self.folder.tokenizer,
            number=number,
            context=self._context,
            prompts=self._job_prompts,
            seed=self._seed,
        )

    def measure(self, setting: Setting, number: int) -> Sample:
        variant = self.variant(setting)
        jobs = self.jobs(number)
        opened = open_variant(variant, folder=self.folder_of(setting), cuts_texts=False)
        try:
            run_jobs(opened, [_WARM])
            run = run_jobs(
                opened,
                jobs,
                batching=setting["batching"],
                batch=setting["max_sequences"],
                users=self._traffic.users,
            )
            preempted = opened.engine.scheduler.stats().preempted
        finally:
            opened.engine.close()
        self.measurements += 1
        self.last_run = run
        latencies = run.latencies()
        figures = {
            "tokens_per_s": run.tokens_per_s,
            **{name: latencies[name] for name in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "e2el_p95")},
            "memory": self.memory(setting),
            "preempted": float(preempted),
        }
        if run.drafted:
            figures["acceptance"] = run.accepted / run.drafted
        if self._price:
            figures["usd_per_million"] = self._price / 3600.0 / run.tokens_per_s * 1e6
        return Sample(score=self._score(run.tokens_per_s, latencies), figures=figures)

    def _score(self, tokens_per_s: float, latencies: dict[str, float]) -> float:
        """Return tokens per second, less for every objective that is missed, by how far."""
        score = tokens_per_s
        for name, most in self._objectives.items():
            score *= min(1.0, most / latencies[name]) ** 2 if latencies[name] else 1.0
        return score

    def impossible(self, setting: Setting) -> str | None:
        need = memory_of(self.folder_of(setting), self.variant(setting)).total
        usable = usable_memory()
        if usable and need > usable:
            return f"it needs {gib(need)} of memory, and {gib(usable)} are available"
        if setting["context"] < self._context:
            return f"the traffic needs a context of {self._context}"
        return None

    def memory(self, setting: Setting) -> float:
        return float(memory_of(self.folder_of(setting), self.variant(setting)).total)

    def predict(self, current: Setting, setting: Setting) -> float | None:
        """Return the ratio of the floors' times; None for what only a measurement knows."""
        unknown = ("speculation", "most_drafts", "draft_model", "max_rows", "kv_block")
        if any(current.get(name) != setting.get(name) for name in unknown):
            return None
        return self._seconds(current) / self._seconds(setting)

    def gate(self, setting: Setting) -> Gate:
        lossy = {key: setting.get(key) for key in ("model", "weights", "keep", "kv", "group")}
        key = repr(sorted(lossy.items()))
        if key not in self._gates:
            # Speculation, batching and caches change no token, so only what does is compared.
            def plain(one: Setting) -> Variant:
                return msgspec.structs.replace(
                    self.variant(one),
                    speculation="none",
                    draft_model=None,
                    draft_heads=None,
                    skip_layers=(),
                    context=None,
                    kv_tokens=None,
                )

            candidate, reference = plain(setting), plain(self._reference)
            found = pass_gate(candidate, reference, self._prompts, self._rules, source=self._prompts_name)
            if found.passed and self._answers_gate is not None:
                judged = self._answers_gate(candidate, reference)
                reason = f"{found.reason}; {judged.reason}" if judged.passed else judged.reason
                found = Gate(passed=judged.passed, reason=reason, figures={**found.figures, **judged.figures})
            self._gates[key] = found
        return self._gates[key]

    @property
    def cpu(self) -> str:
        return cpu_name()

    def probes(self) -> Machine:
        if self._machine is None:
            self._machine = probe_machine(_core.Pool(usable_cores()))
        return self._machine

    def folder_of(self, setting: Setting) -> ModelFolder:
        name = str(setting.get("model", self._model))
        if name not in self._folders:
            self._folders[name] = open_model(find_model(name))
        return self._folders[name]

    def _seconds(self, setting: Setting) -> float:
        """Return the seconds of the profile's mean request at the floors of this machine."""
        spec = self.folder_of(setting).spec
        plan = parse_plan(str(setting["weights"]), keep=setting.get("keep") or (), embedder=spec.embeds)
        machine = self.probes()
        share = min(setting["threads"], machine.threads) / machine.threads
        read = decode_bytes(spec, plan)
        rate = best_peak(machine, plan.default) * share
        bytes_per_second = self._bandwidth(read) * min(1.0, 1.5 * share)
        profile = self._traffic.profile
        users = self._traffic.at_once
        batch = {"serial": 1.0, "static": _STATIC * min(users, setting["max_sequences"])}.get(
            setting["batching"], float(min(users, setting["max_sequences"]))
        )
        operations = 2.0 * active_parameters(spec)
        kv = kv_bytes_per_token(spec)[setting["kv"]] * (profile.prompt + profile.answer / 2.0)
        decode = max(read / bytes_per_second, operations * batch / rate) + batch * kv / bytes_per_second + _HOST_S
        fresh = profile.prompt * (1.0 - (profile.reused if setting["prefix_cache"] else 0.0))
        return fresh * operations / rate + profile.answer * decode / batch

    def _bandwidth(self, size: int) -> float:
        power = size.bit_length()
        if power not in self._bandwidths:
            self._bandwidths[power] = bandwidth(_core.Pool(usable_cores()), size, seconds=0.05)
        return self._bandwidths[power]
