"""Compares the tool calls of two answers: the names in order, and the arguments as JSON values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.lab.comparison.answer import AnsweredCall
from headrace.lab.comparison.json_diff import FieldChange, diff_values, parse_json


class ToolDiff(msgspec.Struct, frozen=True, kw_only=True):
    same_names: bool
    same_arguments: bool  # of every call; False if the names differ
    valid_arguments: bool  # the candidate's are JSON objects
    changes: tuple[FieldChange, ...] = ()  # of arguments; paths begin with the call, such as get_weather$.city

    @property
    def same(self) -> bool:
        return self.same_names and self.same_arguments


def diff_calls(baseline: Sequence[AnsweredCall], candidate: Sequence[AnsweredCall]) -> ToolDiff | None:
    """Return None if neither answer calls a tool."""
    if not baseline and not candidate:
        return None
    same_names = [call.name for call in baseline] == [call.name for call in candidate]
    valid = all(_is_object(call.arguments) for call in candidate)
    changes: list[FieldChange] = []
    same_arguments = same_names
    if same_names:
        for one, other in zip(baseline, candidate, strict=True):
            found = _diff_arguments(one, other)
            same_arguments = same_arguments and not found
            changes += found
    return ToolDiff(
        same_names=same_names, same_arguments=same_arguments, valid_arguments=valid, changes=tuple(changes[:100])
    )


def _diff_arguments(one: AnsweredCall, other: AnsweredCall) -> list[FieldChange]:
    (left_valid, left), (right_valid, right) = parse_json(one.arguments), parse_json(other.arguments)
    if not (left_valid and right_valid):
        if one.arguments == other.arguments:
            return []
        return [FieldChange(one.name, "value", one.arguments[:80], other.arguments[:80])]
    _, _, changes = diff_values(left, right)
    return [msgspec.structs.replace(change, path=f"{one.name}{change.path}") for change in changes]


def _is_object(arguments: str) -> bool:
    valid, value = parse_json(arguments)
    return valid and isinstance(value, dict)
