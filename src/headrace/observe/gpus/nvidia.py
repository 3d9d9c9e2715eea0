"""NVIDIA's GPUs by its management library, NVML, which comes with the driver.

Uses the functions and structures of NVML's C interface that are the same since its second version. Needs no package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any, Final

from headrace.observe.gpus.gpu import Gpu, GpuReader

LIBRARY: Final = "libnvidia-ml.so.1"
_OK: Final = 0
_TEMPERATURE_OF_GPU: Final = 0
_NAME_BYTES: Final = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def open_nvml(library: str = LIBRARY) -> GpuReader | None:
    """Return what reads the GPUs; None on a machine without NVIDIA's driver."""
    try:
        nvml = ctypes.CDLL(library)
        started = nvml.nvmlInit_v2() == _OK
    except (OSError, AttributeError):
        return None
    return (lambda: _read_all(nvml)) if started else None


def _read_all(nvml: Any) -> Sequence[Gpu]:
    count = ctypes.c_uint()
    if (code := nvml.nvmlDeviceGetCount_v2(byref(count))) != _OK:
        raise OSError(f"NVIDIA's driver does not count its GPUs: NVML error {code}. See nvidia-smi.")
    found: list[Gpu] = []
    for number in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), byref(device)) == _OK:
            found.append(_read(nvml, number, device))
    return found


def _read(nvml: Any, number: int, device: ctypes.c_void_p) -> Gpu:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    memory, use = _Memory(), _Utilization()
    celsius, milliwatts = ctypes.c_uint(), ctypes.c_uint()
    named = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES)) == _OK
    has_memory = nvml.nvmlDeviceGetMemoryInfo(device, byref(memory)) == _OK
    has_use = nvml.nvmlDeviceGetUtilizationRates(device, byref(use)) == _OK
    has_celsius = nvml.nvmlDeviceGetTemperature(device, _TEMPERATURE_OF_GPU, byref(celsius)) == _OK
    has_watts = nvml.nvmlDeviceGetPowerUsage(device, byref(milliwatts)) == _OK
    return Gpu(
        number,
        name.value.decode("utf-8", "replace") if named else "NVIDIA GPU",
        memory_used=memory.used if has_memory else None,
        memory_total=memory.total if has_memory else None,
        busy=use.gpu / 100 if has_use else None,
        celsius=float(celsius.value) if has_celsius else None,
        watts=milliwatts.value / 1000 if has_watts else None,
    )
