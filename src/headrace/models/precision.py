"""Parses precisions and assigns one to every canonical tensor. Does not quantise.

A precision is written `f32`, `bf16`, `fp8`, `int8`, `int4`, `int3` or `int2`; all but the first two may add a group:
`int4-g32`, `int8-g128`, `int4-channel`. Integers meet activations in int8, unless `-a16` follows: `int8-a16`,
`int4-g32-a16`. They rotate their inputs, unless they end in `-plain`: `int8-plain`, `int4-g32-a16-plain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, cast, get_args

import msgspec

from headrace.errors import RequestError

WeightFormat = Literal["f32", "bf16", "fp8", "fp8e5m2", "int8", "int4", "int3", "int2", "nf4", "fp4", "mxfp4", "iq4"]
KvType = Literal["f32", "bf16", "int8", "fp8", "int4"]

AUTO: Final = "auto"  # bf16, or what keeps a quantised file's weights
AUTO_FLOAT_ROWS: Final = "auto-a16"  # the same, with activations that are not quantised
AUTOS: Final = frozenset({AUTO, AUTO_FLOAT_ROWS})
IMAGE_WEIGHTS: Final = (AUTO, "f32", "bf16", "int8")  # of the image part; "auto": as its files hold it
GROUPS: Final = (32, 64, 128)  # inputs that share a scale; 0 is per channel
_PLAIN: Final = "-plain"
_FLOAT_ROWS: Final = "-a16"
TABLES: Final = frozenset({"nf4", "fp4", "mxfp4", "iq4"})  # codes of files that stand for the 16 values of a table
FP8: Final = frozenset({"fp8", "fp8e5m2"})  # E4M3, and E5M2 as files have it: weights are not rounded to it
_BITS: Final[dict[str, int]] = {"f32": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
SMALL: Final = frozenset({"int4", "int3", "int2"})  # formats whose group scales may be multiples
# Small codes take groups of 32 because they are coarse and gain most from close scales. int8 hardly gains, and its
# products are bound by the work at the end of each group, so it takes 128.
_DEFAULT_GROUP: Final[dict[str, int]] = {"int8": 128, **dict.fromkeys(SMALL, 32)}
# An embedding's errors are not hidden by a choice of one token: int8-g128 keeps a cosine of 0.995 of MiniLM's, int8-g32
# one of 0.999.
_EMBEDDER_GROUP: Final[dict[str, int]] = {"int8": 32, **dict.fromkeys(SMALL, 32)}


class Precision(msgspec.Struct, frozen=True):
    format: WeightFormat
    group: int = 0  # inputs that share a scale; 0 is per channel, and for float formats
    stored: bool = False  # codes and scales are those of a quantised file
    zeros: bool = False  # of stored codes: every group has a zero of its own
    offsets: bool = False  # of stored codes: every group has an offset, which is added to scale * code
    float_rows: bool = False  # integers meet activations in floats, not in int8
    rotated: bool = False  # inputs are rotated before they are rounded, so that outliers spread over the row

    @property
    def name(self) -> str:
        if self.format in FP8:
            return f"{self.format}-g{self.group}" if self.group else self.format
        if not self.is_integer:
            return self.format
        name = f"{self.format}-{f'g{self.group}' if self.group else 'channel'}{_FLOAT_ROWS if self.float_rows else ''}"
        return name if self.rotated or self.stored else f"{name}{_PLAIN}"

    @property
    def is_integer(self) -> bool:
        return self.format in _DEFAULT_GROUP or self.format in TABLES

    @property
    def zero(self) -> int:
        """The code of a weight of 0 where no group has a zero of its own."""
        return 1 << (_BITS[self.format] - 1)

    @property
    def bits(self) -> float:
        """Bits per weight, including its share of the scales, for long rows."""
        plain = 8 if self.format in FP8 else _BITS.get(self.format, 4)
        if self.multiples:
            return plain + 8 / self.group + 16 / (4 * self.group)
        wide = self.zeros or self.offsets or self.format in FP8
        return plain + ((32 if wide else 16) / self.group if self.group else 0)

    @property
    def multiples(self) -> bool:
        """True if group scales are integer multiples of one that four groups share: faster, smaller, hardly lossy."""
        return self.format in SMALL and self.group == 32 and not self.stored


def stored_format(bits: int) -> WeightFormat:
    """Return the narrowest integer format that holds codes of at most 8 bits."""
    formats: tuple[WeightFormat, ...] = ("int2", "int3", "int4", "int8")
    return next(each for each in formats if bits <= _BITS[each])


def parse_precision(
    text: str, *, parameter: str = "weights", group: str | int | None = None, embedder: bool = False
) -> Precision:
    """Parse a precision. `group` replaces the default group, but not one in the text. Embedders have other defaults."""
    weights = text.removesuffix(_PLAIN)
    format_name, dash, suffix = weights.removesuffix(_FLOAT_ROWS).partition("-")
    rotated = not text.endswith(_PLAIN)
    float_rows = weights.endswith(_FLOAT_ROWS)
    if format_name not in _BITS:
        raise RequestError(
            f"Unknown precision '{text}'. Expected f32, bf16, fp8, int8, int4, int3 or int2; fp8 and integers may end "
            "in -g32, -g64, -g128 or -channel, and integers then in -a16, and then in -plain.",
            parameter=parameter,
        )
    chosen = cast(WeightFormat, format_name)
    if chosen == "fp8":
        if float_rows or not rotated:
            raise RequestError(
                f"Precision '{text}' is invalid: fp8 rounds and rotates no activations. Write "
                f"'{weights.removesuffix(_FLOAT_ROWS)}'.",
                parameter=parameter,
            )
        named = suffix.removeprefix("g") if dash else "channel" if group is None else group
        return Precision(chosen, parse_group(named))
    if chosen not in _DEFAULT_GROUP:
        if dash or float_rows or not rotated:
            raise RequestError(
                f"Precision '{text}' is invalid: {chosen} has no groups. Write '{chosen}'.", parameter=parameter
            )
        if group is not None:
            raise RequestError(
                f"Group {group} is invalid: {chosen} has no groups. Remove the group.", parameter="group"
            )
        return Precision(chosen)
    if not dash:
        default = _EMBEDDER_GROUP if embedder else _DEFAULT_GROUP
        size = default[chosen] if group is None else parse_group(group)
    else:
        size = parse_group(suffix.removeprefix("g"))
    return Precision(chosen, size, float_rows=float_rows, rotated=rotated)


def parse_group(group: str | int) -> int:
    spelled = str(group)
    if spelled == "channel":
        return 0
    if spelled in map(str, GROUPS):
        return int(spelled)
    raise RequestError(f"Unknown group '{group}'. Expected 32, 64, 128 or channel.", parameter="group")


def parse_kv_type(text: str) -> KvType:
    if text not in get_args(KvType):
        raise RequestError(f"Unknown KV type '{text}'. Expected f32, bf16, int8, fp8 or int4.", parameter="kv")
    return cast(KvType, text)


def check_image_weights(text: str) -> None:
    if text not in IMAGE_WEIGHTS:
        raise RequestError(
            f"'image_weights' must be one of {', '.join(IMAGE_WEIGHTS)}, not '{text}'.", parameter="image_weights"
        )


class WeightPlan(msgspec.Struct, frozen=True):
    """The precision of every product, the embedding and the head. The last matching pattern wins."""

    default: Precision
    keep: tuple[tuple[str, Precision], ...] = ()  # (pattern of canonical names, precision)
    embedder: bool = False
    stored: dict[str, Precision] = {}  # of tensors that are quantised on disk, if the user named no precision

    @property
    def name(self) -> str:
        """The precision of most weights."""
        return Counter(self.stored.values()).most_common(1)[0][0].name if self.stored else self.default.name

    def precision(self, name: str, *, tied: bool = False) -> Precision:
        """Return the precision of a canonical tensor. Patterns for `head` also match a tied embedding."""
        names = ("embed", "head") if tied and name in {"embed", "head"} else (name,)
        for pattern, precision in reversed(self.keep):
            if any(fnmatchcase(candidate, pattern) for candidate in names):
                return precision
        if name in self.stored:
            return self.stored[name]
        if name in {"embed", "head"} and self.default.format in SMALL:
            # Every token passes through these two, and quality drops here first, so they keep 8 bits.
            group = (_EMBEDDER_GROUP if self.embedder else _DEFAULT_GROUP)["int8"]
            return Precision("int8", group, float_rows=self.default.float_rows, rotated=self.default.rotated)
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
    weights: str,
    *,
    group: str | int | None = None,
    keep: Sequence[str] | Mapping[str, str] = (),
    embedder: bool = False,
) -> WeightPlan:
    """Parse a plan. "auto" and "auto-a16" are bf16 here, as for a model that is not quantised on disk. `keep` holds
    `pattern=precision` entries, such as `layers.*.attn.o=bf16`. `embedder` says that the model makes embeddings."""
    entries = [f"{pattern}={name}" for pattern, name in keep.items()] if isinstance(keep, Mapping) else keep
    overrides: list[tuple[str, Precision]] = []
    for entry in entries:
        pattern, equals, name = entry.rpartition("=")
        if not equals or not pattern:
            raise RequestError(f"Invalid entry '{entry}'. Expected PATTERN=PRECISION.", parameter="keep")
        overrides.append((pattern, parse_precision(name, parameter="keep", embedder=embedder)))
    weights = "bf16" if weights in AUTOS else weights
    return WeightPlan(parse_precision(weights, group=group, embedder=embedder), tuple(overrides), embedder)
