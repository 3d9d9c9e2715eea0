"""Draws plots as inline SVG: axes, lines, steps, dots, bars and rules.

Colours are classes s0, s1, ... of the page's style sheet. The SVG's data attributes hold what the page's script needs
for tooltips: the axes and the plot's position; it reads the points from the lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.bench.report.markup import Html, join, short, tag
from headrace.bench.results.formatting import milliseconds, number, seconds, share
from headrace.bench.results.result_columns import TAIL

Floats = NDArray[np.float64]
AxisScale = Literal["linear", "log", "tail"]
AxisUnit = Literal["ms", "s", "number", "count", "share", "percentile"]  # counts have ticks at whole numbers only

SERIES: Final = 8  # colours; further series repeat them, dashed
PLAIN: Final = -1  # the series without a colour, such as request counts
MOST_POINTS: Final = 2000  # per line
_DECADES: Final = 1.3  # values more than 20 times apart need a logarithmic axis
_CHARACTER: Final = 6.6  # approximate pixels per character of a label
_LINE: Final = 14.0  # pixels between labels
_COLUMN: Final = 12.0  # pixels: labels closer than this form a column
_TICKS: Final = 5  # maximum on a vertical linear axis
_TAIL: Final = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999)
_ELAPSED: Final = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400)  # seconds


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    kind: AxisScale = "linear"
    low: float = 0.0
    high: float = 1.0
    title: str = ""
    unit: AxisUnit = "number"
    at: tuple[float, ...] = ()  # explicit ticks

    def place(self, values: ArrayLike) -> Floats:
        """Map values to 0 (low end) to 1 (high end), clipped."""
        found = np.asarray(values, dtype=np.float64)
        low, high = self._warp(np.array([self.low, self.high]))
        return np.clip((self._warp(found) - low) / max(high - low, 1e-12), 0.0, 1.0)

    def value(self, place: float) -> float:
        """Invert `place`."""
        low, high = (float(end) for end in self._warp(np.array([self.low, self.high])))
        warped = low + place * (high - low)
        match self.kind:
            case "linear":
                return warped
            case "log":
                return 10.0**warped
            case "tail":
                return 1.0 - 10.0**-warped

    def _warp(self, values: Floats) -> Floats:
        match self.kind:
            case "linear":
                return values
            case "log":
                return np.log10(np.maximum(values, self.low))
            case "tail":
                return -np.log10(np.maximum(1.0 - values, 1e-12))

    def ticks(self, most: int = 6) -> list[float]:
        if self.at:
            return [tick for tick in self.at if self.low <= tick <= self.high]
        match self.kind:
            case "linear":
                return _linear_ticks(self.low, self.high, self.unit, most)
            case "log":
                return _log_ticks(self.low, self.high, most)
            case "tail":
                return [tick for tick in _TAIL if self.low <= tick <= self.high + 1e-9]

    def show(self, value: float) -> str:
        """Format a tick."""
        match self.unit:
            case "ms":
                return _plain(milliseconds(value))
            case "s":
                if self.high - self.low < 60.0:
                    return f"{value:.6g} s"
                return _plain(seconds(value))
            case "share":
                return _plain(share(value))
            case "percentile":
                return "min" if value == 0.0 else f"p{100.0 * value:g}"
            case "number" | "count":
                return _plain(number(value)) if abs(value) < 1e6 else f"{value / 1e6:g} M"


def axis(
    values: Sequence[ArrayLike], *, title: str, unit: AxisUnit, zero: bool = True, log: bool | None = None
) -> Axis:
    """Make an axis for all values: logarithmic if they span more than 20 times, unless `log` is given."""
    arrays = [np.asarray(each, dtype=np.float64).ravel() for each in values]
    pooled = np.concatenate(arrays) if arrays else np.zeros(0)
    pooled = pooled[np.isfinite(pooled)]
    positive = pooled[pooled > 0.0]
    if log is None:
        log = positive.size > 1 and math.log10(positive.max() / positive.min()) > _DECADES
    if log and positive.size:
        low, high = _round_log(float(positive.min()), float(positive.max()))
        return Axis(kind="log", low=low, high=high, title=title, unit=unit)
    high = float(pooled.max()) if pooled.size else 1.0
    low = 0.0 if zero or not pooled.size else float(pooled.min())
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _step(high - low, unit, _TICKS)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low=low, high=high, title=title, unit=unit)


def tail_axis(count: int) -> Axis:
    """Make a percentile axis: each nine has the same width. It ends at the last that `count` values can resolve."""
    most = 1.0 - 1.0 / max(count, 2)
    return Axis(kind="tail", low=0.0, high=min(most, TAIL), title="percentile", unit="percentile")


def thin(count: int, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Return indices of at most `most` of `count` points, evenly spaced, including the first and last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.intp))


class Plot(msgspec.Struct, kw_only=True):
    """A plot; parts are drawn in the order in which they are added, over the axes."""

    x: Axis
    y: Axis
    about: str  # id of the describing element
    width: float = 560.0  # drawing units
    height: float = 268.0
    right: float = 24.0  # more if lines have labels
    _parts: list[Html] = []
    _labels: list[tuple[float, float, str, int]] = []
    _hints: list[tuple[float, float, float, float, str]] = []
    _top: float = 34.0
    _bottom: float = 40.0
    _left: float = 62.0

    def room_for(self, labels: Sequence[str]) -> None:
        """Widen the right margin for labels. Call it before drawing."""
        longest = max((min(len(label), 22) for label in labels), default=0)
        self.right = max(self.right, 14.0 + _CHARACTER * longest)

    def line(
        self,
        xs: ArrayLike,
        ys: ArrayLike,
        *,
        series: int,
        name: str,
        label: str = "",
        area: bool = False,
        look: str = "",
    ) -> None:
        """Draw a line. `name`: tooltip; `label`: text at its end; `look`: additional class."""
        across, down = self._points(xs, ys)
        if not across.size:
            return
        points = _pairs(across, down)
        floor = short(self._top + self._inner_height)
        if area:
            path = f"M{short(float(across[0]))} {floor}L{points}L{short(float(across[-1]))} {floor}Z"
            self._parts.append(tag("path", d=path, class_=f"area {colour(series)}"))
        kind = f"line {colour(series)} {look}".rstrip()
        self._parts.append(tag("polyline", points=points, class_=kind, data_name=name))
        if label:
            self._labels.append((float(across[-1]), float(down[-1]), label, series))

    def dots(self, xs: ArrayLike, ys: ArrayLike, *, series: int, name: str = "", radius: float = 2.0) -> None:
        across, down = self._points(xs, ys)
        marks = "".join(f"M{short(x)} {short(y)}h0" for x, y in zip(across.tolist(), down.tolist(), strict=True))
        if marks:  # zero-length lines with round ends: one element for all dots
            look = f"dots {colour(series)}"
            self._parts.append(tag("path", d=marks, class_=look, stroke_width=2 * radius, data_name=name or None))

    def mark(self, x: float, y: float, text: str, *, series: int) -> None:
        """Draw a point with its value."""
        across, down = (float(each[0]) for each in self._points([x], [y]))
        left = across > self._left + 0.72 * self._inner_width
        side = {"x": across + (-7.0 if left else 7.0), "y": down + (-6.0 if left else 14.0)}
        look = f"mark {colour(series)}"
        self._parts.append(tag("circle", cx=across, cy=down, r=3.5, class_=look))
        self._parts.append(tag("text", text, class_="value", text_anchor="end" if left else "start", **side))

    def bars(self, edges: ArrayLike, heights: ArrayLike, *, series: int, name: str, base: ArrayLike = 0.0) -> None:
        """Draw bars between neighbouring edges, starting at `base`."""
        from_ = np.broadcast_to(np.asarray(base, dtype=np.float64), np.shape(heights))
        across = self._left + self.x.place(edges) * self._inner_width
        tops = self._top + (1.0 - self.y.place(np.asarray(heights) + from_)) * self._inner_height
        feet = self._top + (1.0 - self.y.place(from_)) * self._inner_height
        path = "".join(
            f"M{short(left)} {short(foot)}V{short(top)}H{short(max(left + 0.5, right - 1.0))}V{short(foot)}Z"
            for left, right, top, foot in zip(
                across[:-1].tolist(), across[1:].tolist(), tops.tolist(), feet.tolist(), strict=True
            )
            if foot - top > 0.01
        )
        if path:
            self._parts.append(tag("path", d=path, class_=f"bars {colour(series)}"))
        # An invisible line through the tops, where the script finds the bars' values.
        middles = (across[:-1] + across[1:]) / 2.0
        high = self._top + (1.0 - self.y.place(heights)) * self._inner_height
        self._parts.append(tag("polyline", points=_pairs(middles, high), class_="unseen", data_name=name))

    def spans(self, begins: ArrayLike, ends: ArrayLike, ys: ArrayLike, *, thick: float, look: str) -> None:
        """Draw horizontal strokes as one element."""
        left, down = self._points(begins, ys)
        right, _ = self._points(ends, ys)
        path = "".join(
            f"M{short(x)} {short(y)}H{short(max(z - 0.8, x + 0.6))}"
            for x, z, y in zip(left.tolist(), right.tolist(), down.tolist(), strict=True)
        )
        if path:
            self._parts.append(tag("path", d=path, class_=f"span {look}", stroke_width=thick))

    def hints(self, begins: ArrayLike, ends: ArrayLike, ys: ArrayLike, texts: Sequence[str], *, tall: float) -> None:
        """Add tooltips for rectangles of `tall` pixels."""
        left, down = self._points(begins, ys)
        right, _ = self._points(ends, ys)
        self._hints += [
            (round(x, 1), round(z, 1), round(y - tall / 2.0, 1), round(y + tall / 2.0, 1), text)
            for x, z, y, text in zip(left.tolist(), right.tolist(), down.tolist(), texts, strict=True)
        ]

    def label(self, text: str, x: float, y: float, *, series: int) -> None:
        """Add a label to the right of a point, or where there is room nearby."""
        across, down = self._points([x], [y])
        self._labels.append((float(across[0]), float(down[0]), text, series))

    def rule(
        self, *, x: float | None = None, y: float | None = None, text: str = "", look: str = "", row: int = 0
    ) -> None:
        """Draw a line across the plot at one value, with a text `row` rows down."""
        kind = f"rule {look}".rstrip()
        if x is not None and self.x.low <= x <= self.x.high:
            across = self._left + float(self.x.place(x)) * self._inner_width
            ends = {"x1": across, "x2": across, "y1": self._top, "y2": self._top + self._inner_height}
            self._parts.append(tag("line", class_=kind, **ends))
            near_end = across > self._left + 0.8 * self._inner_width
            place = {"x": across + (-4.0 if near_end else 4.0), "y": self._top - 6.0 + row * _LINE}
            if text:
                self._parts.append(tag("text", text, class_="note", text_anchor="end" if near_end else None, **place))
        if y is not None and self.y.low <= y <= self.y.high:
            down = self._top + (1.0 - float(self.y.place(y))) * self._inner_height
            ends = {"x1": self._left, "x2": self._left + self._inner_width, "y1": down, "y2": down}
            self._parts.append(tag("line", class_=kind, **ends))
            if text:
                place = {"x": self._left + 6.0, "y": down - 4.0}
                self._parts.append(tag("text", text, class_="note", **place))

    def render(self) -> Html:
        data: dict[str, Any] = {
            "box": [self._left, self._top, self._inner_width, self._inner_height],
            "x": {name: getattr(self.x, name) for name in ("kind", "low", "high", "unit")},
            "y": {name: getattr(self.y, name) for name in ("kind", "low", "high", "unit")},
        }
        if self._hints:
            data["hints"] = self._hints
        return tag(
            "svg",
            self._grid(),
            tag("g", *self._parts),
            self._written_labels(),
            viewBox=f"0 0 {short(self.width)} {short(self.height)}",
            role="img",
            aria_labelledby=self.about,
            tabindex="0",
            data_plot=msgspec.json.encode(data).decode(),
        )

    @property
    def _inner_width(self) -> float:
        return self.width - self._left - self.right

    @property
    def _inner_height(self) -> float:
        return self.height - self._top - self._bottom

    def _points(self, xs: ArrayLike, ys: ArrayLike) -> tuple[Floats, Floats]:
        across = np.asarray(xs, dtype=np.float64)
        down = np.asarray(ys, dtype=np.float64)
        known = np.isfinite(across) & np.isfinite(down)
        return (
            self._left + self.x.place(across[known]) * self._inner_width,
            self._top + (1.0 - self.y.place(down[known])) * self._inner_height,
        )

    def _grid(self) -> Html:
        parts: list[Html] = []
        floor = self._top + self._inner_height
        for tick in self.y.ticks(_TICKS if self.y.kind == "linear" else max(3, int(self._inner_height / 34.0))):
            down = self._top + (1.0 - float(self.y.place(tick))) * self._inner_height
            ends = {"x1": self._left, "x2": self._left + self._inner_width, "y1": down, "y2": down}
            parts.append(tag("line", class_="grid", **ends))
            place = {"x": self._left - 8.0, "y": down + 4.0}
            parts.append(tag("text", self.y.show(tick), class_="tick", text_anchor="end", **place))
        taken = -math.inf
        for tick in self.x.ticks(max(3, int(self._inner_width / 80.0))):
            across = self._left + float(self.x.place(tick)) * self._inner_width
            text = self.x.show(tick)
            half = _CHARACTER * len(text) / 2.0
            parts.append(tag("line", class_="stub", x1=across, x2=across, y1=floor, y2=floor + 4.0))
            if across - half > taken:  # labels never lie on each other
                parts.append(tag("text", text, class_="tick", x=across, y=floor + 17.0, text_anchor="middle"))
                taken = across + half + 4.0
        parts.append(tag("line", class_="base", x1=self._left, x2=self._left + self._inner_width, y1=floor, y2=floor))
        if self.y.title:
            parts.append(tag("text", self.y.title, class_="name", x=4.0, y=12.0))
        if self.x.title:
            place = {"x": self._left + self._inner_width, "y": floor + 34.0}
            parts.append(tag("text", self.x.title, class_="name", text_anchor="end", **place))
        return tag("g", *parts, class_="frame")

    def _written_labels(self) -> Html:
        """Labels to the right of their points, where none lies on another."""
        written: list[Html] = []
        taken: list[tuple[float, float, float]] = []  # left, right, down
        for across, down, text, series in self._placed():
            fitted = _fitted(text)
            wide = _CHARACTER * len(fitted)
            left = min(across + 6.0, self.width - wide)
            for shift in (0, -1, 1, -2, 2, -3, 3, -4, 4):
                place = down + shift * _LINE
                free = all(left > z or left + wide < x or abs(place - y) >= _LINE - 0.5 for x, z, y in taken)
                if free and self._top - _LINE <= place <= self._top + self._inner_height + 1.0:
                    down = place
                    break
            taken.append((left, left + wide, down))
            written.append(tag("text", fitted, class_=f"label {colour(series)}", x=left, y=down + 4.0))
        return join(*written)

    def _placed(self) -> list[tuple[float, float, str, int]]:
        """Labels of one column, such as those at the lines' ends, are pushed apart and keep their order."""
        columns: list[list[tuple[float, float, str, int]]] = []
        for each in sorted(self._labels, key=lambda label: -label[0]):
            if columns and columns[-1][0][0] - each[0] < _COLUMN:
                columns[-1].append(each)
            else:
                columns.append([each])
        found: list[tuple[float, float, str, int]] = []
        for column in columns:
            ordered = sorted(column, key=lambda label: label[1])
            places = spread_out([each[1] for each in ordered], _LINE, self._top, self._top + self._inner_height)
            across = max(each[0] for each in column)
            found += [(across, down, *each[2:]) for down, each in zip(places, ordered, strict=True)]
        return found


