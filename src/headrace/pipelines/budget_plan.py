"""Plans the time of a pipeline's stages: the deadline minus what later stages need is a stage's budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StageNeed(msgspec.Struct, frozen=True):
    """The time that one stage may take or, if it takes all that is left, what earlier stages keep free for it."""

    name: str
    budget_s: float | None = None  # None: all that later stages leave
    takes_rest: bool = False  # gets more than its budget if there is more


def fitted(needs: Sequence[StageNeed], total_s: float) -> list[StageNeed]:
    """Return the needs, shortened in proportion if together they take more than a run has, as with a request's short
    deadline. Without this, earlier stages would have no time at all. A stage without a budget then counts as others do.
    """
    declared = [need.budget_s for need in needs if need.budget_s]
    if sum(declared) <= total_s:
        return list(needs)
    open_stages = sum(need.budget_s is None for need in needs)
    share = max(0.0, total_s) / (sum(declared) * (1 + open_stages / len(declared)))
    return [
        need if need.budget_s is None else msgspec.structs.replace(need, budget_s=need.budget_s * share)
        for need in needs
    ]


def stage_end(needs: Sequence[StageNeed], place: int, now: float, deadline: float) -> float:
    """Return when the stage at `place` must end if it begins `now`.

    What later stages need is kept free for them. If less than that is left, the result is `now` or earlier: the stage
    has no time and is late before it begins. The last stage that takes the rest may use all time up to the deadline.
    """
    latest = deadline - needed_after(needs, place)
    need = needs[place]
    if need.takes_rest or need.budget_s is None:
        return latest
    return min(now + need.budget_s, latest)


def needed_after(needs: Sequence[StageNeed], place: int) -> float:
    """Return the seconds that the stages after `place` need."""
    return sum(need.budget_s or 0.0 for need in needs[place + 1 :])


def plan(needs: Sequence[StageNeed], total_s: float) -> list[float]:
    """Return the seconds each stage gets if every one takes all that it may. For `GET /v1/pipelines`."""
    now, budgets = 0.0, list[float]()
    for place in range(len(needs)):
        end = max(now, stage_end(needs, place, now, total_s))
        budgets.append(end - now)
        now = end
    return budgets
