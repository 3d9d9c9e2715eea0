"""The admin API of canaries: start, status, promote, roll back."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from headrace.config.routing_section import SharePercent
from headrace.gateway.api_errors import ApiError
from headrace.lab.online.canaries import Canaries
from headrace.lab.online.canary_operations import NewCanary
from headrace.lab.online.online_lab import OnlineLab
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import Parameter, ParameterTable
from headrace.server.http.route_table import Route

_Stages = Annotated[tuple[SharePercent, ...], Meta(min_length=1, max_length=32)]
START: Final[ParameterTable] = {
    "candidate": Parameter("Variant that takes a share of the requests.", tables.Line, required=True),
    "control": Parameter("Variant whose requests it takes. Default: the candidate's model.", tables.Line),
    "stages": Parameter("Percentages of the requests, ascending. Default: canary.stages.", _Stages),
    "unit": Parameter("What stays with its variant. Default: canary.unit.", Literal["conversation", "tenant"]),
    "promote": Parameter("auto advances without an administrator. Default: canary.promote.", Literal["manual", "auto"]),
    "reason": Parameter("Reason, written to the audit log.", tables.Line),
}
END: Final[ParameterTable] = {
    "control": Parameter("Whose canary is meant. Default: the only one that runs.", tables.Line),
    "reason": Parameter("Reason, written to the audit log.", tables.Line),
}


def routes(administration: Administration, lab: OnlineLab, *, processes: int) -> tuple[Route, ...]:
    """`processes`: that serve the port."""

    def canaries() -> Canaries:
        assert lab.canaries is not None  # front processes relay these calls
        return lab.canaries

    async def status(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        found = canaries()
        return {"object": "list", "data": [found.as_json(control) for control in found.operations.records()]}

    async def start(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, START)
        if processes > 1:
            raise ApiError(
                f"Canaries need server.processes = 1, found {processes}: each process would measure a part.",
                code="needs_one_process",
                status=409,
            )
        config = canaries().config
        new = NewCanary(
            control=given.get("control") or given["candidate"].partition("@")[0],
            candidate=given["candidate"],
            stages=given.get("stages", config.stages),
            unit=given.get("unit", config.unit),
            auto=given.get("promote", config.promote) == "auto",
            reason=given.get("reason", ""),
        )
        await canaries().operations.start(administration.who(call), new)
        return canaries().as_json(new.control)

    async def promote(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, END, empty=True)
        operations = canaries().operations
        control = operations.only(given.get("control"))
        await operations.promote(administration.who(call), control, given.get("reason", ""))
        return canaries().as_json(control)

    async def roll_back(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, END, empty=True)
        operations = canaries().operations
        control = operations.only(given.get("control"))
        await operations.roll_back(administration.who(call), control, given.get("reason", ""))
        return canaries().as_json(control)

    route = administration.route
    return (
        route("GET", "/admin/v1/canary", status, "Show canaries, with both arms side by side.", open_here=True),
        route("POST", "/admin/v1/canary", start, "Start a canary.", table=START),
        route("POST", "/admin/v1/canary/promote", promote, "Send all requests to the candidate.", table=END),
        route("POST", "/admin/v1/canary/rollback", roll_back, "Send all requests to the control.", table=END),
    )
