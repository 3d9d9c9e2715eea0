"""The chain of the audit log: what is done to it shows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.accounts.audit_log import (
    AuditEntry,
    AuditRow,
    ChainPosition,
    ChainVerifier,
    VerificationResult,
    audit_row_json,
    parse_audit_row,
    pruning_entry,
    seal,
)
from headrace.gateway.accounts.key_secrets import make_secret
from tests.support.accounts import entry

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def chain(*entries: AuditEntry, start: ChainPosition | None = None) -> list[AuditRow]:
    rows: list[AuditRow] = []
    mark = start or ChainPosition()
    for each in entries:
        rows.append(seal(mark, each))
        mark = ChainPosition(rows[-1].seq, rows[-1].hash)
    return rows


def head_of(rows: Sequence[AuditRow]) -> ChainPosition:
    return ChainPosition(rows[-1].seq, rows[-1].hash)


def verified(
    rows: Sequence[AuditRow],
    head: ChainPosition,
    *,
    anchor: ChainPosition | None = None,
    noted: ChainPosition | None = None,
) -> VerificationResult:
    checking = ChainVerifier(anchor or ChainPosition(), noted=noted)
    for row in rows:
        checking.add(row)
    return checking.end(head)


ROWS = chain(*(entry(f"what.{number}", after={"n": number}) for number in range(8)))


def test_a_chain_as_it_was_written_is_good() -> None:
    found = verified(ROWS, head_of(ROWS))
    assert (found.good, found.rows, found.head) == (True, 8, head_of(ROWS))
    assert verified([], ChainPosition()).good


@pytest.mark.parametrize("place", range(8))
def test_a_row_that_was_changed_shows(place: int) -> None:
    body = msgspec.json.decode(ROWS[place].body)
    changed = AuditRow(
        place + 1, msgspec.json.encode({**body, "who": "somebody"}, order="sorted").decode(), ROWS[place].hash
    )
    found = verified([*ROWS[:place], changed, *ROWS[place + 1 :]], head_of(ROWS))
    assert (found.good, found.broken_at) == (False, place + 1)


@pytest.mark.parametrize("place", range(8))
def test_a_row_that_was_removed_shows(place: int) -> None:
    found = verified([*ROWS[:place], *ROWS[place + 1 :]], head_of(ROWS))
    assert not found.good


def test_rows_that_were_exchanged_show() -> None:
    assert verified([ROWS[1], ROWS[0], *ROWS[2:]], head_of(ROWS)).broken_at == 2


def test_an_end_that_was_cut_off_shows_by_the_head_and_by_one_that_was_noted() -> None:
    assert not verified(ROWS[:5], head_of(ROWS)).good
    assert verified(ROWS[:5], head_of(ROWS[:5])).good  # who cuts it off moves the head, too
    found = verified(ROWS[:5], head_of(ROWS[:5]), noted=head_of(ROWS))
    assert not found.good
    assert "cut off" in found.why


def test_a_chain_that_was_made_anew_shows_by_a_head_that_was_noted() -> None:
    noted = head_of(ROWS[:4])
    anew = chain(*(entry(f"other.{number}") for number in range(8)))
    assert verified(anew, head_of(anew)).good
    assert not verified(anew, head_of(anew), noted=noted).good
    assert verified(ROWS, head_of(ROWS), noted=noted).good


def test_a_beginning_that_was_removed_is_good_only_where_the_chain_says_so() -> None:
    anchor = head_of(ROWS[:3])
    assert not verified(ROWS[3:], head_of(ROWS), anchor=anchor).good
    rest = [*ROWS[3:], *chain(pruning_entry(anchor, at=1, removed=3, why="too many"), start=head_of(ROWS))]
    assert verified(rest, head_of(rest), anchor=anchor).good
    assert verified(rest, head_of(rest), anchor=anchor, noted=anchor).good
    assert not verified(rest, head_of(rest), anchor=anchor, noted=head_of(ROWS[:2])).good
    assert not verified(rest[2:], head_of(rest), anchor=head_of(ROWS[:5])).good


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.text(max_size=30))
def test_a_row_comes_back_from_what_is_shown_of_it(after: dict[str, object], reason: str) -> None:
    rows = chain(entry(after=after, reason=reason), entry(before=after))
    shown = [msgspec.json.decode(msgspec.json.encode(audit_row_json(row))) for row in rows]
    assert [parse_audit_row(each) for each in shown] == rows
    assert verified([parse_audit_row(each) for each in shown], head_of(rows)).good


def test_no_secret_gets_onto_the_chain() -> None:
    secret = make_secret()
    fields = {"who": secret, "target": f"key:{secret}", "reason": f"because of {secret}!", "request": secret}
    (row,) = chain(entry(**fields, before={secret: [secret]}, after={"deep": {"deeper": f"\n{secret}"}}))
    assert secret not in row.body
    assert verified([row], head_of([row])).good


@pytest.mark.parametrize("text", ["", "1", "1:abc", ":" + "0" * 64, "-1:" + "0" * 64, "x:" + "0" * 64])
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        ChainPosition.read(text)
    assert ChainPosition.read(str(head_of(ROWS))) == head_of(ROWS)
