"""The thread that steps run on: order, results, errors, and who is told when."""

from __future__ import annotations

import threading

import pytest

from headrace.engine.executors.step_thread import StepCall, StepThread


def test_calls_run_one_after_the_other_on_a_thread_of_their_own() -> None:
    thread = StepThread("test")
    order: list[tuple[int, int]] = []
    calls = [thread.submit(lambda number=number: order.append((number, threading.get_ident()))) for number in range(50)]
    for call in calls:
        call.result()
    assert [number for number, _ in order] == list(range(50))
    assert {ident for _, ident in order} != {threading.get_ident()}
    assert len({ident for _, ident in order}) == 1
    thread.close()


def test_a_result_is_waited_for_and_may_be_asked_for_again() -> None:
    thread = StepThread("test")
    gate = threading.Event()

    def add(left: int, right: int) -> int:
        gate.wait(20.0)
        return left + right

    call = thread.submit(add, 2, 3)
    assert not call.done()
    gate.set()
    assert (call.result(), call.result(), call.done()) == (5, 5, True)
    thread.close()


def test_an_error_comes_out_where_the_result_is_asked_for_and_the_thread_goes_on() -> None:
    thread = StepThread("test")
    failed = thread.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert thread.submit(lambda: "next").result() == "next"
    thread.close()


def test_whoever_wants_to_know_is_told_once() -> None:
    thread = StepThread("test")
    gate = threading.Event()
    told: list[StepCall[bool]] = []
    call = thread.submit(gate.wait, 20.0)
    call.add_done_callback(told.append)
    assert told == []
    gate.set()
    thread.close()
    call.add_done_callback(told.append)
    assert told == [call, call]


def test_closing_waits_for_what_was_asked_for() -> None:
    thread = StepThread("test")
    done: list[int] = []
    for number in range(20):
        thread.submit(done.append, number)
    thread.close()
    assert done == list(range(20))
