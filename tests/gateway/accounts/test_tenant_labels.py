"""Tenants as a bounded label: the busiest have one of their own."""

from __future__ import annotations

import random

from headrace.gateway.accounts.tenant_labels import TenantLabels
from tests.support.clock import Clock


def test_never_more_labels_than_the_bound_and_the_busiest_have_them() -> None:
    clock, given_up = Clock(0.0), list[str]()
    labels = TenantLabels(3, rank_s=10.0, given_up=given_up.append, monotonic=clock)
    seen: set[str] = set()
    draw = random.Random(1)
    names = [f"t{n}" for n in range(40)]
    live: set[str] = set()
    for _ in range(5000):
        clock.now += 0.1
        name = draw.choices(names, weights=[100, 80, 60] + [1] * 37)[0]
        label = labels.label(name)
        live.add(label)
        live -= set(given_up)
        given_up.clear()
        seen.add(label)
        assert len(labels.labelled) <= 3
        assert len(live - {"other"}) <= 3
    assert labels.labelled == {"t0", "t1", "t2"}
    assert "other" in seen


def test_who_has_no_tenant_and_who_is_called_like_a_label_of_ours() -> None:
    labels = TenantLabels(5)
    assert labels.label("") == "-"
    assert labels.label("other") == "other"
    assert labels.label("-") == "other"
    assert labels.labelled == frozenset()


def test_two_of_the_same_size_do_not_take_turns() -> None:
    clock, given_up = Clock(0.0), list[str]()
    labels = TenantLabels(1, rank_s=1.0, given_up=given_up.append, monotonic=clock)
    for _ in range(1000):
        clock.now += 0.5
        labels.label("a")
        labels.label("b")
    assert (given_up, labels.labelled) == ([], {"a"})


def test_who_has_gone_makes_room() -> None:
    clock, given_up = Clock(0.0), list[str]()
    labels = TenantLabels(1, rank_s=60.0, half_life_s=600.0, given_up=given_up.append, monotonic=clock)
    for _ in range(100):
        labels.label("a")
    assert labels.label("b") == "other"
    clock.now += 86_400.0
    assert labels.label("b") == "b"
    assert given_up == ["a"]


def test_what_is_counted_is_bounded() -> None:
    labels = TenantLabels(2, counted=10)
    for number in range(1000):
        labels.label(f"t{number}")
    assert len(labels._traffic) == 10
