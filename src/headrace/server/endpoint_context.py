"""EndpointContext: what every endpoint may use. Knows no endpoint and no route."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from headrace.config import Config
from headrace.gateway.accounts.access import find_model
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.observe import metrics
from headrace.server.http.api_call import ApiCall, Response


class EndpointContext:
    """All of it belongs to one event loop."""

    def __init__(self, config: Config, services: Services) -> None:
        self.config = config
        self.services = services
        self.is_ready = False  # every engine has started
        self.is_draining = False  # no new request is admitted
        self.running = 0  # requests that engines and upstreams work for

    def admit(self) -> None:
        """ApiError where the server starts, shuts down or runs as many requests as it may."""
        if not self.is_ready:
            raise _unavailable("The models are being loaded. Retry in a second.", "starting")
        if self.is_draining:
            raise _unavailable("The server is shutting down. Retry on another server.", "draining")
        if self.running >= self.config.limits.requests:
            raise _unavailable(f"The server already runs {self.running} requests. Retry later.", "too_many_requests")

    @contextmanager
    def count_running(self) -> Generator[None]:
        self.running += 1
        metrics.running.set(self.running)
        try:
            yield
        finally:
            self.running -= 1
            metrics.running.set(self.running)

    def exchange(self, caller: Caller, request: TextRequest, endpoint: str) -> Exchange:
        """ApiError where the caller may not use the model, or there is none of that name."""
        served = find_model(caller, self.services.fleet, request.model, request.profile)
        return Exchange(caller=caller, asked=request, served=served, endpoint=endpoint)

    async def body(self, call: ApiCall) -> bytes:
        server = self.config.server
        return await call.body(server.body_bytes, server.body_s)

    async def reply(self, call: ApiCall, response: Response) -> None:
        response.headers |= self.cors_headers(call)
        await call.reply(response)

    def cors_headers(self, call: ApiCall) -> dict[str, str]:
        """Return the headers that let a page of the request's origin read the response; none for other origins."""
        origin = call.headers.get("origin")
        origins = self.config.server.cors_origins
        if origin is None or not ("*" in origins or origin in origins):
            return {}
        return {"access-control-allow-origin": "*" if "*" in origins else origin, "vary": "origin"}


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(message, kind="overloaded_error", code=code, retry_after=1.0)
