"""AMD's GPUs are read from the files of the kernel's driver."""

from __future__ import annotations

from pathlib import Path

from headrace.observe.gpus.amd import open_amd
from headrace.observe.gpus.gpu import Gpu


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_cards_of_amdgpu_are_read_in_their_order(tmp_path: Path) -> None:
    drm = tmp_path / "sys/class/drm"
    write(drm / "card10/device", mem_info_vram_total="1000\n", mem_info_vram_used="250\n")
    write(
        drm / "card2/device",
        mem_info_vram_total="4000\n",
        mem_info_vram_used="1000\n",
        gpu_busy_percent="81\n",
        product_name="AMD Instinct MI300X\n",
    )
    write(drm / "card2/device/hwmon/hwmon5", temp1_input="61000\n", power1_average="412000000\n")
    write(drm / "card2-DP-1")  # an output of the card
    write(drm / "card0/device", vendor="0x8086\n")  # of another driver
    read = open_amd(tmp_path)
    assert read is not None
    assert read() == [
        Gpu(0, "AMD Instinct MI300X", "amd", memory_used=1000, memory_total=4000, busy=0.81, celsius=61.0, watts=412.0),
        Gpu(1, "AMD GPU", "amd", memory_used=250, memory_total=1000),
    ]


def test_a_card_that_is_gone_says_nothing(tmp_path: Path) -> None:
    device = tmp_path / "sys/class/drm/card0/device"
    write(device, mem_info_vram_total="4000\n")
    read = open_amd(tmp_path)
    assert read is not None
    (device / "mem_info_vram_total").unlink()
    assert read() == [Gpu(0, "AMD GPU", "amd")]


def test_without_cards_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert open_amd(tmp_path) is None
