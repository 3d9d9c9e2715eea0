"""Finds the text that a model is calibrated on if you pass none. Reads no prompts and cuts no tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

BUNDLED_TEXT: Final = Path(__file__).parent / "calibration.txt"  # of Headrace's own documentation, under its licence
HELD_OUT: Final = 10  # every such part of the calibration text is measured on instead
