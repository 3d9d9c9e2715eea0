"""Why no worker took a request, or finished it."""

from __future__ import annotations

from headrace.errors import HeadraceError


class OverloadedError(HeadraceError):
    """No replica admits the request at present."""

    def __init__(self, reason: str, *, retry_after: float | None = None, predicted: float | None = None) -> None:
        self.retry_after = retry_after
        self.predicted = predicted
        super().__init__(reason)


class WorkerLostError(HeadraceError):
    """No worker finished the request within the client's patience."""
