"""Plans the time of a pipeline's stages: the deadline minus what later stages need is a stage's budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

_LEAST_SHARE: Final = 0.2  # of the time, that a stage which yields keeps free in any case


class StageNeed(msgspec.Struct, frozen=True):
    """The time that one stage may take or, if it takes all that is left, what earlier stages keep free for it."""

    name: str
    budget_s: float | None = None  # None: all that later stages leave
    takes_rest: bool = False  # gets more than its budget if there is more
    yields: bool = False  # can do with little: if time is short, others keep theirs before it does
    waits: bool = True  # for a model, a collection or a tool; other stages take next to no time


def fitted(needs: Sequence[StageNeed], total_s: float) -> list[StageNeed]:
    """Return the needs, shortened if a run has less time than they take, as with a request's short deadline.

    The stage that yields gives way first, down to a fifth of the time: an answer can be made of the passages at once,
    but not without them. To a stage without a budget that may wait, it leaves as much as it would take itself. If that
    is not enough, the others are shortened in proportion, where a stage without a budget counts as they do on average.
    """
    total_s = max(0.0, total_s)
    yielding = next((need for need in needs if need.yields and need.budget_s), None)
    others = [need for need in needs if need is not yielding]
    declared = [need.budget_s for need in others if need.budget_s]
    unbounded = sum(need.budget_s is None and need.waits for need in others)
    kept = 0.0
    if yielding is not None and yielding.budget_s is not None:
        wanted = sum(declared) + (yielding.budget_s if unbounded else 0.0)
        kept = min(yielding.budget_s, max(total_s * _LEAST_SHARE, total_s - wanted))
    share = 1.0
    if sum(declared) > total_s - kept:
        share = (total_s - kept) / (sum(declared) * (1 + unbounded / len(declared)))

    def fit(need: StageNeed) -> StageNeed:
        if need.budget_s is None:
            return need
        return msgspec.structs.replace(need, budget_s=kept if need is yielding else need.budget_s * share)

    return [fit(need) for need in needs]


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
