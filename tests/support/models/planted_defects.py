"""Copies of a bundled model with a defect, for what must find it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np

from headrace.models.model_folder import BUNDLED


def copied_model(folder: Path, model: str = "mini") -> Path:
    shutil.copytree(BUNDLED / model, folder)
    return folder


def with_noise(folder: Path, tensor: str, share: float, model: str = "mini") -> Path:
    """Add noise to one tensor, of a share of its standard deviation."""
    path = copied_model(folder, model) / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    at = slice(8 + length + begin, 8 + length + end)
    values = (np.frombuffer(bytes(data[at]), np.uint16).astype(np.uint32) << 16).view(np.float32)
    noise = np.random.default_rng(1).normal(0.0, share * float(values.std()), values.size).astype(np.float32)
    data[at] = ((values + noise).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    path.write_bytes(data)
    return folder
