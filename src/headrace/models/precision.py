"""How precisely each tensor of a model is kept.

Owns Precision (a format and its group size), its spelling, and WeightPlan, which gives every canonical tensor a
precision. Knows nothing of how weights are quantised.

Spellings: `f32`, `bf16`, `int8`, `int4`, and for the integer formats a group: `int4-g32`, `int8-g128`, `int4-channel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, cast, get_args

import msgspec

from headrace.errors import RequestError

WeightFormat = Literal["f32", "bf16", "int8", "int4"]
KvType = Literal["f32", "bf16", "int8"]

GROUPS: Final = (32, 64, 128)  # inputs that share a scale; 0 stands for per channel
# Groups by default: 32 for int4, whose coarse codes gain most from near scales; 128 for int8, which hardly gains, and
# whose products are bound by what is done at the end of each group.
_DEFAULT_GROUP: Final[dict[str, int]] = {"int4": 32, "int8": 128}


class Precision(msgspec.Struct, frozen=True):
    format: WeightFormat
    group: int = 0  # inputs that share a scale; 0 is per channel, and what the float formats have

    @property
    def name(self) -> str:
        if self.format not in _DEFAULT_GROUP:
            return self.format
        return f"{self.format}-{f'g{self.group}' if self.group else 'channel'}"

    @property
    def bits(self) -> float:
        """Bits per weight with its share of what it is scaled by, for long rows."""
        plain = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}[self.format]
        if self.multiples:
            return plain + 8 / self.group + 16 / (4 * self.group)
        return plain + (16 / self.group if self.group else 0)

    @property
    def multiples(self) -> bool:
        """Whether groups have whole multiples of a scale that four of them share, in place of scales of their own: they
        end quicker, take less memory, and hardly lose."""
        return self.format == "int4" and self.group == 32


def parse_precision(text: str, *, parameter: str = "weights", group: str | int | None = None) -> Precision:
    """`group` overrides the default group, but not one that the text itself spells."""
    format_name, dash, suffix = text.partition("-")
    if format_name not in get_args(WeightFormat):
        raise RequestError(
            f"unknown precision '{text}': expected f32, bf16, int8 or int4, the last two with -g32, -g64, -g128 or "
            "-channel where the group is to be another",
            parameter=parameter,
        )
    chosen = cast(WeightFormat, format_name)
    if chosen not in _DEFAULT_GROUP:
        if dash:
            raise RequestError(f"'{text}': {chosen} has no groups", parameter=parameter)
        if group is not None:
            raise RequestError(f"a group of {group} was asked for, but {chosen} has no groups", parameter="group")
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
    raise RequestError(f"unknown group '{group}': expected 32, 64, 128 or channel", parameter="group")


def parse_kv_type(text: str) -> KvType:
    if text not in get_args(KvType):
        raise RequestError(f"unknown KV type '{text}': expected f32, bf16 or int8", parameter="kv")
    return cast(KvType, text)


class WeightPlan(msgspec.Struct, frozen=True):
    """A precision for every product, the embedding and the head; the last pattern that matches a name wins."""

    default: Precision
    keep: tuple[tuple[str, Precision], ...] = ()  # (pattern of canonical names, precision)

    def precision(self, name: str, *, tied: bool = False) -> Precision:
        """The precision of a canonical tensor. A tied embedding is the head too, and patterns for either name it."""
        names = ("embed", "head") if tied and name in {"embed", "head"} else (name,)
        for pattern, precision in reversed(self.keep):
            if any(fnmatchcase(candidate, pattern) for candidate in names):
                return precision
        if name in {"embed", "head"} and self.default.format == "int4":
            # Every token passes through these two and quality falls off first here: they stay at 8 bit unless asked.
            return Precision("int8", _DEFAULT_GROUP["int8"])
        return self.default

    def check_patterns(self, names: Iterable[str]) -> None:
        """Refuses a pattern that names nothing: it is a typing error that would go unnoticed."""
        known = list(names)
        for pattern, _ in self.keep:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise RequestError(
                    f"--keep pattern '{pattern}' matches no tensor; names look like {', '.join(known[:4])}",
                    parameter="keep",
                )


def parse_plan(
    weights: str, *, group: str | int | None = None, keep: Sequence[str] | Mapping[str, str] = ()
) -> WeightPlan:
    """`keep` holds `pattern=precision` entries, such as `layers.*.attn.o=bf16`."""
    entries = [f"{pattern}={name}" for pattern, name in keep.items()] if isinstance(keep, Mapping) else keep
    overrides: list[tuple[str, Precision]] = []
    for entry in entries:
        pattern, equals, name = entry.rpartition("=")
        if not equals or not pattern:
            raise RequestError(f"'{entry}' is not PATTERN=PRECISION", parameter="keep")
        overrides.append((pattern, parse_precision(name, parameter="keep")))
    return WeightPlan(parse_precision(weights, group=group), tuple(overrides))
