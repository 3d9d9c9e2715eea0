"""grpc.health.v1.Health: whether the server takes requests, as /health/ready tells it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

from headrace.server.grpc.messages import SERVICE

_LOOK_S: Final = 0.5  # seconds between looks of a watch
_SERVICES: Final = ("", SERVICE)

_grpc: Any = importlib.import_module("grpc")
_health_pb2: Any = importlib.import_module("grpc_health.v1.health_pb2")
_health_pb2_grpc: Any = importlib.import_module("grpc_health.v1.health_pb2_grpc")
HEALTH_SERVICE: Final = "grpc.health.v1.Health"


class HealthService(_health_pb2_grpc.HealthServicer):
    def __init__(self, is_ready: Callable[[], bool], ending: asyncio.Event) -> None:
        self._is_ready = is_ready
        self._ending = ending

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC's names)
        if request.service not in _SERVICES:
            await context.abort(_grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service[:100]}'")
        return self._response(request.service)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _health_pb2.HealthListResponse(statuses={name: self._response(name) for name in _SERVICES})

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        last: Any = None
        while not self._ending.is_set():
            response = self._response(request.service)
            if response != last:
                await context.write(response)
                last = response
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_S)

    def _response(self, service: str) -> Any:
        status = "SERVICE_UNKNOWN"
        if service in _SERVICES:
            status = "SERVING" if self._is_ready() else "NOT_SERVING"
        return _health_pb2.HealthCheckResponse(status=status)


def add_health(server: Any, is_ready: Callable[[], bool], ending: asyncio.Event) -> None:
    """`ending`: set when watches end."""
    _health_pb2_grpc.add_HealthServicer_to_server(HealthService(is_ready, ending), server)
