"""Chooses the replica that would finish a request soonest, from its cached prefixes and its remaining work.

Both are counted in tokens of prefill: a cached prefix is worth exactly the work that it saves, so requests with a
common prefix stay together until another replica would be faster. Pure logic; a wrong guess costs only time.

Servers that share workers on other hosts do not see one another's requests. So a conversation that this one does not
know has a home among the replicas, the same for all servers (rendezvous hashing), which takes it unless that has more
than its share of the load (bounded load).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

PIECE: Final = 64  # tokens per piece; a shorter common prefix is not worth a detour
_BOUND: Final = 1.25  # of the mean load, up to which a replica takes the conversations whose home it is
SEQUENCE_COST: Final = 64.0  # tokens of prefill that a running sequence counts as, decoding included


def prefix_keys(tokens: Sequence[int], salt: str) -> list[int]:
    """Return one key for each whole piece of the tokens. A key identifies everything up to the piece's end, in every
    process alike."""
    keys: list[int] = []
    key = _stable(salt)
    for start in range(0, len(tokens) - PIECE + 1, PIECE):
        key = hash((key, *tokens[start : start + PIECE]))
        keys.append(key)
    return keys


@lru_cache(maxsize=1024)
def _stable(text: str) -> int:
    """Hash a text. `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


class ReplicaRole(NamedTuple):
    """What a replica is kept for."""

    number: int
    is_standby: bool = False  # it waits for another to fail
    is_preemptible: bool = False  # its host may be taken away at any time


def eligible(usable: Sequence[ReplicaRole], *, wanted: int, batch: bool) -> list[int]:
    """Return the numbers of the replicas that a request may go to, of those that can take one now.

    Standby replicas stand in for as many as are missing of the `wanted` others. Batch work goes to preemptible replicas
    first, and everything else goes there only if nothing else is left.
    """
    active = [role for role in usable if not role.is_standby]
    standby = [role for role in usable if role.is_standby]
    found = active + standby[: max(0, wanted - len(active))]
    return [role.number for role in found if role.is_preemptible == batch] or [role.number for role in found]


class ReplicaRouter:
    """Remembers, for numbered replicas, the prefixes that each got and the tokens that it still has to compute."""

    def __init__(self, replicas: int = 0, *, most_pieces: int = 65_536) -> None:
        """`replicas` are numbered from 0. `most_pieces` bounds what is remembered of each; the least recently used
        pieces go first."""
        self._most = most_pieces
        self._known: dict[int, OrderedDict[int, None]] = {}
        self._loads: dict[int, float] = {}
        self._others: dict[int, float] = {}  # loads of other clients, as far as they are known
        self._turns: dict[int, int] = {}
        self._names: dict[int, int] = {}  # of replicas that have other clients too, hashed
        self._turn = 0
        for number in range(replicas):
            self.add(number)

    def add(self, replica: int, name: str = "") -> None:
        """`name`: of a replica that other servers use too, the same for all of them; such as its address."""
        if name:
            self._names[replica] = _stable(name)
        self._known[replica] = OrderedDict()
        self._loads[replica] = self._others[replica] = 0.0
        self._turns[replica] = 0

    def remove(self, replica: int) -> None:
        for each in (self._known, self._loads, self._others, self._turns, self._names):
            each.pop(replica, None)

    def choose(self, keys: Sequence[int], length: int, usable: Sequence[int]) -> tuple[int, float]:
        """Return a replica for a prompt of `length` tokens with these keys, and the load that it adds there."""
        matched = {replica: self._matched(replica, keys) for replica in usable}
        costs = {replica: SEQUENCE_COST + length - PIECE * matched[replica] for replica in usable}
        chosen = self._home(keys, matched, costs)
        if chosen is None:
            # Equal replicas take turns.
            chosen = min(usable, key=lambda replica: (self.load(replica) + costs[replica], self._turns[replica]))
        self._turn += 1
        self._turns[chosen] = self._turn
        return chosen, costs[chosen]

    def _home(self, keys: Sequence[int], matched: Mapping[int, int], costs: Mapping[int, float]) -> int | None:
        """Return the home of a prompt that this server does not know, among the replicas that match most of it; None if
        it is known, or no home has room."""
        most = max(matched.values())
        homes = [replica for replica, pieces in matched.items() if pieces == most and replica in self._names]
        if most == len(keys) or len(homes) < 2:
            return None
        first = keys[most]  # the first unknown piece tells conversations with one system prompt apart
        total = sum(map(self.load, matched))
        for replica in sorted(homes, key=lambda each: hash((first, self._names[each]))):
            if self.load(replica) <= _BOUND * total / len(matched) + costs[replica] / 2:
                return replica
        return None

    def add_load(self, replica: int, tokens: float) -> None:
        if replica in self._loads:  # it may have been removed
            self._loads[replica] += tokens

    def set_other_load(self, replica: int, tokens: float) -> None:
        """Set the load that other clients of the replica have there."""
        if replica in self._others:
            self._others[replica] = tokens

    def load(self, replica: int) -> float:
        return self._loads[replica] + self._others[replica]

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
        if replica in self._known:
            self._known[replica].clear()

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        known = self._known[replica]
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)
