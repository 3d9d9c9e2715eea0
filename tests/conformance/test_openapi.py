"""schemathesis against our own OpenAPI document: whatever is sent, nothing is a 500, and what is refused says why."""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck

from tests.conformance.conftest import Server

EXAMPLES = 12  # of each endpoint
FEW = 4  # tokens of an answer
LIMITED = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/api/chat": "options",
    "/api/generate": "options",
}


def test_nothing_makes_a_500(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        check(operation, server.url)


def check(operation: Any, url: str) -> None:
    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def sent(case: Any) -> None:
        shorten(case)
        reply = case.call(base_url=url, timeout=120)
        assert reply.status_code < 500 or reply.status_code in (503, 507), reply.text
        if reply.status_code >= 400:
            error = reply.json()["error"]
            if case.path.startswith("/api/"):  # Ollama's errors are a string
                assert error
                assert isinstance(error, str)
            else:
                assert error["message"]
                assert error["type"]

    sent()


def shorten(case: Any) -> None:
    """Or most of the time would go into long answers."""
    limit = LIMITED.get(case.path)
    if limit is None or not isinstance(case.body, dict):
        return
    if limit == "options":
        case.body["options"] = {"num_predict": FEW}
        case.body.pop("min_tokens", None)
        return
    for name in ("deadline_ms", "min_tokens", "max_tokens"):
        case.body.pop(name, None)
    case.body[limit] = FEW
    if isinstance(case.body.get("n"), int):
        case.body["n"] = min(case.body["n"], 2)
