"""Fast mode: one switch, for one tenant or for all, that makes requests cheap until it expires.

Owns which switches are on in this gateway, and what fast mode asks of a request, as the section [fast] declares. A
tenant's own switch, on or off, goes before the one of all. The flow asks for every request, so the answer is a look
into a dict and at the clock.

How long a switch still lasts is worked out once, when it arrives, by the storage's clock alone; from then on the
monotonic clock counts. So a wall clock that jumps neither ends it early nor keeps it, and after a restart it lasts its
time to live at most, whatever the clock says meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from headrace.config.tenant_section import FastConfig
from headrace.gateway.accounts.account_records import ALL_TENANTS, AccountRecord, FastRecord
from headrace.gateway.accounts.account_store import AccountChanges


class FastModeState(msgspec.Struct, frozen=True):
    """What fast mode asks of a request. None and empty ask for nothing."""

    variant: str | None  # that answers instead
    prompt_tokens: int | None  # that the prompt is trimmed to
    max_tokens: int | None  # of the answer
    slow_tools: frozenset[str]  # that the model is not offered
    tenant: str  # whose switch it is; ALL for the one of all
    reason: str


class _Held(msgspec.Struct, frozen=True):
    record: AccountRecord
    value: FastRecord
    end: float  # on the monotonic clock


class FastModeSwitches:
    def __init__(
        self,
        config: FastConfig,
        *,
        served: Collection[str] = (),  # variants by their full names
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._served = served
        self._tools = frozenset(config.slow_tools)
        self._monotonic = monotonic
        self._held: dict[str, _Held] = {}

    @property
    def declared(self) -> bool:
        """Whether fast mode asks for anything."""
        config = self._config
        sizes = (config.prompt_tokens, config.max_tokens)
        return bool(config.variant or config.variants or self._tools) or sizes != (None, None)

    def take(self, changes: AccountChanges) -> None:
        """What has changed in the shared state."""
        held = {} if changes.whole else self._held
        for record in changes.records:
            if record.kind != "fast":
                continue
            known = self._held.get(record.id)
            if isinstance(record.value, FastRecord):
                # What is only told again keeps the end that it has.
                same = known is not None and known.record.version == record.version
                held[record.id] = (
                    known if known is not None and same else self._begun(record, record.value, changes.now)
                )
            else:
                held.pop(record.id, None)
        self._held = held

    def _begun(self, record: AccountRecord, value: FastRecord, now: float) -> _Held:
        left = min(max(0.0, value.until - now), value.until - value.since)
        return _Held(record, value, self._monotonic() + left)

    def fast(self, tenant: str, model: str) -> FastModeState | None:
        """What is asked of a tenant's request to a model or variant; None where fast mode is off."""
        if not self._held:
            return None
        held = self._live(tenant) or self._live(ALL_TENANTS)
        if held is None or not held.value.on:
            return None
        config = self._config
        return FastModeState(
            self._variant(model),
            config.prompt_tokens,
            config.max_tokens,
            self._tools,
            held.record.id,
            held.value.reason,
        )

    def _variant(self, model: str) -> str | None:
        """That answers in the place of a model; None where that is itself, or is not there."""
        config, base = self._config, model.partition("@")[0]
        wanted = config.variants.get(model) or config.variants.get(base) or config.variant
        variant = base + wanted if wanted.startswith("@") else wanted
        return variant if variant != model and variant in self._served else None

    def _live(self, id: str) -> _Held | None:
        held = self._held.get(id)
        return held if held is not None and self._monotonic() < held.end else None

    def live(self) -> Iterator[tuple[AccountRecord, FastRecord, float]]:
        """Those in force, with the seconds that they still last."""
        for id in sorted(self._held):
            held = self._live(id)
            if held is not None:
                yield held.record, held.value, held.end - self._monotonic()

    def expired(self) -> list[AccountRecord]:
        """Records that say nothing any more."""
        return [held.record for id, held in self._held.items() if self._live(id) is None]
