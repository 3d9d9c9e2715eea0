"""Changes of canaries: start, advance, promote, roll back. Each is one transaction with its entry in the audit log.

The record is the only truth: the routes of every gateway follow it, after a crash, too. So a change either happened,
for all of them, or did not.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.gateway.accounts.account_records import AccountRecord, CanaryRecord
from headrace.gateway.accounts.account_store import AccountChange, RecordWrite
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.accounts.audit_log import AuditEntry
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.routing.canary_routes import CanaryUnit

MOST: Final = 64  # canaries that are remembered


class NewCanary(msgspec.Struct, frozen=True, kw_only=True):
    control: str
    candidate: str
    stages: tuple[float, ...]
    unit: CanaryUnit = "conversation"
    auto: bool = False
    reason: str = ""


class CanaryOperations:
    def __init__(self, shared: AccountSync, served: Collection[str], *, forbidden: str = "") -> None:
        """`served`: full names of all variants that generate text. `forbidden`: why no canary may start or advance."""
        self._shared = shared
        self._forbidden = forbidden
        self._served = served

    @property
    def variants(self) -> list[str]:
        """Return the names that a canary can be of."""
        return sorted(self._served)

    def records(self) -> dict[str, CanaryRecord]:
        """Return all canaries by their control."""
        held = self._shared.held("canary").items()
        return {id: record.value for id, record in sorted(held) if isinstance(record.value, CanaryRecord)}

    def get(self, control: str) -> CanaryRecord | None:
        value = self._shared.get("canary", control).value
        return value if isinstance(value, CanaryRecord) else None

    def only(self, control: str | None) -> str:
        """Return the control of the canary that is meant; it may be left out if there is just one."""
        records = self.records()
        if control is None and len(records) == 1:
            return next(iter(records))
        if control is None and records:
            running = [name for name, each in records.items() if each.phase == "running"]
            if len(running) == 1:
                return running[0]
            raise invalid_request(f"Missing 'control'. There are canaries of {', '.join(records)}.", "control")
        if control is None:
            raise _no_canary("There is no canary.")
        if control not in records:
            raise _no_canary(f"There is no canary of '{control[:64]}'.")
        return control

    async def start(self, who: Actor, new: NewCanary) -> CanaryRecord:
        self._check_allowed()
        for name, variant in (("control", new.control), ("candidate", new.candidate)):
            if variant not in self._served:
                raise invalid_request(
                    f"Unknown variant '{variant[:64]}'. Served variants: {', '.join(sorted(self._served))}.", name
                )
        if new.control == new.candidate:
            raise invalid_request("The candidate is the control. Name another variant.", "candidate")
        if not new.stages or not ascending(new.stages):
            raise invalid_request("Invalid 'stages'. Expected ascending percentages such as [5, 25, 50].", "stages")

        def plan() -> tuple[AccountChange, CanaryRecord]:
            before = self._shared.get("canary", new.control)
            if isinstance(before.value, CanaryRecord) and before.value.phase == "running":
                raise ApiError(
                    f"A canary of '{new.control}' is running. Promote it or roll it back first.",
                    parameter="control",
                    code="canary_running",
                    status=409,
                )
            if before.value is None and len(self.records()) >= MOST:
                raise ApiError(f"The limit of {MOST} canaries is reached.", code="too_many_canaries", status=409)
            now = int(self._shared.now())
            record = CanaryRecord(
                run=f"canary_{secrets.token_hex(8)}",
                candidate=new.candidate,
                stages=new.stages,
                unit=new.unit,
                auto=new.auto,
                since=now,
                changed=now,
                by=who.key,
                reason=new.reason,
            )
            return self._change(who, "canary.start", before, record)

        return await self._commit(plan)

    def _check_allowed(self) -> None:
        if self._forbidden:
            raise ApiError(self._forbidden, code="canary_not_allowed", status=409)

    async def advance(self, who: Actor, control: str, run: str, reason: str) -> CanaryRecord:
        """Go to the next stage, or to all requests after the last one."""
        self._check_allowed()

        def to_next(record: CanaryRecord) -> CanaryRecord:
            if record.stage + 1 < len(record.stages):
                return replace(record, stage=record.stage + 1)
            return replace(record, phase="promoted")

        return await self._step(who, "canary.advance", control, to_next, reason, run=run)

    async def promote(self, who: Actor, control: str, reason: str) -> CanaryRecord:
        """Send all of the control's requests to the candidate."""
        self._check_allowed()
        return await self._step(who, "canary.promote", control, lambda each: replace(each, phase="promoted"), reason)

    async def roll_back(self, who: Actor, control: str, reason: str, *, run: str | None = None) -> CanaryRecord:
        """Send all requests to the control, also after a promotion."""
        return await self._step(
            who, "canary.roll_back", control, lambda each: replace(each, phase="rolled_back"), reason, run=run
        )

    async def _step(
        self,
        who: Actor,
        what: str,
        control: str,
        change: Callable[[CanaryRecord], CanaryRecord],
        reason: str,
        *,
        run: str | None = None,
    ) -> CanaryRecord:
        """`run`: the canary that was looked at; if another one has begun or it has ended since, nothing changes."""

        def plan() -> tuple[AccountChange, CanaryRecord]:
            before = self._shared.get("canary", control)
            record = before.value
            if not isinstance(record, CanaryRecord):
                raise _no_canary("There is no canary.")
            if run is not None and (record.run != run or record.phase != "running"):
                raise ApiError("The canary has ended.", code="canary_ended", status=409)
            after = replace(change(record), changed=int(self._shared.now()), by=who.key, reason=reason)
            if after.phase == record.phase and after.stage == record.stage:
                raise ApiError(f"The canary is {record.phase} already.", code="canary_ended", status=409)
            return self._change(who, what, before, after)

        return await self._commit(plan)

    def _change(
        self, who: Actor, what: str, before: AccountRecord, after: CanaryRecord
    ) -> tuple[AccountChange, CanaryRecord]:
        entry = AuditEntry(
            at=int(self._shared.now()),
            who=who.key,
            what=what,
            target=f"canary:{before.id}",
            request=who.request,
            reason=after.reason,
            before=None if before.value is None else msgspec.to_builtins(before.value),
            after=msgspec.to_builtins(after),
        )
        return AccountChange(entry=entry, writes=(RecordWrite("canary", before.id, after, before.version),)), after

    async def _commit(self, plan: Callable[[], tuple[AccountChange, CanaryRecord]]) -> CanaryRecord:
        made: list[CanaryRecord] = []

        def planned() -> AccountChange:
            change, record = plan()
            made[:] = [record]
            return change

        await self._shared.commit(planned)
        return made[0]


def _no_canary(message: str) -> ApiError:
    return ApiError(message, kind="not_found_error", parameter="control", code="no_canary")


def canary_json(control: str, record: CanaryRecord, evidence: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "object": "canary",
        "control": control,
        "candidate": record.candidate,
        "phase": record.phase,
        "percent": record.percent,
        "stage": record.stage + 1,
        "stages": list(record.stages),
        "unit": record.unit,
        "promote": "auto" if record.auto else "manual",
        "started_at": record.since,
        "changed_at": record.changed,
        "by": record.by,
        "reason": record.reason,
        "evidence": evidence,
    }


def ascending(stages: Sequence[float]) -> bool:
    return list(stages) == sorted(set(stages))
