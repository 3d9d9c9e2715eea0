"""The deadline minus what later stages need is a stage's budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipelines.budget_plan import StageNeed, fitted, plan, stage_end

ANSWER = StageNeed("generate", 1.0, takes_rest=True, yields=True)
NEEDS = [
    StageNeed("search", 0.3),
    StageNeed("rerank", 0.2),
    StageNeed("generate", 1.0, takes_rest=True),
    StageNeed("check", 0.1),
]


def test_a_stage_gets_its_budget_while_there_is_time() -> None:
    assert stage_end(NEEDS, 0, 10.0, 15.0) == pytest.approx(10.3)


def test_a_stage_gets_the_deadline_minus_what_later_stages_need() -> None:
    assert stage_end(NEEDS, 0, 10.0, 11.5) == pytest.approx(10.2)


def test_a_stage_without_time_ends_before_it_begins() -> None:
    assert stage_end(NEEDS, 1, 10.0, 11.0) < 10.0


def test_a_short_deadline_shortens_all_budgets() -> None:
    short = fitted(NEEDS, 0.8)
    assert [need.budget_s for need in short] == pytest.approx([0.15, 0.1, 0.5, 0.05])
    assert stage_end(short, 0, 10.0, 10.8) == pytest.approx(10.15)
    assert fitted(NEEDS, 1.6) == NEEDS


def test_the_stage_that_yields_is_shortened_first() -> None:
    needs = [*NEEDS[:2], ANSWER, NEEDS[3]]
    assert [need.budget_s for need in fitted(needs, 1.2)] == pytest.approx([0.3, 0.2, 0.6, 0.1])
    assert [need.budget_s for need in fitted(needs, 0.5)] == pytest.approx([0.2, 0.4 / 3, 0.1, 0.2 / 3])


@pytest.mark.parametrize(("total_s", "search_s"), [(0.25, 0.2), (1.0, 0.8), (1.05, 0.84), (1.5, 1.0), (4.0, 3.0)])
def test_a_search_without_a_budget_gets_most_of_a_short_deadline(total_s: float, search_s: float) -> None:
    needs = [StageNeed("search"), StageNeed("assemble", waits=False), ANSWER]
    assert plan(fitted(needs, total_s), total_s)[0] == pytest.approx(search_s)


def test_the_answer_gets_all_that_is_left() -> None:
    assert stage_end(NEEDS, 2, 10.0, 15.0) == pytest.approx(14.9)


def test_a_stage_without_a_budget_leaves_what_later_stages_need() -> None:
    needs = [StageNeed("search"), StageNeed("generate", 1.0, takes_rest=True)]
    assert plan(needs, 5.0) == pytest.approx([4.0, 1.0])


@given(
    st.lists(st.tuples(st.none() | st.floats(0.0, 10.0), st.booleans(), st.booleans()), min_size=1, max_size=7),
    st.floats(0.0, 60.0),
)
def test_all_stages_together_stay_within_the_deadline(
    stages: list[tuple[float | None, bool, bool]], total: float
) -> None:
    needs = [StageNeed(f"s{place}", budget, rest, gives) for place, (budget, rest, gives) in enumerate(stages)]
    assert sum(plan(needs, total)) <= total + 1e-9
    short = fitted(needs, total)
    assert sum(need.budget_s or 0.0 for need in short) <= total + 1e-9
    assert sum(plan(short, total)) <= total + 1e-9
