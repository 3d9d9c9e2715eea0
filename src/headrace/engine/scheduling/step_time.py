"""How long a step will take: a model that is measured while the engine runs.

    seconds = speed * bend(rows) * (fixed + per_row * rows + per_pair * pairs)

`rows` are the step's new tokens and `pairs` the KV tokens that they read, all rows together. The line is fitted to one
centre of gravity per kind of step (powers of two of rows and of pairs), so that hours of pure decoding do not make it
forget what a prefill costs. `bend` is by how much the centres lie beside the line: what no line can say, such as that
the first rows cost nothing where a step waits for memory. `speed` follows a machine that becomes slower or faster,
within a dozen steps. A step that a busy machine held up moves them by a little at most. Memory is bounded. Owns only
this arithmetic; knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

_FAST: Final = 0.08  # share of an error that the speed takes up at once
_MOST_ERROR: Final = 0.7  # logarithm: an error beyond a factor of two counts as that
_BEND_BOUND: Final = math.log(3.0)
_REMEMBERED: Final = 40  # steps that a centre of gravity is the mean of
_REFIT: Final = 32  # steps between two fits of the line
_CLASSES: Final = 24  # powers of two of rows, and of pairs
_LEAST: Final = 1e-9  # seconds; nothing is faster

StepTimeLine = tuple[float, float, float]  # fixed, per row, per pair, in seconds


class _Centre(msgspec.Struct):
    """Mean of the steps of one kind, at the speed that the line is of."""

    rows: float
    pairs: float
    seconds: float
    steps: int


class StepTimeModel:
    """Until it has seen steps it says what it was made with, which need only have the right order of magnitude."""

    def __init__(self, fixed: float = 10e-3, per_row: float = 1e-3, per_pair: float = 20e-9) -> None:
        self._line: StepTimeLine = (fixed, per_row, per_pair)
        self._speed = 0.0  # logarithm
        self._bend = [0.0] * (_CLASSES + 1)  # logarithms, at powers of two of rows
        self._centres: dict[tuple[int, int], _Centre] = {}
        self.steps = 0
        self.error = 0.0  # mean of |log(measured / predicted)| of late

    def predict(self, rows: int, pairs: int) -> float:
        """Seconds of a step."""
        if rows <= 0:
            return 0.0
        fixed, per_row, per_pair = self._line
        return math.exp(self._speed + self._bent(rows)) * (fixed + per_row * rows + per_pair * pairs)

    def rows_within(self, seconds: float, *, most: int, rows: int = 0, pairs: int = 0, context: int = 0) -> int:
        """Rows, at most `most`, by which a step of `rows` and `pairs` may grow and still end within `seconds`.

        They are to follow `context` tokens of their own sequence.
        """
        if most <= 0 or self.predict(rows + most, pairs + pairs_of(context, most)) <= seconds:
            return max(most, 0)
        fits, over = 0, most
        while over - fits > 1:
            middle = (fits + over) // 2
            if self.predict(rows + middle, pairs + pairs_of(context, middle)) <= seconds:
                fits = middle
            else:
                over = middle
        return fits

    def observe(self, rows: int, pairs: int, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        if rows <= 0 or not 0.0 < seconds < math.inf:
            return
        fixed, per_row, per_pair = self._line
        line = max(fixed + per_row * rows + per_pair * pairs, _LEAST)
        error = math.log(seconds / line) - self._speed - self._bent(rows)
        self.steps += 1
        self.error += (min(abs(error), _MOST_ERROR) - self.error) / min(self.steps, _REMEMBERED)
        if self.steps <= 3:
            self._speed += error / self.steps  # what it was made with says nothing of this machine
        else:
            error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
            self._speed += _FAST * error
        self._gather(rows, pairs, seconds)
        if self.steps % _REFIT == 0 or (self.steps < _REFIT and self.steps % 4 == 0):
            self._fit()

    @property
    def coefficients(self) -> StepTimeLine:
        """Seconds fixed, per row and per pair, at today's speed."""
        speed = math.exp(self._speed)
        fixed, per_row, per_pair = self._line
        return fixed * speed, per_row * speed, per_pair * speed

    def _bent(self, rows: int) -> float:
        low, share = _place(rows)
        bend = self._bend
        return bend[low] + share * (bend[low + 1] - bend[low])

    def _gather(self, rows: int, pairs: int, seconds: float) -> None:
        # At the line's speed, and no further from what was expected than an error may count.
        fixed, per_row, per_pair = self._line
        line = max(fixed + per_row * rows + per_pair * pairs, _LEAST)
        seconds *= math.exp(-self._speed)
        key = (_place(rows)[0], min(pairs.bit_length() // 2, _CLASSES))
        centre = self._centres.get(key)
        if centre is None:
            self._centres[key] = _Centre(rows, pairs, seconds, 1)
            return
        if self.steps > _REFIT:
            most = math.exp(_MOST_ERROR + _BEND_BOUND)
            seconds = max(line / most, min(line * most, seconds))
        centre.steps = min(centre.steps + 1, _REMEMBERED)
        share = 1.0 / centre.steps
        # A step that was held up by something else says little of its kind: it counts as twice the mean at most.
        if centre.steps > 4:
            seconds = min(seconds, 2.0 * centre.seconds)
        centre.rows += share * (rows - centre.rows)
        centre.pairs += share * (pairs - centre.pairs)
        centre.seconds += share * (seconds - centre.seconds)

    def _fit(self) -> None:
        """Least squares of relative errors over the centres; a coefficient that would be negative is nought."""
        free: tuple[int, ...] = (0, 1, 2)
        points = [
            (1.0, centre.rows, centre.pairs, centre.seconds, min(centre.steps, 8) / centre.seconds**2)
            for centre in self._centres.values()
            if centre.seconds > 0.0
        ]
        while free:
            found = _solve(points, free, self._line)
            least = min(free, key=found.__getitem__)
            if found[least] >= 0.0:
                break
            free = tuple(place for place in free if place != least)
        else:
            return
        if sum(found) > 0.0:
            self._line = found
            self._bend = _bends(self._centres.values(), found)


def _bends(centres: Iterable[_Centre], line: StepTimeLine) -> list[float]:
    """At each power of two of rows, how far the centres around it lie beside the line; between them, a straight way."""
    fixed, per_row, per_pair = line
    sums = [0.0] * (_CLASSES + 1)
    weights = [0.0] * (_CLASSES + 1)
    for centre in centres:
        off = math.log(centre.seconds / max(fixed + per_row * centre.rows + per_pair * centre.pairs, _LEAST))
        low, share = _place(round(centre.rows))
        for place, weight in ((low, 1.0 - share), (low + 1, share)):
            sums[place] += weight * centre.steps * max(-_BEND_BOUND, min(_BEND_BOUND, off))
            weights[place] += weight * centre.steps
    # A few steps of a kind are not believed whole.
    known = [(place, sums[place] / (weights[place] + 2.0)) for place in range(_CLASSES + 1) if weights[place] > 0.0]
    bends: list[float] = []
    for place in range(_CLASSES + 1):
        below = max((each for each in known if each[0] <= place), default=known[0])
        above = min((each for each in known if each[0] >= place), default=known[-1])
        share = (place - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        bends.append(below[1] + share * (above[1] - below[1]))
    return bends


def pairs_of(context: int, rows: int) -> int:
    """KV tokens that `rows` new tokens after `context` read, each all before it and itself."""
    return rows * context + rows * (rows + 1) // 2


def _place(rows: int) -> tuple[int, float]:
    """The power of two below, and how far towards the next, from 0 to 1."""
    low = rows.bit_length() - 1
    if low >= _CLASSES:
        return _CLASSES - 1, 1.0
    return low, rows / (1 << low) - 1.0


def _solve(
    points: list[tuple[float, float, float, float, float]], free: tuple[int, ...], before: StepTimeLine
) -> StepTimeLine:
    """Weighted least squares in the free coefficients, the others nought.

    Held a little to the line before: what no point tells apart (rows and pairs that always grow together) stays as it
    was.
    """
    size = len(free)
    matrix = [[0.0] * (size + 1) for _ in free]
    for point in points:
        weight, seconds = point[4], point[3]
        for row, place in enumerate(free):
            factor = weight * point[place]
            for column, other in enumerate(free):
                matrix[row][column] += factor * point[other]
            matrix[row][size] += factor * seconds
    for row, place in enumerate(free):
        hold = 1e-3 * matrix[row][row] + 1e-30
        matrix[row][row] += hold
        matrix[row][size] += hold * before[place]
    for row in range(size):
        pivot = matrix[row][row]
        for below in range(row + 1, size):
            factor = matrix[below][row] / pivot
            for column in range(row, size + 1):
                matrix[below][column] -= factor * matrix[row][column]
    found = [0.0, 0.0, 0.0]
    for row in reversed(range(size)):
        rest = sum(matrix[row][column] * found[free[column]] for column in range(row + 1, size))
        found[free[row]] = (matrix[row][size] - rest) / matrix[row][row]
    return found[0], found[1], found[2]
