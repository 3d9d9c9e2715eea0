"""Checks what a drill found, apart from promises that depend on how fast the machine is."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench.drills.promises import Promise


def broken(promises: Sequence[Promise]) -> list[str]:
    """Describe the broken promises that must hold on any machine, however fast or busy."""
    return [f"{each.promised}: {each.found}" for each in promises if not each.kept and not each.timed]
