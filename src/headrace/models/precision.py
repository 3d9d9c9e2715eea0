"""Parses precisions and assigns one to every canonical tensor. Does not quantise.

A precision is written `f32`, `bf16`, `int8` or `int4`; integer formats may add a group: `int4-g32`, `int8-g128`,
`int4-channel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, cast, get_args

import msgspec

from headrace.errors import RequestError

WeightFormat = Literal["f32", "bf16", "int8", "int4"]
KvType = Literal["f32", "bf16", "int8"]

GROUPS: Final = (32, 64, 128)  # inputs that share a scale; 0 is per channel
# int4 takes groups of 32 because its coarse codes gain most from close scales. int8 hardly gains, and its products are
# bound by the work at the end of each group, so it takes 128.
_DEFAULT_GROUP: Final[dict[str, int]] = {"int4": 32, "int8": 128}


class Precision(msgspec.Struct, frozen=True):
    format: WeightFormat
    group: int = 0  # inputs that share a scale; 0 is per channel, and for float formats

    @property
    def name(self) -> str:
        if self.format not in _DEFAULT_GROUP:
            return self.format
        return f"{self.format}-{f'g{self.group}' if self.group else 'channel'}"

    @property
    def bits(self) -> float:
        """Bits per weight, including its share of the scales, for long rows."""
        plain = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}[self.format]
        if self.multiples:
            return plain + 8 / self.group + 16 / (4 * self.group)
        return plain + (16 / self.group if self.group else 0)

    @property
    def multiples(self) -> bool:
        """Whether group scales are integer multiples of one that four groups share: faster, smaller, hardly lossy."""
        return self.format == "int4" and self.group == 32


def parse_precision(text: str, *, parameter: str = "weights", group: str | int | None = None) -> Precision:
    """Parse a precision. `group` replaces the default group, but not one in the text."""
    format_name, dash, suffix = text.partition("-")
    if format_name not in get_args(WeightFormat):
        raise RequestError(
            f"Unknown precision '{text}'. Expected f32, bf16, int8 or int4; integers may end in -g32, -g64, -g128 or "
            "-channel.",
            parameter=parameter,
        )
    chosen = cast(WeightFormat, format_name)
    if chosen not in _DEFAULT_GROUP:
        if dash:
            raise RequestError(
                f"Precision '{text}' is invalid: {chosen} has no groups. Write '{chosen}'.", parameter=parameter
            )
        if group is not None:
            raise RequestError(
                f"Group {group} is invalid: {chosen} has no groups. Remove the group.", parameter="group"
            )
        return Precision(chosen)
    if not dash:
        return Precision(chosen, _DEFAULT_GROUP[chosen] if group is None else parse_group(group))
    return Precision(chosen, parse_group(suffix.removeprefix("g")))


def parse_group(group: str | int) -> int:
    spelled = str(group)
    if spelled == "channel":
        return 0
    if spelled in map(str, GROUPS):
        return int(spelled)
    raise RequestError(f"Unknown group '{group}'. Expected 32, 64, 128 or channel.", parameter="group")


def parse_kv_type(text: str) -> KvType:
    if text not in get_args(KvType):
        raise RequestError(f"Unknown KV type '{text}'. Expected f32, bf16 or int8.", parameter="kv")
    return cast(KvType, text)


class WeightPlan(msgspec.Struct, frozen=True):
    """The precision of every product, the embedding and the head. The last matching pattern wins."""

    default: Precision
    keep: tuple[tuple[str, Precision], ...] = ()  # (pattern of canonical names, precision)

    def precision(self, name: str, *, tied: bool = False) -> Precision:
        """Return the precision of a canonical tensor. Patterns for `head` also match a tied embedding."""
        names = ("embed", "head") if tied and name in {"embed", "head"} else (name,)
        for pattern, precision in reversed(self.keep):
            if any(fnmatchcase(candidate, pattern) for candidate in names):
                return precision
        if name in {"embed", "head"} and self.default.format == "int4":
            # Every token passes through these two, and quality drops here first, so they keep 8 bits.
            return Precision("int8", _DEFAULT_GROUP["int8"])
        return self.default

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise RequestError for a pattern that matches no tensor: a typo would otherwise go unnoticed."""
        known = list(names)
        for pattern, _ in self.keep:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise RequestError(
                    f"--keep pattern '{pattern}' matches no tensor. Names look like {', '.join(known[:4])}.",
                    parameter="keep",
                )


def parse_plan(
    weights: str, *, group: str | int | None = None, keep: Sequence[str] | Mapping[str, str] = ()
) -> WeightPlan:
    """Parse a plan. `keep` holds `pattern=precision` entries, such as `layers.*.attn.o=bf16`."""
    entries = [f"{pattern}={name}" for pattern, name in keep.items()] if isinstance(keep, Mapping) else keep
    overrides: list[tuple[str, Precision]] = []
    for entry in entries:
        pattern, equals, name = entry.rpartition("=")
        if not equals or not pattern:
            raise RequestError(f"Invalid entry '{entry}'. Expected PATTERN=PRECISION.", parameter="keep")
        overrides.append((pattern, parse_precision(name, parameter="keep")))
    return WeightPlan(parse_precision(weights, group=group), tuple(overrides))
