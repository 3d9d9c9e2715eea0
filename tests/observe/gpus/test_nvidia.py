"""NVIDIA's GPUs are read through NVML's C interface: a stand-in for the driver's library answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.observe.gpus.gpu import Gpu
from headrace.observe.gpus.nvidia import open_nvml

COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")

# Two GPUs; the second is divided (MIG), whose use and power the driver does not say.
STAND_IN = r"""
#include <string.h>
typedef struct { unsigned number; } *Device;
static struct { unsigned number; } devices[2] = {{0}, {1}};
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return COUNT; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, Device *device) {
  if (number > 1) return 15; /* it is lost */
  *device = (Device)&devices[number];
  return 0;
}
int nvmlDeviceGetName(Device device, char *name, unsigned length) {
  strncpy(name, device->number ? "NVIDIA B" : "NVIDIA A", length);
  return 0;
}
int nvmlDeviceGetMemoryInfo(Device device, unsigned long long memory[3]) {
  memory[0] = 80ull << 30;
  memory[1] = 60ull << 30;
  memory[2] = 20ull << 30;
  return 0;
}
int nvmlDeviceGetUtilizationRates(Device device, unsigned rates[2]) {
  rates[0] = 37;
  rates[1] = 12;
  return device->number ? 3 : 0;
}
int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) {
  *celsius = 54;
  return sensor;
}
int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) {
  *milliwatts = 312500;
  return device->number ? 3 : 0;
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def library(folder: Path, *, init: int = 0, count: int = 0) -> str:
    assert COMPILER is not None
    source, target = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(STAND_IN)
    results = (f"-DINIT={init}", f"-DCOUNT={count}")
    subprocess.run([COMPILER, "-shared", "-fPIC", *results, str(source), "-o", str(target)], check=True)
    return str(target)


def test_all_that_the_driver_says_is_read(tmp_path: Path) -> None:
    read = open_nvml(library(tmp_path))
    assert read is not None
    memory = {"memory_used": 20 * 2**30, "memory_total": 80 * 2**30}
    assert read() == [
        Gpu(0, "NVIDIA A", **memory, busy=0.37, celsius=54.0, watts=312.5),
        Gpu(1, "NVIDIA B", **memory, celsius=54.0),
    ]


def test_a_driver_that_lost_its_gpus_is_an_error(tmp_path: Path) -> None:
    read = open_nvml(library(tmp_path, count=999))
    assert read is not None
    with pytest.raises(OSError, match="NVML error 999"):
        read()


def test_a_driver_that_does_not_start_and_a_machine_without_one_have_no_gpus(tmp_path: Path) -> None:
    assert open_nvml(library(tmp_path, init=9)) is None
    assert open_nvml(str(tmp_path / "none.so")) is None
