"""Reads the table of devices: bandwidth, operations, memory and price of each, from devices.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Literal

import msgspec
from msgspec.structs import replace

from headrace.errors import RequestError
from headrace.models.precision import SMALL

EngineKind = Literal["headrace", "vllm"]
_WIDER: Mapping[str, tuple[str, ...]] = {  # where a precision is computed, the narrowest first
    "f32": ("f32", "bf16"),
    "bf16": ("bf16", "f32"),
    "fp8": ("fp8", "bf16", "f32"),
    "int8": ("int8", "bf16", "f32"),
    "int4": ("bf16", "int8", "f32"),  # W4A16: the codes become bf16 before they are multiplied
}


class DeviceKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bandwidth_share: float
    compute_share: float
    fixed_ms: float
    memory_share: float  # of the memory, that weights, KV and activations may use together
    engine: EngineKind


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    kind: str
    memory: float  # GB
    bandwidth: float  # GB/s
    operations: dict[str, float]  # 10^12 per second, by precision
    price: float  # USD per hour
    priced: str
    source: str
    link: float = 0.0  # GB/s between two devices; 0: a model cannot be split over several
    latency_us: float = 0.0
    most: int = 1  # devices in a machine

    def rate(self, precision: str, *, engine: EngineKind = "vllm") -> float:
        """Return the operations per second at a precision of the weights, on the data sheet."""
        # Our own kernels multiply smaller weights by 8-bit activations.
        wanted = "int8" if engine == "headrace" and precision in SMALL else precision
        for name in _WIDER[wanted]:
            if name in self.operations:
                return self.operations[name] * 1e12
        return max(self.operations.values()) * 1e12


class HostedPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    billions: float  # active parameters up to which the price applies
    input: float  # USD per million tokens
    output: float


class DeviceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kinds: dict[str, DeviceKind]
    devices: dict[str, Device]
    hosted: list[HostedPrice]

    def kind_of(self, device: Device) -> DeviceKind:
        return self.kinds[device.kind]

    def hosted_price(self, active_parameters: float) -> HostedPrice:
        billions = active_parameters / 1e9
        return next((each for each in self.hosted if billions <= each.billions), self.hosted[-1])

    def chosen(self, names: Sequence[str], prices: Mapping[str, float]) -> dict[str, Device]:
        """Return the named devices, or all, with prices replaced. Raise RequestError for an unknown name."""
        for parameter, given in (("device", names), ("price", list(prices))):
            for name in given:
                if name not in self.devices:
                    raise RequestError(
                        f"Unknown device '{name}'. Expected one of {', '.join(self.devices)}.", parameter=parameter
                    )
        return {
            name: replace(device, price=prices.get(name, device.price))
            for name, device in self.devices.items()
            if not names or name in names
        }


@cache
def device_table() -> DeviceTable:
    text = resources.files("headrace.bench.planning").joinpath("devices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), DeviceTable)
