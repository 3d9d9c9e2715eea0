"""The clock that does not go back."""

from __future__ import annotations

from headrace.gateway.accounts.forward_clock import ForwardClock
from tests.support.clock import Clock


def test_time_stands_still_while_the_machines_clock_is_behind() -> None:
    machine = Clock(1000.0)
    clock = ForwardClock(machine)
    assert clock() == 1000.0
    machine.now = 400.0
    assert clock() == 1000.0
    machine.now = 999.0
    assert clock() == 1000.0
    machine.now = 1001.0
    assert clock() == 1001.0
