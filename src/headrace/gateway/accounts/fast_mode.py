"""Fast mode: a switch for one tenant or all tenants that makes requests cheaper until it expires.

Tracks the active switches and what [fast] changes in a request. A tenant's own switch, on or off, overrides the one for
all tenants. Every request asks, so a lookup costs one dict access and one clock read.

The remaining time of a switch is computed once on arrival, by the store's clock; after that the monotonic clock counts.
A jump of the wall clock neither ends nor extends a switch, and after a restart it lasts at most its time to live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from headrace.config.tenant_section import FastConfig
from headrace.gateway.accounts.account_records import ALL_TENANTS, AccountRecord, FastRecord
from headrace.gateway.accounts.account_store import AccountChanges


class FastModeState(msgspec.Struct, frozen=True):
    """What fast mode changes in a request. None and empty change nothing."""

    variant: str | None  # variant that answers instead
    prompt_tokens: int | None  # trim the prompt to this
    max_tokens: int | None  # output tokens, at most
    slow_tools: frozenset[str]  # tools to hide from the model
    tenant: str  # tenant of the switch; ALL_TENANTS for the one for all
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
        served: Collection[str] = (),  # full names of variants
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._served = served
        self._tools = frozenset(config.slow_tools)
        self._monotonic = monotonic
        self._held: dict[str, _Held] = {}

    @property
    def declared(self) -> bool:
        """True if [fast] changes anything."""
        config = self._config
        sizes = (config.prompt_tokens, config.max_tokens)
        return bool(config.variant or config.variants or self._tools) or sizes != (None, None)

    def take(self, changes: AccountChanges) -> None:
        """Apply changed account records."""
        held = {} if changes.whole else self._held
        for record in changes.records:
            if record.kind != "fast":
                continue
            known = self._held.get(record.id)
            if isinstance(record.value, FastRecord):
                # A record that is only repeated keeps its end.
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
        """Return what to change in a tenant's request to a model or variant; None if fast mode is off."""
        if not self._held or not self.declared:
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
        """Return the variant that replaces a model; None if it is the same or not served."""
        config, base = self._config, model.partition("@")[0]
        target = config.variants.get(model) or config.variants.get(base) or config.variant
        variant = base + target if target.startswith("@") else target
        return variant if variant != model and variant in self._served else None

    def _live(self, id: str) -> _Held | None:
        held = self._held.get(id)
        return held if held is not None and self._monotonic() < held.end else None

    def live(self) -> Iterator[tuple[AccountRecord, FastRecord, float]]:
        """Yield the active switches with their remaining seconds."""
        for id in sorted(self._held):
            held = self._live(id)
            if held is not None:
                yield held.record, held.value, held.end - self._monotonic()

    def expired(self) -> list[AccountRecord]:
        """Return the expired records."""
        return [held.record for id, held in self._held.items() if self._live(id) is None]
