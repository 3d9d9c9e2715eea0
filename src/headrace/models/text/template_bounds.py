"""Limits of one rendering of a chat template, and the checks that enforce them.

RenderBudget counts steps, wall time, the size of each value and the memory of all values, and checks an operation's
arguments before it runs. Does not know jinja's syntax or chat messages.

Every value has a weight: the length of a text, or the printed length of a container. Shared parts count every time,
because printing, comparing and hashing visit them every time: `[a, a]` doubled thirty times is a small object that
prints gigabytes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import msgspec

from headrace.models.text.user_text import inherit, join

ITEM: Final = 8  # weight of an item besides its text: about its quotes and comma
MAX_INT_BITS: Final = 16_384  # above the largest integer that Python prints by default
MAX_SCAN: Final = 1 << 30  # character comparisons in one call whose cost is a product of two lengths
MAX_DIGITS: Final = 4_300
MAX_BATCH: Final = 10_000  # items in a row of `batch`
MAX_PRECISION: Final = 100


class BoundsExceededError(Exception):
    """A template exceeded its limits. Neither templates nor jinja's filters catch this."""


class TemplateBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one rendering. `value` and `memory` grow with the request, so that long chats can be rendered."""

    ticks: int = 2_000_000  # loop iterations, calls, filters and macros
    seconds: float = 5.0  # wall time, checked on every tick
    value: int = 4 * 1024 * 1024  # weight of one value, and characters of output
    memory: int = 512 * 1024 * 1024  # bytes of all values made; 512 MiB
    input: int = 64 * 1024 * 1024  # weight of all inputs


class WeighedList(list[Any]):
    """A list with a cached weight, so that collecting messages one by one takes linear time."""

    __slots__ = ("weight",)
    weight: int


def weigh(value: object, limit: int) -> int:
    """Return the weight of a value; raise BoundsExceededError as soon as it exceeds `limit`."""
    total = 0
    stack: list[object] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, WeighedList):
            total += item.weight
        elif isinstance(item, list | tuple):
            items = cast("Sequence[object]", item)
            total += ITEM * (len(items) + 1)
            if total <= limit:
                stack.extend(items)
        elif isinstance(item, dict):
            pairs = cast("dict[object, object]", item)
            total += ITEM * (len(pairs) + 1)
            if total <= limit:
                stack.extend(pairs.keys())
                stack.extend(pairs.values())
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        else:
            total += 4 * ITEM
        if total > limit:
            raise BoundsExceededError(f"a value larger than {limit} characters")
    return total


class RenderBudget:
    """The remaining budget of one rendering."""

    def __init__(self, bounds: TemplateBounds, input_weight: int, *, tracks: bool = False) -> None:
        """`tracks`: texts of the request are UserText, and what is made of them must be too."""
        self.tracks = tracks
        self.value = max(bounds.value, 4 * input_weight)
        self._memory = max(bounds.memory, 64 * input_weight)
        self._ticks = bounds.ticks
        self._seconds = bounds.seconds
        self._deadline = time.monotonic() + bounds.seconds

    def tick(self) -> bool:
        """Count one step. Returns True so that it can be part of a condition."""
        self._ticks -= 1
        if self._ticks < 0:
            raise BoundsExceededError("too many steps")
        if time.monotonic() > self._deadline:
            raise BoundsExceededError(f"longer than {self._seconds:g} seconds")
        return True

    def check(self, length: int) -> None:
        if length > self.value:
            raise BoundsExceededError(f"a value larger than {self.value} characters")

    def charge(self, size: int) -> None:
        self._memory -= size + 64  # the overhead also bounds many tiny values
        if self._memory < 0:
            raise BoundsExceededError("too much memory")

    def charged(self, value: Any) -> Any:
        """Charge a new value and return it; a lazy iterator is wrapped so that it charges per item."""
        if isinstance(value, str):
            self.check(len(value))
            self.charge(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            items = cast("Sequence[object]", value)
            self._weigh(items)
            self.charge(sys.getsizeof(items) + 64 * len(items))  # items may also be new, as those of `split`
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise BoundsExceededError("an integer of too many digits")
        elif isinstance(value, Iterator):
            return self._charged_items(cast("Iterator[Any]", value))
        return cast(object, value)

    def materialised(self, value: Any) -> Any:
        """Return the value materialised and weighed, for an operation that visits all of it."""
        if isinstance(value, Iterator):
            value = list(self._charged_items(cast("Iterator[Any]", value)))
        self._weigh(value)
        return value

    def text(self, value: object) -> str:
        if not isinstance(value, str):
            self._weigh(value)
        text = str(value)
        self.check(len(text))
        return inherit(text, value) if self.tracks else text

    def join(self, separator: str, items: Sequence[object]) -> str:
        texts: list[str] = []
        total = len(separator) * len(items)
        for item in items:
            texts.append(self.text(item))
            total += len(texts[-1])
            self.check(total)
        return self.charged(join(separator, texts) if self.tracks else separator.join(texts))

    def operate(self, operator: str, left: Any, right: Any, run: Callable[[Any, Any], Any]) -> Any:
        """Run a binary operation; raise before it runs if the result would be too large."""
        if operator == "+":
            if isinstance(left, list) and isinstance(right, list):
                return self._joined_lists(cast("list[Any]", left), cast("list[Any]", right))
            if isinstance(left, str) and isinstance(right, str):
                self.check(len(left) + len(right))
        elif operator == "*":
            self._check_product(cast(object, left), cast(object, right))
            self._check_product(cast(object, right), cast(object, left))
        elif operator == "**":
            self._check_power(cast(object, left), cast(object, right))
        elif operator == "%" and isinstance(left, str):
            self.check_percent(left, cast(object, right))
        for operand in cast("tuple[object, object]", (left, right)):
            if isinstance(operand, int) and operand.bit_length() > MAX_INT_BITS:
                raise BoundsExceededError("an integer of too many digits")
        result = run(left, right)
        return self.charged(inherit(result, cast(object, left), cast(object, right)) if self.tracks else result)

    def check_percent(self, template: str, arguments: object) -> None:
        """Check `template % arguments` and jinja's format filter."""
        self.check(len(template))
        widths = 0
        count = 0
        for match in _CONVERSION.finditer(template):
            count += 1
            for number in match.group("width", "precision"):
                if number == "*" or len(number or "") > 7:
                    raise BoundsExceededError("a format with too large a width")
                widths += int(number or 0)
            # A parenthesis in a key would hide the width from the expression above.
            if "(" in (match.group("key") or ""):
                raise BoundsExceededError("a format with a parenthesis in a key")
        # With a mapping, several conversions may print the same value.
        weight = self._weigh(arguments)
        self.check(len(template) + widths + weight * (count if isinstance(arguments, Mapping) else 1))

    def check_format_spec(self, spec: str) -> None:
        for number in _NUMBER.findall(spec):
            self.check(int(number) if len(number) <= 9 else self.value + 1)

    def check_width(self, width: object) -> None:
        if isinstance(width, int):
            self.check(width)

    def check_replace(self, text: object, old: object, new: object, count: object = None) -> None:
        if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
            return
        self.check(len(text))
        times = text.count(old)
        if isinstance(count, int) and count >= 0:
            times = min(times, count)
        self.check(len(text) + times * max(len(new) - len(old), 0))

    def check_scan(self, text: object, part: object) -> None:
        """Check a search from the right or a strip: its time grows with the product of the two lengths."""
        if isinstance(text, str) and isinstance(part, str) and len(text) * len(part) > MAX_SCAN:
            raise BoundsExceededError("a search that takes too long")

    def _joined_lists(self, left: list[Any], right: list[Any]) -> WeighedList:
        weight = self._weigh(left) + self._weigh(right)
        self.check(weight)
        result = WeighedList(left)
        result.extend(right)
        result.weight = weight
        self.charge(sys.getsizeof(result))
        return result

    def _check_power(self, base: object, exponent: object) -> None:
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_INT_BITS:
            raise BoundsExceededError("an integer of too many digits")

    def _check_product(self, value: object, times: object) -> None:
        if not isinstance(times, int):
            return
        if isinstance(value, int):
            if value.bit_length() + times.bit_length() > MAX_INT_BITS:
                raise BoundsExceededError("an integer of too many digits")
        elif isinstance(value, str | list | tuple):
            self.check(max(self._weigh(cast(object, value)), 1) * times)

    def _weigh(self, value: object) -> int:
        return weigh(value, self.value)

    def _charged_items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            if isinstance(item, list | tuple):
                self.charged(cast(object, item))
            yield item


_CONVERSION: Final = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?", re.ASCII
)
_NUMBER: Final = re.compile(r"[0-9]+", re.ASCII)
RENDER_BUDGET: Final[ContextVar[RenderBudget]] = ContextVar(
    "template_budget"
)  # of the rendering under way in this thread or task
