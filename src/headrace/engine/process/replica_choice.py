"""Which replica a request goes to: the one that would have it done soonest, by what each has cached and has to do.

Owns ReplicaRouter: for each replica a bounded memory of the prefixes that went there, and the tokens that it still has
to compute. Both are in the same unit, tokens of prefill: a cached prefix is worth exactly as much load as it spares, so
requests that share a prefix stay together until another replica would be done sooner. Pure logic; a guess that is wrong
costs time and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

PIECE: Final = 64  # tokens that are remembered together; a shorter common prefix is not worth a detour
SEQUENCE_COST: Final = 64.0  # tokens of prefill that a running sequence weighs, its decoding included


def prefix_keys(tokens: Sequence[int], salt: str) -> list[int]:
    """A key for every whole piece of a text, which stands for all the text up to its end."""
    keys: list[int] = []
    key = hash(salt)
    for start in range(0, len(tokens) - PIECE + 1, PIECE):
        key = hash((key, *tokens[start : start + PIECE]))
        keys.append(key)
    return keys


class ReplicaRouter:
    """The replicas are numbered from 0."""

    def __init__(self, replicas: int, *, most_pieces: int = 65_536) -> None:
        """`most_pieces`: remembered of each replica; the least recently used go first."""
        self._most = most_pieces
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._loads = [0.0] * replicas
        self._turns = [0] * replicas
        self._turn = 0

    def choose(self, keys: Sequence[int], length: int, usable: Sequence[int]) -> tuple[int, float]:
        """A replica for a prompt of `length` tokens with those keys, and the load that it means there."""
        costs = {replica: SEQUENCE_COST + length - PIECE * self._matched(replica, keys) for replica in usable}
        # Among equals they take turns.
        chosen = min(usable, key=lambda replica: (self._loads[replica] + costs[replica], self._turns[replica]))
        self._turn += 1
        self._turns[chosen] = self._turn
        return chosen, costs[chosen]

    def add_load(self, replica: int, tokens: float) -> None:
        self._loads[replica] += tokens

    def load(self, replica: int) -> float:
        return self._loads[replica]

    def learn(self, replica: int, keys: Sequence[int]) -> None:
        """The replica has these pieces now, or will have before a request that follows."""
        known = self._known[replica]
        for key in reversed(keys):  # the beginning of a text is the last to be forgotten
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica's process is a new one, with nothing cached."""
        self._known[replica].clear()

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        known = self._known[replica]
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)
