"""The endpoints of `/admin/v1` and who may call them. gateway.accounts.admin_operations does the work.

If no key has access to the admin API and the call does not come by the admin socket, every path answers 404. Keys
without access get 403, and keys with read access may only GET.

Responses must not be cached and are not available to browsers of other origins. A request with a key's secret anywhere
but in its headers is rejected, because the secret would end up in logs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from headrace.config import RequestLimits
from headrace.config.tenant_section import AdminConfig, TenantConfig
from headrace.gateway.accounts.account_records import KeyScope
from headrace.gateway.accounts.admin_operations import Actor, AdminOperations, NewKey, page_of
from headrace.gateway.accounts.audit_log import audit_row_json
from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.accounts.key_secrets import hidden, holds_secret
from headrace.gateway.api_errors import ApiError, invalid_request, unknown_url
from headrace.gateway.database import ListPage
from headrace.gateway.limits.limit_scopes import LimitSet
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.admin_usage import UsageExport, UsageFilters
from headrace.server.http.api_call import LOCAL, ApiCall, Response
from headrace.server.http.body_parameters import ParameterTable, parse_body_object, parse_parameters
from headrace.server.http.client_address import is_from_here

if TYPE_CHECKING:
    from headrace.server.http.route_table import Route

log: Final = structlog.stdlib.get_logger("headrace.admin")

_LOCAL_CALLER: Final = IdentifiedCaller(key="local", admin="write")
_LOCAL_READER: Final = IdentifiedCaller(key="local", admin="read")
_BODY_S: Final = 30.0  # timeout of a request body
_DAY: Final = 86_400.0  # seconds

Work = Callable[[ApiCall], Awaitable[Any]]


class AdminRoutes:
    def __init__(
        self,
        operations: AdminOperations,
        config: AdminConfig,
        *,
        usage: UsageExport | None = None,
        listed: bool = True,  # in the OpenAPI document
    ) -> None:
        self._operations = operations
        self._config = config
        self._usage = usage
        self._listed = listed

    def routes(self) -> tuple[Route, ...]:
        tenant, key = "/admin/v1/tenants/{tenant}", "/admin/v1/keys/{key}"
        fast = "/admin/v1/fast"
        return (
            self.route(
                "GET", "/admin/v1/epoch", self._epoch, "Show the version of the account records that this gateway has."
            ),
            self.route("GET", "/admin/v1/tenants", self._list_tenants, "List tenants."),
            self.route("POST", "/admin/v1/tenants", self._create_tenant, "Create a tenant.", tables.TENANT),
            self.route("GET", tenant, self._tenant, "Show a tenant."),
            self.route("PATCH", tenant, self._change_tenant, "Change a tenant.", tables.TENANT_CHANGE),
            self.route("DELETE", tenant, self._delete_tenant, "Delete a tenant and revoke its keys."),
            self.route("GET", f"{tenant}/limits", self._limits, "Show a tenant's limits."),
            self.route("PUT", f"{tenant}/limits", self._set_limits, "Replace a tenant's limits.", tables.LIMITS),
            self.route("GET", f"{tenant}/budgets", self._budgets, "Show a tenant's budgets."),
            self.route("PUT", f"{tenant}/budgets", self._set_budgets, "Replace a tenant's budgets.", tables.BUDGETS),
            self.route("GET", "/admin/v1/keys", self._list_keys, "List keys."),
            self.route(
                "POST", "/admin/v1/keys", self._create_key, "Create a key. Its secret is shown only once.", tables.KEY
            ),
            self.route("GET", key, self._key, "Show a key."),
            self.route("DELETE", key, self._revoke_key, "Revoke a key."),
            self.route("POST", f"{key}/rotate", self._rotate_key, "Replace the secret of a key.", tables.ROTATE),
            self.route(
                "GET", "/admin/v1/budgets", self._budget_list, "List spent, reserved and remaining amounts of budgets."
            ),
            self.route("GET", "/admin/v1/usage", self._export, "Export usage as CSV or JSON."),
            self.route(
                "POST",
                "/admin/v1/cache/invalidate",
                self._invalidate,
                "Invalidate entries of the response caches.",
                tables.INVALIDATE,
            ),
            self.route("GET", fast, self._fast, "List where fast mode is set."),
            self.route("PUT", fast, self._set_fast, "Set fast mode for all tenants.", tables.FAST),
            self.route("DELETE", fast, self._clear_fast, "Clear fast mode for all tenants."),
            self.route("PUT", f"{fast}/{{tenant}}", self._set_fast, "Set fast mode for a tenant.", tables.FAST),
            self.route("DELETE", f"{fast}/{{tenant}}", self._clear_fast, "Clear fast mode for a tenant."),
            self.route("GET", "/admin/v1/audit", self._audit, "Show the audit log."),
        )

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
        """Return a route for administrators. What `work` returns becomes the response, unless it is None.

        `open_here`: a server without keys serves it to clients on this machine, too.
        """
        from headrace.server.http.route_table import Route

        async def handler(call: ApiCall) -> None:
            call.headers = {name: value for name, value in call.headers.items() if name != "origin"}
            call.caller = self._admitted(call, open_here=open_here)
            if holds_secret(f"{call.scope['path']} {call.scope['query_string'].decode('latin-1')}"):
                raise _misplaced_secret_error()
            found = await work(call)
            if isinstance(found, dict):
                await call.reply(_private(Response.json(found)))
            if method != "GET":
                log.info("done", request=hidden(call.id), who=call.caller.key, route=path, method=method)

        # Open, because the application would otherwise ask for a key before it answers 404.
        return Route(method, path, handler, about, table, open=True, listed=self._listed)

    def _admitted(self, call: ApiCall, *, open_here: bool) -> IdentifiedCaller:
        if call.scope.get(LOCAL) is True:
            return _LOCAL_CALLER
        directory = self._operations.directory
        if open_here and not directory.needed and is_from_here(call.scope.get("client")):
            return _LOCAL_READER
        if not directory.administered:
            raise unknown_url(directory.hidden(call.scope["path"]))
        call.caller = caller = directory.identify(call.headers)  # calls that are refused count too
        if caller.admin is None:
            raise ApiError("This API key has no access to the admin API.", kind="permission_error", code="no_admin")
        if caller.admin != "write" and call.scope["method"] not in ("GET", "HEAD"):
            raise ApiError("This API key may only read the admin API.", kind="permission_error", code="admin_read_only")
        return caller

    async def given(self, call: ApiCall, table: ParameterTable, *, empty: bool = False) -> dict[str, Any]:
        """Read and convert the body. `empty`: the body may be missing."""
        body = await call.body(self._config.body_bytes, _BODY_S)
        if holds_secret(body.decode("latin-1")):
            raise _misplaced_secret_error()
        values = {} if empty and not body else parse_body_object(body, RequestLimits())
        if not tables.is_utf8(values):
            raise invalid_request("The body contains invalid Unicode.", code="invalid_value")
        return parse_parameters(values, table)

    def who(self, call: ApiCall) -> Actor:
        return Actor(call.caller.key, hidden(call.id))

    # State

    async def _epoch(self, call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        shared = self._operations.shared
        await shared.refresh()
        return {
            "object": "epoch",
            "epoch": shared.epoch,
            "applied_epoch": shared.applied_epoch,
            "loaded": shared.loaded,
            "age_s": round(shared.age, 3),
            "poll_s": self._config.poll_s,
        }

    # Tenants

    async def _list_tenants(self, call: ApiCall) -> dict[str, Any]:
        parameters = tables.page_query(call)
        page = self._operations.tenants(after=parameters.get("after"), limit=parameters["limit"])
        return _listed(page, "name")

    async def _create_tenant(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.TENANT)
        settings = tables.new_settings(given)
        return await self._operations.create_tenant(self.who(call), given["name"], settings)

    async def _tenant(self, call: ApiCall) -> dict[str, Any]:
        return self._operations.tenant(call.params["tenant"])

    async def _change_tenant(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.TENANT_CHANGE)

        def change(before: TenantConfig) -> TenantConfig:
            return tables.changed_settings(before, given)

        return await self._operations.change_tenant(self.who(call), call.params["tenant"], change)

    async def _delete_tenant(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.delete_tenant(self.who(call), call.params["tenant"])

    async def _limits(self, call: ApiCall) -> dict[str, Any]:
        return self._part(call.params["tenant"], tables.LIMITS)

    async def _budgets(self, call: ApiCall) -> dict[str, Any]:
        return self._part(call.params["tenant"], tables.BUDGETS)

    def _part(self, tenant: str, table: ParameterTable) -> dict[str, Any]:
        shown = self._operations.tenant(tenant)
        return {"tenant": tenant, **{name: shown[name] for name in table}}

    async def _set_limits(self, call: ApiCall) -> dict[str, Any]:
        return await self._set_part(call, tables.LIMITS, "limits")

    async def _set_budgets(self, call: ApiCall) -> dict[str, Any]:
        return await self._set_part(call, tables.BUDGETS, "budgets")

    async def _set_part(self, call: ApiCall, table: ParameterTable, what: str) -> dict[str, Any]:
        given = await self.given(call, table)
        tenant = call.params["tenant"]

        def change(before: TenantConfig) -> TenantConfig:
            return tables.changed_settings(before, {**given, "unset": tuple(table)})

        await self._operations.change_tenant(self.who(call), tenant, change, f"tenant.{what}")
        return self._part(tenant, table)

    # Keys

    async def _list_keys(self, call: ApiCall) -> dict[str, Any]:
        parameters = tables.page_query(call, tenant=str)
        page = await self._operations.keys(
            tenant=parameters.get("tenant"), after=parameters.get("after"), limit=parameters["limit"]
        )
        return _listed(page, "id")

    async def _create_key(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.KEY)
        if "expires_at" in given and "expires_in_s" in given:
            raise invalid_request("Set either 'expires_at' or 'expires_in_s', not both.", "expires_in_s")
        expires = given.get("expires_at")
        if "expires_in_s" in given:
            expires = self._operations.seconds_from_now(given["expires_in_s"])
        new = NewKey(
            name=given["name"],
            tenant=given["tenant"],
            scope=KeyScope(given.get("models"), given.get("surfaces"), given.get("profiles"), given.get("admin")),
            surface=given.get("surface"),
            weight=given.get("weight", 1.0),
            limits=given.get("limits", LimitSet()),
            expires=expires,
        )
        return await self._operations.create_key(self.who(call), new)

    async def _key(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.key(call.params["key"])

    async def _rotate_key(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.ROTATE, empty=True)
        return await self._operations.rotate_key(self.who(call), call.params["key"], given.get("overlap_s", _DAY))

    async def _revoke_key(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.revoke_key(self.who(call), call.params["key"])

    # Usage and caches

    async def _export(self, call: ApiCall) -> None:
        parameters = tables.query(call, tables.USAGE)
        if "by" in parameters:
            parameters["by"] = tables.dimensions(parameters["by"])
        usage = self._kept_usage()
        filters = UsageFilters(**parameters)
        most, pieces, length = self._config.export_bytes, list[bytes](), 0
        async for piece in usage.usage(filters):
            length += len(piece)
            if length > most:
                raise ApiError(
                    f"The export is longer than {most} bytes. Narrow it with first_day, last_day, tenant or by.",
                    parameter="by",
                    code="export_too_large",
                    status=413,
                )
            pieces.append(piece)
        type = "text/csv; charset=utf-8" if filters.format == "csv" else "application/json"
        await call.begin_download(length, type, f"usage.{filters.format}", {"cache-control": "no-store"})
        if call.scope["method"] != "HEAD":
            for piece in pieces:
                await call.write(piece)
        await call.write(b"", more=False)

    async def _budget_list(self, call: ApiCall) -> dict[str, Any]:
        """A page is of tenants; each has all its budgets."""
        parameters = tables.page_query(call, tenant=str)
        usage = self._kept_usage()
        directory = self._operations.directory
        if (tenant := parameters.get("tenant")) is not None:
            self._operations.tenant(tenant)  # an unknown one is an error
            names = [tenant]
        else:
            names = [name for name in directory.tenants() if directory.settings_of(name).budgets]
        page = page_of(sorted(names), parameters.get("after"), parameters["limit"])
        found = await usage.budgets({name: directory.settings_of(name).budgets for name in page.data})
        last = page.data[-1] if page.data else None
        return {"object": "list", **found, "last_id": last, "has_more": page.has_more}

    def _kept_usage(self) -> UsageExport:
        if self._usage is None:
            raise ApiError(
                "This server keeps no usage ledger. Set ledger.keeps to on.", kind="not_found_error", code="no_ledger"
            )
        return self._usage

    async def _invalidate(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.INVALIDATE)
        return await self._operations.invalidate(
            self.who(call),
            tags=given.get("tags", ()),
            events=given.get("events", ()),
            tenant=given.get("tenant"),
            all=given.get("all", False),
        )

    # Fast mode

    async def _fast(self, call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return {"object": "list", "data": self._operations.fast()}

    async def _set_fast(self, call: ApiCall) -> dict[str, Any]:
        given = await self.given(call, tables.FAST)
        return await self._operations.set_fast(
            self.who(call),
            call.params.get("tenant"),
            on=given.get("on", True),
            ttl_s=given["ttl_s"],
            reason=given["reason"],
        )

    async def _clear_fast(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.clear_fast(self.who(call), call.params.get("tenant"))

    # The audit log

    async def _audit(self, call: ApiCall) -> dict[str, Any]:
        """`order` asc from the oldest on, as verification needs it; desc from the newest on. `after` is a number."""
        parameters = tables.query(call, {"after": int, "limit": int, "order": Literal["asc", "desc"]})
        limit = parameters.get("limit", 100)
        if not 1 <= limit <= tables.MOST_LISTED:
            raise invalid_request(f"'limit' must be 1 to {tables.MOST_LISTED}", "limit")
        newest, after = parameters.get("order", "desc") == "desc", parameters.get("after")
        span = await self._operations.shared.store.audit(
            after=0 if newest or after is None else after,
            before=after if newest else None,
            limit=limit + 1,
            newest=newest,
        )
        rows = [audit_row_json(row) for row in span.rows[:limit]]
        return {
            "object": "list",
            "data": rows,
            "has_more": len(span.rows) > limit,
            "head": str(span.head),
            "anchor": str(span.anchor),
        }


def _listed(page: ListPage[dict[str, Any]], id: str) -> dict[str, Any]:
    return {
        "object": "list",
        "data": page.data,
        "last_id": page.data[-1][id] if page.data else None,
        "has_more": page.has_more,
    }


def _private(reply: Response) -> Response:
    reply.headers["cache-control"] = "no-store"
    return reply


def _misplaced_secret_error() -> ApiError:
    return ApiError(
        "The request contains the secret of an API key. Send it only in the Authorization header, and rotate the key "
        "if others may have seen it.",
        code="secret_in_request",
    )
