"""Predicts how long a step takes, from a model that is fitted while the engine runs.

    seconds = speed * bend(rows) * (fixed + per_row * rows + per_pair * pairs)

`rows` are the step's new tokens and `pairs` the KV tokens that all rows together read. The line is fitted to one
centroid per kind of step (powers of two of rows and of pairs), so hours of decoding do not make it forget what a
prefill costs. `bend` is how far the centroids deviate from the line, for example because the first rows are free while
a step waits for memory. `speed` follows a machine that becomes slower or faster within a dozen steps. A step that a
busy machine delayed moves them only a little. Memory is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

_FAST: Final = 0.08  # share of an error that the speed absorbs at once
_MOST_ERROR: Final = 0.7  # logarithm: an error beyond a factor of two counts as that
_BEND_BOUND: Final = math.log(3.0)
_REMEMBERED: Final = 40  # steps that a centroid averages
_REFIT: Final = 32  # steps between fits of the line
_CLASSES: Final = 24  # powers of two of rows, and of pairs
_LEAST: Final = 1e-9  # seconds; nothing is faster

StepTimeLine = tuple[float, float, float]  # fixed, per row, per pair, in seconds


class _Centre(msgspec.Struct):
    """The mean of the steps of one kind, at the line's speed."""

    rows: float
    pairs: float
    seconds: float
    steps: int


class StepTimeModel:
    """Starts from initial coefficients, which only need the right order of magnitude."""

    def __init__(self, fixed: float = 10e-3, per_row: float = 1e-3, per_pair: float = 20e-9) -> None:
        self._line: StepTimeLine = (fixed, per_row, per_pair)
        self._speed = 0.0  # logarithm
        self._bend = [0.0] * (_CLASSES + 1)  # logarithms, at powers of two of rows
        self._centres: dict[tuple[int, int], _Centre] = {}
        self.steps = 0
        self.error = 0.0  # recent mean of |log(measured / predicted)|

    def predict(self, rows: int, pairs: int) -> float:
        """Return the seconds of a step."""
        if rows <= 0:
            return 0.0
        fixed, per_row, per_pair = self._line
        return math.exp(self._speed + self._bent(rows)) * (fixed + per_row * rows + per_pair * pairs)

    def rows_within(self, seconds: float, *, most: int, rows: int = 0, pairs: int = 0, context: int = 0) -> int:
        """Return by how many rows, at most `most`, a step of `rows` and `pairs` can grow and still end within
        `seconds`.

        The new rows follow `context` tokens of their own sequence.
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
        """Learn from a step that took `seconds`."""
        if rows <= 0 or not 0.0 < seconds < math.inf:
            return
        fixed, per_row, per_pair = self._line
        line = max(fixed + per_row * rows + per_pair * pairs, _LEAST)
        error = math.log(seconds / line) - self._speed - self._bent(rows)
        self.steps += 1
        self.error += (min(abs(error), _MOST_ERROR) - self.error) / min(self.steps, _REMEMBERED)
        if self.steps <= 3:
            self._speed += error / self.steps  # the initial coefficients say nothing about this machine
        else:
            error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
            self._speed += _FAST * error
        self._gather(rows, pairs, seconds)
        if self.steps % _REFIT == 0 or (self.steps < _REFIT and self.steps % 4 == 0):
            self._fit()

    @property
    def coefficients(self) -> StepTimeLine:
        """Seconds fixed, per row and per pair, at the current speed."""
        speed = math.exp(self._speed)
        fixed, per_row, per_pair = self._line
        return fixed * speed, per_row * speed, per_pair * speed

    def _bent(self, rows: int) -> float:
        low, share = _place(rows)
        bend = self._bend
        return bend[low] + share * (bend[low + 1] - bend[low])

    def _gather(self, rows: int, pairs: int, seconds: float) -> None:
        # At the line's speed, and within the largest error that counts.
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
        # A step delayed by something else says little about its kind: it counts as at most twice the mean.
        if centre.steps > 4:
            seconds = min(seconds, 2.0 * centre.seconds)
        centre.rows += share * (rows - centre.rows)
        centre.pairs += share * (pairs - centre.pairs)
        centre.seconds += share * (seconds - centre.seconds)

    def _fit(self) -> None:
        """Fit the line by least squares of relative errors over the centroids. Negative coefficients become 0."""
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
    """Return, at each power of two of rows, how far the centroids deviate from the line, interpolated between them."""
    fixed, per_row, per_pair = line
    sums = [0.0] * (_CLASSES + 1)
    weights = [0.0] * (_CLASSES + 1)
    for centre in centres:
        off = math.log(centre.seconds / max(fixed + per_row * centre.rows + per_pair * centre.pairs, _LEAST))
        low, share = _place(round(centre.rows))
        for place, weight in ((low, 1.0 - share), (low + 1, share)):
            sums[place] += weight * centre.steps * max(-_BEND_BOUND, min(_BEND_BOUND, off))
            weights[place] += weight * centre.steps
    # Trust a kind of step only after a few samples.
    known = [(place, sums[place] / (weights[place] + 2.0)) for place in range(_CLASSES + 1) if weights[place] > 0.0]
    bends: list[float] = []
    for place in range(_CLASSES + 1):
        below = max((each for each in known if each[0] <= place), default=known[0])
        above = min((each for each in known if each[0] >= place), default=known[-1])
        share = (place - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        bends.append(below[1] + share * (above[1] - below[1]))
    return bends


def pairs_of(context: int, rows: int) -> int:
    """Return the KV tokens that `rows` new tokens after `context` read: each reads all before it and itself."""
    return rows * context + rows * (rows + 1) // 2


def _place(rows: int) -> tuple[int, float]:
    """Return the power of two below, and the position towards the next one, from 0 to 1."""
    low = rows.bit_length() - 1
    if low >= _CLASSES:
        return _CLASSES - 1, 1.0
    return low, rows / (1 << low) - 1.0


def _solve(
    points: list[tuple[float, float, float, float, float]], free: tuple[int, ...], before: StepTimeLine
) -> StepTimeLine:
    """Solve weighted least squares in the free coefficients; the others are 0.

    Regularised towards the previous line: what no point can distinguish (rows and pairs that always grow together)
    stays as it was.
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
