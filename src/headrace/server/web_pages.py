"""`/`, `/lab` and `/playground`: the pages of headrace.observe.web, for browsers.

The pages hold no data and need no key; what they show they fetch with the key that the reader enters. By default they
are served to this machine only.
"""

from __future__ import annotations

from typing import Final

from headrace.gateway.api_errors import unknown_url
from headrace.observe.web import CONTENT_POLICY, WebFile, web_file, web_files
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import LOCAL, ApiCall, Response
from headrace.server.http.client_address import is_from_here
from headrace.server.http.route_table import Handler, Route

_HEADERS: Final = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asks each time; the tag makes the answer short
}
_PAGES: Final = {
    "/": ("dashboard.html", "The dashboard, for browsers."),
    "/lab": ("lab.html", "Canaries, shadows and drift, for browsers."),
    "/playground": ("playground.html", "The playground, for browsers."),
}


def routes(context: EndpointContext) -> tuple[Route, ...]:
    """Return no routes if `server.pages` is off."""
    if context.config.server.pages == "off":
        return ()
    is_local = context.config.server.pages == "local"

    def handler(file: WebFile) -> Handler:
        async def send(call: ApiCall) -> None:
            if is_local and LOCAL not in call.scope and not is_from_here(call.scope.get("client")):
                raise unknown_url(call.scope["path"])
            headers = {**_HEADERS, "etag": file.tag}
            if call.headers.get("if-none-match") == file.tag:
                await context.reply(call, Response(b"", 304, file.type.encode(), headers))
            else:
                await context.reply(call, Response(file.body, 200, file.type.encode(), headers))

        return send

    pages = [Route("GET", path, handler(web_file(name)), about, open=True) for path, (name, about) in _PAGES.items()]
    files = [
        Route("GET", f"/web/{file.name}", handler(file), "A file of the pages.", open=True, listed=False)
        for file in web_files()
        if not file.name.endswith(".html")
    ]
    return (*pages, *files)
