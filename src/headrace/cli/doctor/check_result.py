"""The result of one check of `headrace doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "warn", "fail"]


class CheckResult(msgspec.Struct, frozen=True):
    """What a check found. `advice` says what to do, and is empty if nothing is wrong."""

    check: str
    state: State
    found: str
    advice: str = ""


def ok(check: str, found: str) -> CheckResult:
    return CheckResult(check, "ok", found)


def warn(check: str, found: str, advice: str) -> CheckResult:
    return CheckResult(check, "warn", found, advice)


def fail(check: str, found: str, advice: str) -> CheckResult:
    return CheckResult(check, "fail", found, advice)