def colour(series: int) -> str:
    """The classes of a series: its colour, and dashes from the second time that the colours are gone through."""
    if series == PLAIN:
        return "plain"
    return f"s{series % SERIES} r{series}" + (" dashed" if series >= SERIES else "")


def spread_out(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones (in ascending order) that are `apart` from each other, below `high` if they can."""
    found: list[float] = []
    for place in wanted:
        found.append(max(place, found[-1] + apart if found else low))
    limit = high
    for index in range(len(found) - 1, -1, -1):
        found[index] = min(found[index], limit)
        limit = found[index] - apart
    return found


def _plain(text: str) -> str:
    """A number and its unit without the noughts that say how exact it is."""
    value, space, unit = text.partition(" ")
    return (value.rstrip("0").rstrip(".") if "." in value else value) + space + unit


def _fitted(text: str) -> str:
    return text if len(text) <= 22 else text[:21] + "…"


def _pairs(across: Floats, down: Floats) -> str:
    return " ".join(f"{short(x)},{short(y)}" for x, y in zip(across.tolist(), down.tolist(), strict=True))


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-12)))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step * (1.0 - 1e-9))


def _step(span: float, unit: AxisUnit, most: int) -> float:
    """From one tick to the next."""
    rough = span / (most - 1)
    if unit == "s" and span >= 120.0:
        return float(next((each for each in _ELAPSED if each >= rough), 86_400 * math.ceil(rough / 86_400)))
    step = _nice(rough)
    if unit == "count":
        return max(1.0, 2.0 * step if step % 1.0 else step)
    return step


def _linear_ticks(low: float, high: float, unit: AxisUnit, most: int) -> list[float]:
    step = _step(high - low, unit, most)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _round_log(low: float, high: float) -> tuple[float, float]:
    """Ends of a logarithmic axis: the next 1, 2 or 5 outwards."""
    steps = [factor * 10.0**power for power in range(-12, 13) for factor in (1, 2, 5)]
    below = max((step for step in steps if step <= low * (1.0 + 1e-9)), default=low)
    above = min((step for step in steps if step >= high * (1.0 - 1e-9)), default=high)
    return below, above if above > below else 10.0 * below


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5 of each decade where there is room, or 1 alone, or every other decade."""
    powers = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        found = [
            factor * 10.0**power
            for power in powers
            if power % every == 0
            for factor in factors
            if low * (1.0 - 1e-9) <= factor * 10.0**power <= high * (1.0 + 1e-9)
        ]
        if len(found) <= most + 1:
            return found
    return [low, high]
