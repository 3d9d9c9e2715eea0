"""Predicts how long a step takes on a device that nobody has measured: the roofline with the share that engines reach.

    stage = max(weights read / bandwidth, operations / rate) + KV read / bandwidth + exchange between devices + fixed

Tensor parallelism divides a stage's bytes and operations over devices and adds two all-reduces per layer. Pipeline
parallelism divides layers: a token passes all stages, each of which works on its share of the sequences meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.bench.planning.devices import Device, DeviceKind
from headrace.bench.planning.model_costs import ModelCosts
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of


class StepCost(Protocol):
    def seconds(self, decoding: float, context: float, prefill: int = 0, before: int = 0) -> float:
        """Return the seconds from one token of a sequence to its next.

        `decoding` sequences of `context` tokens decode, and `prefill` rows that follow `before` tokens are computed
        beside them.
        """
        ...


class RooflineCost(msgspec.Struct, frozen=True, kw_only=True):
    costs: ModelCosts
    device: Device
    kind: DeviceKind
    tensor: int = 1
    pipeline: int = 1

    def seconds(self, decoding: float, context: float, prefill: int = 0, before: int = 0) -> float:
        return self.pipeline * sum(self.parts(decoding, context, prefill, before).values())

    def parts(self, decoding: float, context: float, prefill: int = 0, before: int = 0) -> dict[str, float]:
        """Return the seconds of one stage, by what takes them."""
        costs, device, kind = self.costs, self.device, self.kind
        devices = self.tensor * self.pipeline
        # One stage sees its share of the sequences at a time.
        streams, chunk = decoding / self.pipeline, prefill / self.pipeline
        rows = streams + chunk
        bandwidth = device.bandwidth * 1e9 * kind.bandwidth_share
        rate = device.rate(costs.precision, engine=kind.engine) * kind.compute_share
        kv_read = (streams * context + before + prefill if prefill else streams * context) * costs.kv_read
        read = costs.read(round(rows)) / devices / bandwidth
        attention = costs.pair * streams * context + costs.prefill_pair * chunk * (before + prefill / 2.0)
        compute = (costs.operations * rows + attention) / devices / rate
        return {
            "weights": read if read >= compute else 0.0,
            "compute": compute if compute > read else 0.0,
            "kv": kv_read / devices / bandwidth,
            "exchange": self._exchange(rows),
            "fixed": kind.fixed_ms / 1e3 / self.pipeline,
        }

    def _exchange(self, rows: float) -> float:
        """Return the seconds that one stage spends on sending activations."""
        device = self.device
        if self.tensor == self.pipeline == 1 or not device.link:
            return 0.0
        row = 2.0 * self.costs.hidden * rows / (device.link * 1e9)
        seconds = 0.0
        if self.tensor > 1:
            each = device.latency_us / 1e6 + 2.0 * (self.tensor - 1) / self.tensor * row
            seconds += 2.0 * self.costs.layers / self.pipeline * each
        if self.pipeline > 1:
            seconds += device.latency_us / 1e6 + row
        return seconds


class MeasuredCost:
    """Step times that this machine took, from the model that the engine's scheduler uses."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model

    def seconds(self, decoding: float, context: float, prefill: int = 0, before: int = 0) -> float:
        rows = max(1, round(decoding) + prefill)
        return self._model.predict(rows, round(decoding * context) + pairs_of(before, prefill))
