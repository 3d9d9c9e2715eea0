"""Remembers what a tuning measured, in memory and in its state file, and ends the walk when its time is over.

The walk depends only on its measurements. So a run that was cut short goes on by walking again: it gets the remembered
measurements back, also those of a level that was half done, and measures only what is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.bench.tuning.search import Gate, OutOfTimeError, Sample, Setting, TuningMachine
from headrace.errors import RequestError
from headrace.models.formats.atomic_file import new_file


class TuneState(msgspec.Struct, kw_only=True):
    digest: str  # of what the measurements depend on
    samples: dict[str, Sample] = {}
    gates: dict[str, Gate] = {}


def read_state(path: Path | None, digest: str) -> TuneState:
    """Return what an earlier run measured; nothing if there is no file. Raise RequestError if it is another's."""
    if path is None or not path.exists():
        return TuneState(digest=digest)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=TuneState)
    except msgspec.DecodeError as error:
        raise RequestError(f"{path} is not the state of a tuning: {error}", parameter="state") from None
    if state.digest != digest:
        raise RequestError(
            f"{path} belongs to a tuning with another model, traffic or options. Pass another file or remove it.",
            parameter="state",
        )
    return state


class RememberedMachine:
    """A TuningMachine that asks another one at most once for each measurement and gate."""

    def __init__(
        self,
        machine: TuningMachine,
        state: TuneState,
        path: Path | None = None,
        *,
        time_is_over: Callable[[], bool] = lambda: False,
        purpose: str = "",  # measurements are remembered for one purpose: pairs are only compared if both are as old
    ) -> None:
        self._machine = machine
        self._purpose = purpose
        self._state = state
        self._path = path
        self._time_is_over = time_is_over
        self._turns: dict[str, int] = {}

    def measure(self, setting: Setting, number: int) -> Sample:
        key = f"{self._purpose}{setting_key(setting)} {number}"
        # Two measurements of one setting with one number are not the same: the first levels measure their own noise.
        turn = self._turns.setdefault(key, 0)
        self._turns[key] += 1
        key = f"{key} {turn}"
        if key not in self._state.samples:
            if self._time_is_over():
                raise OutOfTimeError
            self._state.samples[key] = self._machine.measure(setting, number)
            self._save()
        return self._state.samples[key]

    def predict(self, current: Setting, setting: Setting) -> float | None:
        return self._machine.predict(current, setting)

    def impossible(self, setting: Setting) -> str | None:
        return self._machine.impossible(setting)

    def memory(self, setting: Setting) -> float:
        return self._machine.memory(setting)

    def gate(self, setting: Setting) -> Gate:
        key = setting_key(setting)
        if key not in self._state.gates:
            self._state.gates[key] = self._machine.gate(setting)
            self._save()
        return self._state.gates[key]

    def _save(self) -> None:
        if self._path is not None:
            with new_file(self._path) as file:
                file.write(msgspec.json.encode(self._state))


def setting_key(setting: Setting) -> str:
    return json.dumps(setting, sort_keys=True, default=str)
