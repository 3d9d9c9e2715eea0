"""Translates canary records, which all gateways share, into routes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from headrace.gateway.accounts.account_records import CanaryRecord
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.routing.canary_routes import CanaryRoute, CanaryRoutes


def canary_updater(
    routes: CanaryRoutes, served: Collection[str], *, measured: bool = True
) -> Callable[[AccountChanges], None]:
    """Return a listener that follows changes of the records. Variants that are not served any more get no requests.

    `measured`: False if nothing compares the arms here; then only promoted candidates get requests."""

    def take(changes: AccountChanges) -> None:
        found = {} if changes.whole else dict(routes.by_control)
        for record in changes.records:
            if record.kind != "canary":
                continue
            value = record.value
            if (
                isinstance(value, CanaryRecord)
                and (measured or value.phase == "promoted")
                and value.percent
                and {record.id, value.candidate} <= set(served)
            ):
                found[record.id] = CanaryRoute(value.run, value.candidate, value.percent, value.unit)
            else:
                found.pop(record.id, None)
        routes.by_control = found

    return take
