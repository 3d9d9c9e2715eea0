"""The section [canary]: how candidates are compared with the variant that they may replace. headrace.lab applies it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.routing_section import SharePercent
from headrace.config.value_types import Count, Seconds, Section, Share, Text

Tolerance = Annotated[float, Meta(ge=0, le=1)]


class CanaryConfig(Section, frozen=True):
    stages: tuple[SharePercent, ...] = (5.0, 25.0, 50.0)  # percent of the requests that the candidate gets, ascending
    unit: Literal["conversation", "tenant"] = "conversation"  # what stays with its variant
    promote: Literal["manual", "auto"] = "manual"  # auto: through the stages to all requests, without an administrator
    stage_requests: Count = 500  # with promote = "auto": requests of the candidate in a stage before the next one
    stage_s: Seconds = 600.0  # seconds a stage lasts at least
    stage_pairs: Annotated[int, Meta(ge=0)] = 20  # with a reference: requests with measured quality per stage
    proof: bool = False  # the last stage ends only when every measure is proven to be within its tolerance
    every_s: Seconds = 10.0  # evaluation period; a breach is rolled back within it
    alpha: Annotated[float, Meta(gt=0, le=0.5)] = 0.05  # chance that a candidate as good as the control is rolled back
    slower: Tolerance = 0.1  # share by which the candidate may be slower: ttft, itl, e2e
    dearer: Tolerance = 0.1  # share by which the candidate's mean cost of a request may be higher
    worse: Tolerance = 0.02  # by which quality, feedback and failed checks may be worse, 0 to 1
    failures: Tolerance = 0.01  # by which the share of failed requests may be higher
    reference: Text | None = None  # variant that quality is measured against; default: quality is not measured
    outcome: Text = "thumbs"  # name of the feedback that counts, 0 to 1
    pairs: Share = 0.1  # share of requests that the other variants answer, too, to compare
    # Copies begin at any time, or only while this server runs no request; default: "idle" where an engine of this
    # machine answers them, else "always"
    when: Literal["always", "idle"] | None = None
    tokens_per_day: Count = 1_000_000  # tokens of these copies per day (UTC)
    concurrent: Annotated[int, Meta(ge=1, le=64)] = 1  # copies at once
    queue: Annotated[int, Meta(ge=1, le=4096)] = 32  # copies that wait; further ones are dropped
    timeout_s: Seconds = 60.0  # seconds a copy may take
