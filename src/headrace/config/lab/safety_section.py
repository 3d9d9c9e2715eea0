"""The section [safety]: whether techniques that may change answers are allowed at all."""

from __future__ import annotations

from headrace.config.value_types import Section, Text


class SafetyConfig(Section, frozen=True):
    lossless_only: bool = False  # turn off every technique that may change an answer; see headrace techniques
    gates: Text | None = None  # folder of results of headrace gate --json, for the prices of faster options
