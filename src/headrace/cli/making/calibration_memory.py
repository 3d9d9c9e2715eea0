"""Says before the work begins that the machine lacks the memory for it, and how many calibration tokens would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.engine.executors.memory import SETTING, InsufficientMemoryError, gib, usable_memory

_FEWER_TOKENS: Final = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096, 2_048)  # that are offered


def check_memory(work: str, sequences: Sequence[Sequence[int]], needed: Callable[[int, int], int]) -> None:
    """Raise InsufficientMemoryError, with what to do, before an hour of work is lost. `needed` bounds the bytes for a
    number of tokens and the length of the longest sequence. `work` begins the sentence: "Compressing NAME"."""
    available = usable_memory()
    longest = max((len(sequence) for sequence in sequences), default=0)

    def bound(tokens: int) -> int:
        return needed(tokens, min(longest, tokens))

    counted = sum(len(sequence) for sequence in sequences)
    if not available or bound(counted) <= available:
        return
    fitting = next((each for each in _FEWER_TOKENS if each < counted and bound(each) <= available), None)
    advice = f"pass --calibrate-tokens {fitting}, " if fitting else ""
    raise InsufficientMemoryError(
        f"{work} with {counted:,} calibration tokens takes up to {gib(bound(counted))} of memory. Only "
        f"{gib(available)} is available. To go on, {advice}use a machine with more memory, or set {SETTING} to the "
        "GiB that it may take."
    )
