"""Chooses the replica that would finish a request soonest, from its cached prefixes and its remaining work.

Both are counted in tokens of prefill: a cached prefix is worth exactly the work that it saves, so requests with a
common prefix stay together until another replica would be faster. Pure logic; a wrong guess costs only time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

PIECE: Final = 64  # tokens per piece; a shorter common prefix is not worth a detour
SEQUENCE_COST: Final = 64.0  # tokens of prefill that a running sequence counts as, decoding included


def prefix_keys(tokens: Sequence[int], salt: str) -> list[int]:
    """Return one key for each whole piece of the tokens. A key identifies everything up to the piece's end."""
    keys: list[int] = []
    key = hash(salt)
    for start in range(0, len(tokens) - PIECE + 1, PIECE):
        key = hash((key, *tokens[start : start + PIECE]))
        keys.append(key)
    return keys


class ReplicaRouter:
    """Remembers, for replicas numbered from 0, the prefixes that each got and the tokens that it still has to
    compute."""

    def __init__(self, replicas: int, *, most_pieces: int = 65_536) -> None:
        """`most_pieces` bounds what is remembered of each replica; the least recently used pieces go first."""
        self._most = most_pieces
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._loads = [0.0] * replicas
        self._turns = [0] * replicas
        self._turn = 0

    def choose(self, keys: Sequence[int], length: int, usable: Sequence[int]) -> tuple[int, float]:
        """Return a replica for a prompt of `length` tokens with these keys, and the load that it adds there."""
        costs = {replica: SEQUENCE_COST + length - PIECE * self._matched(replica, keys) for replica in usable}
        # Equal replicas take turns.
        chosen = min(usable, key=lambda replica: (self._loads[replica] + costs[replica], self._turns[replica]))
        self._turn += 1
        self._turns[chosen] = self._turn
        return chosen, costs[chosen]

    def add_load(self, replica: int, tokens: float) -> None:
        self._loads[replica] += tokens

    def load(self, replica: int) -> float:
        return self._loads[replica]

    def learn(self, replica: int, keys: Sequence[int]) -> None:
        """Record that the replica has these pieces, or will have them before a later request."""
        known = self._known[replica]
        for key in reversed(keys):  # so that the beginning of a text is forgotten last
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget a replica's pieces, because its process is new."""
        self._known[replica].clear()

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        known = self._known[replica]
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)
