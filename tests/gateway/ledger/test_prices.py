"""Prices: exact sums, one rounding, amounts as text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.ledger.prices import (
    FREE,
    Price,
    PriceBook,
    PriceError,
    format_micros,
    make_price,
    microseconds,
    parse_micros,
)


def test_a_price_is_the_exact_sum_rounded_half_up_once() -> None:
    cents = make_price(input="0.15", cached="0.075", output=0.6)
    assert cents == Price(150_000, 75_000, 600_000)
    # 900 · 0.15 + 100 · 0.075 + 50 · 0.6 = 172.5 micros
    assert cents.micros(1000, 100, 50) == 173
    assert cents.micros(1, 0, 0) == 0
    assert cents.micros(4, 0, 0) == 1  # 0.6
    assert cents.micros(0, 0, 0) == 0


@given(
    st.builds(Price, *[st.integers(0, 10**12)] * 4, hit_percent=st.integers(0, 100)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**10),
)
def test_no_sum_is_off_by_more_than_half_a_micro(
    each: Price, prompt: int, cached: int, output: int, machine_us: int
) -> None:
    cached = min(cached, prompt)
    exact = Fraction(
        (prompt - cached) * each.input + cached * each.cached + output * each.output + machine_us * each.second, 10**6
    )
    assert -Fraction(1, 2) < each.micros(prompt, cached, output, machine_us) - exact <= Fraction(1, 2)
    hit = exact * each.hit_percent / 100
    assert -Fraction(1, 2) < each.hit_micros(prompt, cached, output, machine_us) - hit <= Fraction(1, 2)


def test_machine_time_is_whole_microseconds_before_it_is_summed() -> None:
    hour = make_price(second="0.001")  # 1000 micros
    assert microseconds(0.0000015) == 2
    assert [microseconds(each) for each in (-1.0, float("nan"), float("inf"), 0.1)] == [0, 0, 0, 100_000]
    assert hour.micros(10, 0, 10, microseconds(1.5)) == 1500


def test_a_cached_token_costs_what_another_does_unless_told_otherwise() -> None:
    assert make_price(input=1).cached == make_price(input=1).input == 1_000_000
    assert make_price(input=1, cached=0).cached == 0


def test_a_hit_costs_nothing_or_its_share() -> None:
    assert make_price(input=1).hit_micros(10, 0, 0) == 0
    assert make_price(input=1, hit_percent=25).hit_micros(10, 0, 0) == 3  # 2.5
    assert make_price(input=1, hit_percent=100).hit_micros(10, 0, 0) == 10


@pytest.mark.parametrize("amount", ["", "x", -1, "0.0000001", float("nan"), float("inf"), 1e30, "1e9", "--1"])
def test_what_is_no_amount_is_refused(amount: str | float) -> None:
    with pytest.raises(PriceError):
        parse_micros(amount)


def test_amounts_and_text_are_the_same_both_ways() -> None:
    assert [parse_micros(each) for each in (0.1, "0.1", 3, "1e-6", 0.000001)] == [100_000, 100_000, 3_000_000, 1, 1]
    assert [format_micros(each) for each in (0, 1, 1_500_000, -1)] == ["0.000000", "0.000001", "1.500000", "-0.000001"]


def test_a_variant_without_a_price_has_its_models_and_else_none() -> None:
    book = PriceBook({"mini": Price(5), "mini@int4": Price(1)})
    assert [book.of(name) for name in ("mini", "mini@int4", "mini@golden", "other", "other@x")] == [
        Price(5),
        Price(1),
        Price(5),
        FREE,
        FREE,
    ]
    assert FREE.free
    assert not Price(second=1).free
