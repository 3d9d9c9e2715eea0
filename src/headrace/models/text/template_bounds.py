"""Limits of one rendering of a chat template, and the checks that enforce them.

RenderBudget counts steps, wall time, the size of each value and the memory of all values, and checks an operation's
arguments before it runs. Does not know jinja's syntax or chat messages.

Every value that a template makes is weighed: a text by its length, a container by the length of its text. Shared parts
count each time they appear, because printing, comparing and hashing meet them each time: `[a, a]` doubled thirty times
is a small object with a text of gigabytes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import msgspec

ITEM: Final = 8  # weight of an item in a container, besides its text: about what its quotes and comma take
MAX_INT_BITS: Final = 16_384  # past the largest integer that Python turns into text by default
MAX_SCAN: Final = 1 << 30  # character comparisons in one call whose cost is a product of two lengths
MAX_DIGITS: Final = 4_300
MAX_BATCH: Final = 10_000  # items of a row that `batch` fills up
MAX_PRECISION: Final = 100


class BoundsExceededError(Exception):
    """A template went past its bounds; no template and no filter of jinja catches it."""


class TemplateBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one rendering; `value` and `memory` grow with the request, so that a long chat can be rendered."""

    ticks: int = 2_000_000  # loop rounds, calls, filters and macros
    seconds: float = 5.0  # wall time, looked at on every tick
    value: int = 4 * 1024 * 1024  # weight of one value, and characters of the output
    memory: int = 512 * 1024 * 1024  # bytes of all values ever made; 512 MiB
    input: int = 64 * 1024 * 1024  # weight of everything handed to the template


class WeighedList(list[Any]):
    """A list that knows its weight, so that a template which gathers messages one by one stays linear."""

    __slots__ = ("weight",)
    weight: int


def weigh(value: object, limit: int) -> int:
    """The weight of a value; BoundsExceededError as soon as it is known to pass `limit`."""
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
    """What is left for one rendering."""

    def __init__(self, bounds: TemplateBounds, input_weight: int) -> None:
        self.value = max(bounds.value, 4 * input_weight)
        self._memory = max(bounds.memory, 64 * input_weight)
        self._ticks = bounds.ticks
        self._seconds = bounds.seconds
        self._deadline = time.monotonic() + bounds.seconds

    def tick(self) -> bool:
        """One step; True, so that it can stand in a condition."""
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
        self._memory -= size + 64  # the overhead keeps a great many tiny values bounded too
        if self._memory < 0:
            raise BoundsExceededError("too much memory")

    def made(self, value: Any) -> Any:
        """`value` itself, paid for; a lazy iterator is replaced by one that pays as it goes."""
        if isinstance(value, str):
            self.check(len(value))
            self.charge(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            items = cast("Sequence[object]", value)
            self._weigh(items)
            self.charge(sys.getsizeof(items) + 64 * len(items))  # its items may be new too, as those of `split`
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise BoundsExceededError("an integer of too many digits")
        elif isinstance(value, Iterator):
            return self._paced(cast("Iterator[Any]", value))
        return cast(object, value)

    def settled(self, value: Any) -> Any:
        """A value fit for work that looks at all of it: no longer lazy, and weighed."""
        if isinstance(value, Iterator):
            value = list(self._paced(cast("Iterator[Any]", value)))
        self._weigh(value)
        return value

    def text(self, value: object) -> str:
        if not isinstance(value, str):
            self._weigh(value)
        text = str(value)
        self.check(len(text))
        return text

    def join(self, separator: str, items: Sequence[object]) -> str:
        texts: list[str] = []
        total = len(separator) * len(items)
        for item in items:
            texts.append(self.text(item))
            total += len(texts[-1])
            self.check(total)
        return self.made(separator.join(texts))

    def operate(self, operator: str, left: Any, right: Any, carry_out: Callable[[Any, Any], Any]) -> Any:
        """A binary operation, refused before it is carried out where its result would be too large."""
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
        return self.made(carry_out(left, right))

    def check_percent(self, template: str, arguments: object) -> None:
        """Bounds of `template % arguments` and of jinja's format filter."""
        self.check(len(template))
        widths = 0
        count = 0
        for found in _CONVERSION.finditer(template):
            count += 1
            for number in found.group("width", "precision"):
                if number == "*" or len(number or "") > 7:
                    raise BoundsExceededError("a format with too large a width")
                widths += int(number or 0)
            # A parenthesis inside a key would hide from the expression above what Python takes for the width.
            if "(" in (found.group("key") or ""):
                raise BoundsExceededError("a format with a parenthesis in a key")
        # With a mapping every conversion may print the same value; otherwise each argument is printed once.
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
        """Searches from the right, and stripping, take time in proportion to the product of the two lengths."""
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

    def _paced(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            if isinstance(item, list | tuple):
                self.made(cast(object, item))
            yield item


_CONVERSION: Final = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?", re.ASCII
)
_NUMBER: Final = re.compile(r"[0-9]+", re.ASCII)
RENDER_BUDGET: Final[ContextVar[RenderBudget]] = ContextVar(
    "template_budget"
)  # of the rendering under way in this thread or task
