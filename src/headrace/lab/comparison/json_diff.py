"""A strict diff of two JSON answers, field by field, and whether each satisfies its schema.

A text counts as JSON only as a whole: prose or a code fence around an object makes it invalid, because a client that
parses the answer would fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, cast

import msgspec

from headrace.lab.comparison.json_schema import equal, problems, type_name

MOST_CHANGES: Final = 100
_DEEPEST: Final = 64
_MISSING: Final = object()

ChangeKind = Literal["missing", "added", "type", "value"]


class FieldChange(msgspec.Struct, frozen=True):
    path: str  # such as $.items[2].price
    kind: ChangeKind
    baseline: str = ""  # values as JSON, cut
    candidate: str = ""


class JsonDiff(msgspec.Struct, frozen=True, kw_only=True):
    baseline_valid: bool  # it is JSON
    candidate_valid: bool
    fields: int = 0  # leaves of both together
    same: int = 0  # leaves with equal values on both sides
    changes: tuple[FieldChange, ...] = ()
    baseline_problems: tuple[str, ...] = ()  # against the schema
    candidate_problems: tuple[str, ...] = ()

    @property
    def fidelity(self) -> float:
        """The share of fields that the candidate reproduced; 0 where only the baseline is JSON."""
        if self.baseline_valid and not self.candidate_valid:
            return 0.0
        return self.same / self.fields if self.fields else 1.0

    @property
    def keeps_schema(self) -> bool:
        return self.candidate_valid and not self.candidate_problems

    @property
    def baseline_keeps_schema(self) -> bool:
        return self.baseline_valid and not self.baseline_problems


def parse_json(text: str) -> tuple[bool, Any]:
    """Return whether the whole text is one JSON value, and the value."""
    try:
        return True, json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False, None


def _reject(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def diff_json(baseline: str, candidate: str, schema: Any = None) -> JsonDiff:
    baseline_valid, before = parse_json(baseline)
    candidate_valid, after = parse_json(candidate)
    found = JsonDiff(
        baseline_valid=baseline_valid,
        candidate_valid=candidate_valid,
        baseline_problems=tuple(problems(before, schema)) if baseline_valid and schema is not None else (),
        candidate_problems=tuple(problems(after, schema)) if candidate_valid and schema is not None else (),
    )
    if not (baseline_valid and candidate_valid):
        return found
    fields, same, changes = diff_values(before, after)
    return msgspec.structs.replace(found, fields=fields, same=same, changes=tuple(changes[:MOST_CHANGES]))


def diff_values(before: Any, after: Any) -> tuple[int, int, list[FieldChange]]:
    """Return the number of leaves, the number of equal ones, and what changed."""
    one, other = dict(_leaves(before, "$", 0)), dict(_leaves(after, "$", 0))
    changes: list[FieldChange] = []
    same = 0
    for path in dict.fromkeys((*one, *other)):
        left, right = one.get(path, _MISSING), other.get(path, _MISSING)
        if left is _MISSING:
            changes.append(FieldChange(path, "added", "", _short(right)))
        elif right is _MISSING:
            changes.append(FieldChange(path, "missing", _short(left)))
        elif equal(left, right):
            same += 1
        else:
            kind = "value" if type_name(left) == type_name(right) else "type"
            changes.append(FieldChange(path, kind, _short(left), _short(right)))
    return same + len(changes), same, changes


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path. An empty object or array is a leaf."""
    if isinstance(value, Mapping) and value and depth < _DEEPEST:
        for key, each in cast(Mapping[str, Any], value).items():
            yield from _leaves(each, f"{path}.{key}", depth + 1)
    elif isinstance(value, list) and value and depth < _DEEPEST:
        for place, each in enumerate(cast(list[Any], value)):
            yield from _leaves(each, f"{path}[{place}]", depth + 1)
    else:
        yield path, value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
