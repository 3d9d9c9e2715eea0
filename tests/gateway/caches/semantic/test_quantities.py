"""Numbers, units and dates are the same however they are written, and different where they are."""

from __future__ import annotations

import pytest

from headrace.gateway.caches.semantic.quantities import quantities
from headrace.gateway.caches.semantic.word_forms import expanded


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a file of 5 GB", "a 5GB file"),
        ("five gigabytes", "5 GB"),
        ("1000 MB", "1 GB"),
        ("a fee on $1,000", "a fee on 1000 dollars"),
        ("10k requests", "10,000 requests"),
        ("wait 30s", "wait thirty seconds"),
        ("2 minutes", "120 s"),
        ("two hundred words", "200 words"),
        ("5% of users", "5 percent of users"),
        ("the 1st milestone", "the first milestone"),
        ("runs two times", "runs twice"),
    ],
)
def test_amounts_are_the_same_however_they_are_written(one: str, other: str) -> None:
    found = quantities(expanded(one)).numbers
    assert found
    assert found == quantities(expanded(other)).numbers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5 GB", "5 MB"),
        ("5 GB", "5 GiB"),
        ("30 s", "30 ms"),
        ("python 3.1", "python 3.10"),
        ("4.2.1", "4.2.10"),
        ("100 Mbit/s", "100 MB/s"),
        ("20 °C", "20 °F"),
        ("€500", "$500"),
        ("the second page", "the third page"),
        ("half a day", "a day"),
        ("99.9%", "99.99%"),
    ],
)
def test_other_amounts_are_other(one: str, other: str) -> None:
    assert quantities(expanded(one)).numbers != quantities(expanded(other)).numbers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("due on 1 May 2026", "due on May 1, 2026"),
        ("due on 2026-05-01", "due on 1 May 2026"),
        ("at 6 pm", "at 18:00"),
        ("in Jan 2025", "in January 2025"),
        ("tonight", "this evening"),
        ("on Mondays", "on Monday"),
        ("in the past week", "in the last week"),
    ],
)
def test_dates_are_the_same_however_they_are_written(one: str, other: str) -> None:
    found = quantities(expanded(one)).dates
    assert found
    assert found == quantities(expanded(other)).dates


@pytest.mark.parametrize("text", ["may I ask", "requests per second", "this one", "march on", "a summary"])
def test_what_is_no_quantity_is_none(text: str) -> None:
    found = quantities(text.lower())
    assert (found.numbers, found.dates) == ((), ())


def test_the_rest_keeps_its_length_and_its_order() -> None:
    found = quantities("from 10 to 50 on monday")
    assert len(found.rest) == len("from 10 to 50 on monday")
    assert found.rest.split() == ["from", "to", "on"]
    assert found.numbers == ("10", "50")
    assert quantities("from 50 to 10").numbers == ("50", "10")
