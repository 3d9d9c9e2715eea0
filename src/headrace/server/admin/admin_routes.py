"""`/admin/v1`: the endpoints of administrators.

Owns the routes, who may use them, and what goes out. Without an administrator there is no admin API: where no key has
rights on it, and the call comes by no socket of its own, each of its paths is answered as one that does not exist. A
key without rights is refused; one with rights to read may only GET. What is done is operations's.

Replies are not for caches on the way, and not for browsers of other origins. A call in which the secret of a key stands
anywhere but in its headers is refused unread: it would end up in logs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from headrace.config.tenant_section import AdminConfig, TenantConfig
from headrace.gateway.accounts.account_records import KeyScope
from headrace.gateway.accounts.admin_operations import Actor, AdminOperations, NewKey
from headrace.gateway.accounts.audit_log import audit_row_json
from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.accounts.key_secrets import hidden, holds_secret
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import ListPage
from headrace.gateway.limits.limit_scopes import LimitSet
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.admin_protocols import UsageExport, UsageFilters
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import ParameterTable, parse_body_object, parse_parameters

if TYPE_CHECKING:
    from headrace.server.http.route_table import Route

log: Final = structlog.stdlib.get_logger("headrace.admin")

LOCAL: Final = "headrace.local"  # in the scope of a call that came by the socket for administrators
_LOCAL_CALLER: Final = IdentifiedCaller(key="local", admin="write")
_BODY_S: Final = 30.0  # for a body
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
            self._route("GET", "/admin/v1/epoch", self._epoch, "How new what this gateway knows is."),
            self._route("GET", "/admin/v1/tenants", self._list_tenants, "The tenants."),
            self._route("POST", "/admin/v1/tenants", self._create_tenant, "Make one.", tables.TENANT),
            self._route("GET", tenant, self._tenant, "One of them."),
            self._route("PATCH", tenant, self._change_tenant, "Change it.", tables.TENANT_CHANGE),
            self._route("DELETE", tenant, self._delete_tenant, "Remove it, with its keys."),
            self._route("GET", f"{tenant}/limits", self._limits, "Its limits."),
            self._route("PUT", f"{tenant}/limits", self._set_limits, "Replace all of its limits.", tables.LIMITS),
            self._route("GET", f"{tenant}/budgets", self._budgets, "Its budgets."),
            self._route("PUT", f"{tenant}/budgets", self._set_budgets, "Replace all of its budgets.", tables.BUDGETS),
            self._route("GET", "/admin/v1/keys", self._list_keys, "The keys."),
            self._route("POST", "/admin/v1/keys", self._create_key, "Make one; its secret is told once.", tables.KEY),
            self._route("GET", key, self._key, "One of them."),
            self._route("DELETE", key, self._revoke_key, "Revoke it."),
            self._route("POST", f"{key}/rotate", self._rotate_key, "Give it a new secret.", tables.ROTATE),
            self._route("GET", "/admin/v1/usage", self._export, "What was used, as CSV or JSON."),
            self._route(
                "POST", "/admin/v1/cache/invalidate", self._invalidate, "End entries of caches.", tables.INVALIDATE
            ),
            self._route("GET", fast, self._fast, "Where fast mode is set."),
            self._route("PUT", fast, self._set_fast, "Set it for all.", tables.FAST),
            self._route("DELETE", fast, self._clear_fast, "Clear what is set for all."),
            self._route("PUT", f"{fast}/{{tenant}}", self._set_fast, "Set it for a tenant.", tables.FAST),
            self._route("DELETE", f"{fast}/{{tenant}}", self._clear_fast, "Clear what is set for a tenant."),
            self._route("GET", "/admin/v1/audit", self._audit, "Who changed what."),
        )

    def _route(self, method: str, path: str, work: Work, about: str, table: ParameterTable | None = None) -> Route:
        from headrace.server.http.route_table import Route

        async def handler(call: ApiCall) -> None:
            call.headers = {name: value for name, value in call.headers.items() if name != "origin"}
            call.caller = self._admitted(call)
            if holds_secret(f"{call.scope['path']} {call.scope['query_string'].decode('latin-1')}"):
                raise _secret_where_none_belongs()
            found = await work(call)
            if isinstance(found, dict):
                await call.reply(_private(Response.json(found)))
            if method != "GET":
                log.info("done", request=hidden(call.id), who=call.caller.key, route=path, method=method)

        # Open for the application, which would ask for a key before it says that there is no such path.
        return Route(method, path, handler, about, table, open=True, listed=self._listed)

    def _admitted(self, call: ApiCall) -> IdentifiedCaller:
        if call.scope.get(LOCAL) is True:
            return _LOCAL_CALLER
        directory = self._operations.directory
        if not directory.administered:
            path = directory.hidden(call.scope["path"])[:200]
            raise ApiError(f"there is no {path}", kind="not_found_error", code="unknown_url")
        caller = directory.identify(call.headers)
        if caller.admin is None:
            raise ApiError("the API key has no rights on the admin API", kind="permission_error", code="no_admin")
        if caller.admin != "write" and call.scope["method"] not in ("GET", "HEAD"):
            raise ApiError("the API key may only read the admin API", kind="permission_error", code="admin_read_only")
        return caller

    async def _given(self, call: ApiCall, table: ParameterTable, *, empty: bool = False) -> dict[str, Any]:
        """`empty`: a body may be missing."""
        body = await call.body(self._config.body_bytes, _BODY_S)
        if holds_secret(body.decode("latin-1")):
            raise _secret_where_none_belongs()
        values = {} if empty and not body else parse_body_object(body)
        if not tables.is_utf8(values):
            raise invalid_request("the body has texts that are no Unicode", code="invalid_value")
        return parse_parameters(values, table)

    def _who(self, call: ApiCall) -> Actor:
        return Actor(call.caller.key, hidden(call.id))

    # The state

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
        asked = tables.page_query(call)
        page = self._operations.tenants(after=asked.get("after"), limit=asked["limit"])
        return _listed(page, "name")

    async def _create_tenant(self, call: ApiCall) -> dict[str, Any]:
        given = await self._given(call, tables.TENANT)
        settings = tables.new_settings(given)
        return await self._operations.create_tenant(self._who(call), given["name"], settings)

    async def _tenant(self, call: ApiCall) -> dict[str, Any]:
        return self._operations.tenant(call.params["tenant"])

    async def _change_tenant(self, call: ApiCall) -> dict[str, Any]:
        given = await self._given(call, tables.TENANT_CHANGE)

        def change(before: TenantConfig) -> TenantConfig:
            return tables.changed_settings(before, given)

        return await self._operations.change_tenant(self._who(call), call.params["tenant"], change)

    async def _delete_tenant(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.delete_tenant(self._who(call), call.params["tenant"])

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
        given = await self._given(call, table)
        tenant = call.params["tenant"]

        def change(before: TenantConfig) -> TenantConfig:
            return tables.changed_settings(before, {**given, "unset": tuple(table)})

        await self._operations.change_tenant(self._who(call), tenant, change, f"tenant.{what}")
        return self._part(tenant, table)

    # Keys

    async def _list_keys(self, call: ApiCall) -> dict[str, Any]:
        asked = tables.page_query(call, tenant=str)
        page = await self._operations.keys(tenant=asked.get("tenant"), after=asked.get("after"), limit=asked["limit"])
        return _listed(page, "id")

    async def _create_key(self, call: ApiCall) -> dict[str, Any]:
        given = await self._given(call, tables.KEY)
        if "expires_at" in given and "expires_in_s" in given:
            raise invalid_request("'expires_at' and 'expires_in_s' say the same", "expires_in_s")
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
        return await self._operations.create_key(self._who(call), new)

    async def _key(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.key(call.params["key"])

    async def _rotate_key(self, call: ApiCall) -> dict[str, Any]:
        given = await self._given(call, tables.ROTATE, empty=True)
        return await self._operations.rotate_key(self._who(call), call.params["key"], given.get("overlap_s", _DAY))

    async def _revoke_key(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.revoke_key(self._who(call), call.params["key"])

    # Usage and caches

    async def _export(self, call: ApiCall) -> None:
        asked = tables.query(call, tables.USAGE)
        if "by" in asked:
            asked["by"] = tables.dimensions(asked["by"])
        if self._usage is None:
            raise ApiError("this server keeps no ledger", kind="not_found_error", code="no_ledger")
        filters = UsageFilters(**asked)
        most, pieces, length = self._config.export_bytes, list[bytes](), 0
        async for piece in self._usage.usage(filters):
            length += len(piece)
            if length > most:
                raise ApiError(
                    f"the export is longer than {most} bytes; ask for less with first_day, last_day, tenant or by",
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

    async def _invalidate(self, call: ApiCall) -> dict[str, Any]:
        given = await self._given(call, tables.INVALIDATE)
        return await self._operations.invalidate(
            self._who(call),
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
        given = await self._given(call, tables.FAST)
        return await self._operations.set_fast(
            self._who(call),
            call.params.get("tenant"),
            on=given.get("on", True),
            ttl_s=given["ttl_s"],
            reason=given["reason"],
        )

    async def _clear_fast(self, call: ApiCall) -> dict[str, Any]:
        return await self._operations.clear_fast(self._who(call), call.params.get("tenant"))

    # The audit log

    async def _audit(self, call: ApiCall) -> dict[str, Any]:
        """`order` asc from the oldest on, as verification needs it; desc from the newest on. `after` is a number."""
        asked = tables.query(call, {"after": int, "limit": int, "order": Literal["asc", "desc"]})
        limit = asked.get("limit", 100)
        if not 1 <= limit <= tables.MOST_LISTED:
            raise invalid_request(f"'limit' must be 1 to {tables.MOST_LISTED}", "limit")
        newest, after = asked.get("order", "desc") == "desc", asked.get("after")
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


def _secret_where_none_belongs() -> ApiError:
    return ApiError(
        "the secret of a key stands in the request; it belongs into the Authorization header alone, and should be "
        "rotated where others could read it",
        code="secret_in_request",
    )
