"""A gateway that is killed at any point loses no charge and doubles none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from headrace.gateway.ledger.prices import PriceBook
from tests.gateway.ledger.killed_ledgers import CACHED, PRICE, PROMPT, accounts, planned
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import Opened, ledger_in

ROUNDS = 20
ROOT = Path(__file__).parents[3]


def worth(tokens: int) -> int:
    """Of an exchange that was killed when it had so many."""
    return PRICE.micros(PROMPT, 0, tokens) if tokens else 0


def possible(id: str, last: list[str]) -> set[int | None]:
    """What an exchange may be charged, given the last thing it acknowledged: that, or what it did next."""
    settled = PRICE.micros(PROMPT, CACHED, planned(id))
    match last:
        case ["S", _, micros]:
            assert int(micros) == settled
            return {settled}
        case ["R", _]:
            return {0, worth(1) if planned(id) else settled}
        case ["P", _, tokens]:
            done = int(tokens) == planned(id)
            return {worth(int(tokens)), settled if done else worth(int(tokens) + 1)}
        case _:
            raise AssertionError(last)


def check_sums(opened: Opened, charges: dict[str, int]) -> None:
    total = sum(charges.values())
    assert opened.rows("SELECT SUM(micros), SUM(requests) FROM ledger_days WHERE source = ''") == [
        (total, len(charges))
    ]
    spent = Counter[tuple[str, bool]]()
    for endpoint, period, micros in opened.rows("SELECT endpoint, period, spent FROM ledger_periods"):
        spent[endpoint, len(period) == 7] += micros
    assert dict(spent) == {(endpoint, month): total for endpoint in ("", "/e") for month in (True, False)}


def test_a_gateway_killed_at_any_point_charges_what_it_acknowledged_once(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_ledgers.py")
    command = [sys.executable, str(script), str(tmp_path), str(ROUNDS), "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    last: dict[str, list[str]] = {}
    for line in json.loads(run.stdout):
        what, id, *_ = words = line.split(" ")
        if what != "O":
            last[id] = words
    said = Counter(words[0] for words in last.values())
    assert said["S"] > 20, said  # or it was killed before it could do anything

    async def test() -> None:
        for _ in range(2):
            async with ledger_in(tmp_path, accounts(), prices=PriceBook({"mini": PRICE})) as opened:
                charges = await opened.charges()
                check_sums(opened, charges)
                wrong = {
                    id: charges.get(id) for id, words in last.items() if charges.get(id) not in possible(id, words)
                }
                assert wrong == {}, {id: last[id] for id in wrong}
                # What was not even acknowledged as reserved came to nothing.
                assert {charges[id] for id in charges.keys() - last.keys()} <= {0}

    asynchronous(test)
