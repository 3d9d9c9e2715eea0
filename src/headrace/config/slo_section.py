"""The sections [slo.NAME]: objectives for the requests of a surface."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.config.value_types import Milliseconds, Section, Text

_Target = Annotated[float, Meta(gt=0, lt=1)]


class SloConfig(Section, frozen=True):
    surface: Text | None = None  # whose requests it is about; default: the section's name
    ttft_p95_ms: Milliseconds | None = None  # 95 % of requests have their first token within this
    ttft_p99_ms: Milliseconds | None = None
    itl_p95_ms: Milliseconds | None = None  # 95 % of the gaps between two outputs are at most this
    itl_p99_ms: Milliseconds | None = None
    e2e_p95_ms: Milliseconds | None = None  # 95 % of responses are complete within this
    e2e_p99_ms: Milliseconds | None = None
    availability: _Target | None = None  # share of requests that do not fail by a fault of the server, such as 0.999
    fast_mode: bool = False  # switch fast mode on while one of these objectives pages; needs [fast]
