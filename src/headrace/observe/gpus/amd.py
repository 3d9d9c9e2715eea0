"""AMD's GPUs by the files of the kernel's driver, amdgpu, below /sys/class/drm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from headrace.observe.gpus.gpu import Gpu, GpuReader

_CARD: Final = re.compile(r"card(\d+)")


def open_amd(root: Path = Path("/")) -> GpuReader | None:
    """Return what reads the GPUs; None on a machine without any."""
    cards = list(_cards(root / "sys/class/drm"))
    if not cards:
        return None

    def read() -> Sequence[Gpu]:
        return [_read(number, card) for number, card in enumerate(cards)]

    return read


def _cards(folder: Path) -> Iterator[Path]:
    numbered = [(int(found[1]), card) for card in folder.glob("card*") if (found := _CARD.fullmatch(card.name))]
    for _, card in sorted(numbered):
        if (card / "device/mem_info_vram_total").is_file():  # of amdgpu alone
            yield card / "device"


def _read(number: int, device: Path) -> Gpu:
    busy = _number(device / "gpu_busy_percent")
    celsius = _number(next(device.glob("hwmon/hwmon*/temp1_input"), None))
    watts = _number(next(device.glob("hwmon/hwmon*/power1_average"), None))
    return Gpu(
        number,
        _text(device / "product_name") or "AMD GPU",
        vendor="amd",
        memory_used=_number(device / "mem_info_vram_used"),
        memory_total=_number(device / "mem_info_vram_total"),
        busy=None if busy is None else busy / 100,
        celsius=None if celsius is None else celsius / 1e3,
        watts=None if watts is None else watts / 1e6,
    )


def _number(path: Path | None) -> int | None:
    text = "" if path is None else _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
