"""The admin API as the server offers it: its routes, and a Unix socket for local administrators where configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.admin_operations import Actor
from headrace.server.admin.admin_routes import AdminRoutes, Work
from headrace.server.admin.admin_socket import AdminSocket
from headrace.server.admin.admin_usage import UsageExport
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import ParameterTable
from headrace.server.http.connection import Application, ConnectionBounds
from headrace.server.http.route_table import Route


class Administration:
    def __init__(self, config: Config, accounts: AccountServices, usage: UsageExport | None) -> None:
        self._config = config
        self.usage = usage
        listed = accounts.directory.administered or bool(config.admin.socket)
        self._routes = AdminRoutes(accounts.operations, config.admin, usage=usage, listed=listed)
        self._socket: AdminSocket | None = None

    def routes(self) -> tuple[Route, ...]:
        return self._routes.routes()

    def route(
        self,
        method: str,
        path: str,
        work: Work,
        about: str,
        table: ParameterTable | None = None,
        *,
        open_here: bool = False,
    ) -> Route:
        """Return a route of the admin API that is defined elsewhere."""
        return self._routes.route(method, path, work, about, table, open_here=open_here)

    async def given(self, call: ApiCall, table: ParameterTable, *, empty: bool = False) -> dict[str, Any]:
        """Return the parameters of a call's body. `empty`: the body may be missing."""
        return await self._routes.given(call, table, empty=empty)

    def who(self, call: ApiCall) -> Actor:
        """Return who makes the call, for the audit log."""
        return self._routes.who(call)

    async def start(self, application: Application) -> None:
        """SocketError where the socket cannot be created."""
        config = self._config
        if config.admin.socket:
            bounds = ConnectionBounds.of(config.server)
            self._socket = AdminSocket(Path(config.admin.socket), application, bounds)
            await self._socket.start()

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
