"""Learns for each entry which scores are good enough to serve it, so that a user's error bound holds.

Owns the belief about each entry: how likely its answer is right at a score. After vCache (Schroeder et al., 2025):
P(right | score) is a sigmoid whose place and slope differ by entry; evidence narrows them down, and an answer is served
only if the bound on its being wrong allows it. Two things are added: a third parameter, the share of wrong answers at
any score, and a prior learned from all entries of the namespace, so that a new entry does not start without knowledge.

    score ──decide──▶ serve, or generate ──▶ was the stored answer right? ──learn──▶ belief, and prior

Deterministic: draws follow from the seed, the entry and its number of decisions. Knows no texts or embeddings.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The grid of beliefs: where the sigmoid is one half, how steep it is, and the share that is wrong at any score.
_PLACES: Final = np.linspace(-0.1, 1.3, 24)
_SLOPES: Final = np.array([6.0, 20.0, 60.0])
_LAPSES: Final = np.array([0.0, 0.01, 0.05, 0.25])
_LAPSE_PRIOR: Final = np.array([0.5, 0.25, 0.15, 0.1])
_T, _G, _L = (
    each.ravel() for each in np.meshgrid(_PLACES, _SLOPES, np.arange(len(_LAPSES)).astype(float), indexing="ij")
)
_KEPT: Final[Floats] = 1.0 - _LAPSES[_L.astype(int)]
_BASE: Final[Floats] = _LAPSE_PRIOR[_L.astype(int)] / (len(_PLACES) * len(_SLOPES))
CELLS: Final = len(_BASE)
_LEAST: Final = 1e-9
_STEPS: Final = 3  # of expectation and maximisation, for each thing that is learned


class Evidence(msgspec.Struct):
    """The evidence about one entry."""

    asked: int = 0  # decisions so far; draws depend on it
    right: int = 0
    wrong: int = 0
    likelihood: NDArray[np.float32] | None = None  # log, by cell; None: no evidence
    row: int = -1  # in the prior's table, while it is there

    def packed(self) -> bytes:
        """Encode the evidence for the database."""
        head = np.array([self.asked, self.right, self.wrong], dtype="<i8").tobytes()
        return head if self.likelihood is None else head + self.likelihood.astype("<f4").tobytes()

    @classmethod
    def unpacked(cls, data: bytes) -> Evidence:
        """Decode evidence; empty for foreign bytes, as after a change of the grid."""
        if len(data) not in (24, 24 + 4 * CELLS):
            return cls()
        asked, right, wrong = (int(each) for each in np.frombuffer(data[:24], dtype="<i8"))
        if len(data) == 24:
            return cls(asked)
        return cls(asked, right, wrong, np.frombuffer(data[24:], dtype="<f4").astype(np.float32))


class ServeDecision(msgspec.Struct, frozen=True):
    serve: bool
    wrong: float  # the bound on P(wrong) if it were served
    good: bool  # it would be served without the brake
    sampled: bool  # drawn for a check against a fresh answer


class Thresholds(msgspec.Struct, kw_only=True):
    """The thresholds of one namespace.

    `per` says what the bound is a share of. "hit": no more than `delta` of the answers that are served are wrong.
    "request": no more than `delta` of the requests that had a candidate get a wrong answer, as in vCache; then a
    doubtful candidate is served at times, with the probability that keeps the bound.
    """

    delta: float = 0.02
    per: Literal["hit", "request"] = "hit"
    seed: int = 0
    caution: float = 0.0  # 0: the bound is the belief's mean; 1: vCache's
    check_share: float = 0.05  # of hits, checked against a fresh answer
    base_weight: float = 8.0  # entries that the prior before any evidence counts for
    remembered: int = 1000  # entries that the prior is learned from, the latest that something was seen of
    brake_window: int = 400  # latest checks that the brake looks at
    _prior: Floats = msgspec.field(default_factory=lambda: _BASE.copy())
    _table: NDArray[np.float32] = msgspec.field(default_factory=lambda: np.zeros((1, CELLS), dtype=np.float32))
    _owners: list[Evidence] = []  # of the table's rows
    _oldest: int = 0
    _checks: deque[bool] = msgspec.field(default_factory=deque[bool])  # whether the served answer was right

    def belief(self, evidence: Evidence) -> Floats:
        if evidence.likelihood is None:
            return self._prior
        weights = self._prior * np.exp(evidence.likelihood - evidence.likelihood.max())
        return weights / weights.sum()

    def wrong(self, evidence: Evidence, score: float) -> float:
        """A bound on the probability that the entry's answer is wrong for a question of this score.

        The belief's mean is right on average, as far as the prior is; vCache's bound holds with confidence: with
        probability 1 - e the entry is one of the cells that are wrong no more often than w, so that e + (1 - e) w is a
        bound for any e. `caution` is how far from the one to the other.
        """
        belief = self.belief(evidence)
        errors = 1.0 - _right(score)
        mean = float(belief @ errors)
        if self.caution == 0.0:
            return mean
        order = np.argsort(errors)
        rest = np.maximum(0.0, 1.0 - np.cumsum(belief[order]))  # what is believed to be worse than each
        return mean + self.caution * (float(np.min(rest + (1.0 - rest) * errors[order])) - mean)

    def decide(self, id: int, evidence: Evidence, score: float) -> ServeDecision:
        evidence.asked += 1
        bound = self.wrong(evidence, score)
        good = bound <= self.delta
        if not good and self.per == "request":
            good = self._draw(id, evidence, "serve") < self.delta / bound
        sampled = self._draw(id, evidence, "check") < self.check_share
        return ServeDecision(good and not self.braked, bound, good, sampled)

    def learn(self, evidence: Evidence, score: float, right: bool, *, good: bool = False) -> None:
        """Record whether the entry's answer was right at a score. `good`: from the decision."""
        probability = _right(score)
        seen = np.log(np.maximum(probability if right else 1.0 - probability, _LEAST)).astype(np.float32)
        evidence.likelihood = seen if evidence.likelihood is None else evidence.likelihood + seen
        evidence.right += right
        evidence.wrong += not right
        if good:
            self._checks.append(right)
            while len(self._checks) > self.brake_window:
                self._checks.popleft()
        self._remember(evidence)

    def remember(self, evidence: Evidence) -> None:
        """Add a restored entry's evidence to the prior."""
        if evidence.likelihood is not None:
            self._remember(evidence)

    def _remember(self, evidence: Evidence) -> None:
        """Puts what was seen of an entry into the table, and takes a step of expectation and maximisation.

        The prior is the share of each cell among all entries, as far as their own evidence tells; the base is added so
        that no cell is ever ruled out. A few products a time: the prior moves with the stream and is never far behind.
        """
        assert evidence.likelihood is not None
        if not (0 <= evidence.row < len(self._owners) and self._owners[evidence.row] is evidence):
            evidence.row = self._new_row()
            self._owners[evidence.row] = evidence
        self._table[evidence.row] = np.exp(evidence.likelihood - evidence.likelihood.max())
        count = len(self._owners)
        table = self._table[:count]
        for _ in range(_STEPS):
            prior = self._prior.astype(np.float32)
            shares = prior * ((1.0 / np.maximum(table @ prior, 1e-30)) @ table)
            total = shares.astype(np.float64) + self.base_weight * _BASE
            self._prior = total / total.sum()

    def _new_row(self) -> int:
        """Return a new row, or the oldest one if the table is full."""
        if len(self._owners) < self.remembered:
            self._owners.append(Evidence())
            if len(self._owners) > len(self._table):
                grown = np.zeros((min(2 * len(self._table), self.remembered), CELLS), dtype=np.float32)
                grown[: len(self._table)] = self._table
                self._table = grown
            return len(self._owners) - 1
        self._oldest = (self._oldest + 1) % self.remembered
        return self._oldest

    @property
    def braked(self) -> bool:
        """True if checks of hits say, beyond doubt, that the bound does not hold: then nothing is served.

        While it is on, fresh answers are compared with what would have been served; once these are right, it lets go.
        """
        wrong = sum(not right for right in self._checks)
        return self.per == "hit" and wrong > 2 and wilson_interval(wrong, len(self._checks))[0] > self.delta

    def _draw(self, id: int, evidence: Evidence, use: str) -> float:
        """Return a deterministic draw from 0 to 1."""
        text = f"{self.seed}/{id}/{evidence.asked}/{use}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") / 2.0**56


def _right(score: float) -> Floats:
    """Return P(right) in each cell."""
    return _KEPT / (1.0 + np.exp(np.clip(_G * (_T - score), -60.0, 60.0)))


def wilson_interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson interval of a share, 95 % by default; 0 to 1 without counts."""
    if total == 0:
        return 0.0, 1.0
    share = count / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
