"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families


def samples(http: httpx2.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_tokens_and_the_engine_are_counted(client: openai.OpenAI, http: httpx2.Client) -> None:
    before = samples(http)
    answer = client.chat.completions.create(
        model="mini", messages=[{"role": "user", "content": "What is paging?"}], max_completion_tokens=5
    )
    after = samples(http)

    def grown(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert answer.usage is not None
    assert grown("headrace_tokens_total", model="mini", tenant="-", kind="output") == 5
    assert grown("headrace_tokens_total", model="mini", tenant="-", kind="prompt") == answer.usage.prompt_tokens
    assert grown("headrace_answers_total", model="mini", tenant="-", ended="limited") == 1
    assert grown("headrace_http_requests_total", route="/v1/chat/completions", status="200") == 1
    assert grown("headrace_time_to_first_token_seconds_count", model="mini") == 1
    assert grown("headrace_engine_admitted", model="mini", replica="0") == 1
    assert grown("headrace_engine_steps", model="mini", replica="0") >= 4
    assert after["headrace_engine_running", (("model", "mini"), ("replica", "0"))] == 0


def test_a_client_makes_no_new_labels(http: httpx2.Client) -> None:
    before = {name for name, _ in samples(http)}, len(samples(http))
    for path in ("/nowhere", "/v1/models/none", "/v1/files/file-x"):
        http.get(path)
    http.post("/v1/chat/completions", json={"model": "x" * 50, "messages": [{"role": "user", "content": "a"}]})
    after = samples(http)
    assert {name for name, _ in after} == before[0]
    assert not [labels for _, labels in after if any("nowhere" in value or "xxx" in value for _, value in labels)]
