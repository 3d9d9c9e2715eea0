"""How much is drafted: what pays, by the acceptance so far and by what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.engine.grammar.constraints import Grammar
from headrace.engine.interface.request import GenerationRequest, SequenceState, open_sequence
from headrace.engine.speculation.drafters import DraftRequests
from headrace.engine.speculation.speculator import DraftLength, Speculator


def sequences(count: int, **wishes: object) -> list[SequenceState]:
    return [
        open_sequence(GenerationRequest(id=str(number), prompt=(1,), **wishes))  # type: ignore[arg-type]
        for number in range(count)
    ]


def observed(lengths: DraftLength, running: Sequence[SequenceState], drafted: int, held: int, times: int = 60) -> None:
    for _ in range(times):
        for sequence in running:
            lengths.observe(sequence, drafted, held)


def line(fixed: float, per_row: float) -> Callable[[int], float]:
    return lambda rows: fixed + per_row * rows


def choose(
    lengths: DraftLength,
    running: Sequence[SequenceState],
    seconds: Callable[[int], float],
    *,
    most: int = 8,
    room: int = 100,
) -> list[int]:
    wanted = [(sequence, most) for sequence in running]
    return lengths.choose(wanted, rows=len(running), room=room, step_seconds=seconds)


def test_acceptance_follows_what_became_of_the_drafts() -> None:
    lengths = DraftLength(prior=0.6)
    (good, bad, new) = sequences(3)
    assert lengths.acceptance(new) == pytest.approx(0.6)
    observed(lengths, [good], 4, 4)
    observed(lengths, [bad], 4, 0)
    assert lengths.acceptance(good) > 0.9
    assert lengths.acceptance(bad) < 0.15
    assert lengths.acceptance(bad) < lengths.acceptance(new) < lengths.acceptance(good)


def test_drafts_after_the_first_that_failed_say_nothing() -> None:
    lengths = DraftLength(prior=0.5)
    (one,) = sequences(1)
    observed(lengths, [one], 8, 1)
    assert lengths.acceptance(one) == pytest.approx(0.5, abs=0.02)


def test_free_rows_are_all_used_by_drafts_that_hold() -> None:
    lengths = DraftLength(most=6)
    running = sequences(2)
    observed(lengths, running, 6, 6)
    assert choose(lengths, running, line(1.0, 0.0)) == [6, 6]


def test_nothing_is_drafted_where_it_would_lose() -> None:
    lengths = DraftLength()
    running = sequences(2)
    observed(lengths, running, 4, 2)
    # A step without a fixed part: a row more costs what a token does, and is worth less.
    assert choose(lengths, running, line(0.0, 1.0)) == [0, 0]


def test_nothing_is_drafted_where_the_batch_is_full() -> None:
    lengths = DraftLength()
    running = sequences(2)
    observed(lengths, running, 6, 6)
    assert choose(lengths, running, line(1.0, 0.0), room=0) == [0, 0]
    assert sum(choose(lengths, running, line(1.0, 0.0), room=5)) == 5


def test_rows_go_to_the_sequences_whose_drafts_hold() -> None:
    lengths = DraftLength(most=8)
    good, bad = sequences(2)
    observed(lengths, [good], 8, 8)
    observed(lengths, [bad], 8, 0)
    found = choose(lengths, [good, bad], line(1.0, 0.0), room=6)
    assert found[0] == 6
    assert found[1] == 0


def test_the_length_is_that_of_most_tokens_per_second() -> None:
    lengths = DraftLength(most=8)
    (one,) = sequences(1)
    observed(lengths, [one], 1, 1, times=2)
    acceptance = lengths.acceptance(one)

    def rate(length: int) -> float:
        return sum(acceptance**power for power in range(length + 1)) / (5.0 + 1 + length)

    best = max(range(9), key=rate)
    assert 0 < best < 8
    assert choose(lengths, [one], line(5.0, 1.0)) == [best]


def test_a_stair_is_climbed_where_it_pays() -> None:
    lengths = DraftLength(most=8)
    (one,) = sequences(1)
    observed(lengths, [one], 8, 8)
    # The second row costs half a step, and those up to the eighth nothing more.
    assert choose(lengths, [one], lambda rows: 1.0 if rows <= 1 else 1.5 if rows <= 8 else 4.0) == [7]


def test_passes_of_a_draft_model_are_paid_for() -> None:
    lengths = DraftLength(most=8)
    running = sequences(2)
    observed(lengths, running, 8, 6)
    wanted = [(sequence, 8) for sequence in running]

    def found(seconds: Callable[[int], float]) -> list[int]:
        return lengths.choose(wanted, rows=2, room=99, step_seconds=line(1.0, 0.0), draft_seconds=seconds)

    assert found(lambda count: 0.0) == [8, 8]
    assert 0 < sum(found(lambda count: 0.15)) < 16
    assert found(lambda count: 2.0) == [0, 0]


def test_no_more_is_chosen_than_there_is() -> None:
    lengths = DraftLength()
    running = sequences(3)
    observed(lengths, running, 8, 8)
    wanted = list(zip(running, [0, 2, 5], strict=True))
    assert lengths.choose(wanted, rows=3, room=99, step_seconds=line(1.0, 0.0)) == [0, 2, 5]
    assert lengths.choose([], rows=0, room=99, step_seconds=line(0.0, 0.0)) == []


def test_what_lost_is_tried_again_one_day() -> None:
    lengths = DraftLength()
    (one,) = sequences(1)
    observed(lengths, [one], 4, 0)
    seconds = line(2.0, 1.0)
    assert choose(lengths, [one], seconds) == [0]
    waited = 0
    while choose(lengths, [one], seconds) == [0]:
        waited += 1
        assert waited < 20_000
    assert waited > 20


class Counting:
    """Proposes tokens that count up, and notes what it was asked for."""

    def __init__(self, *, free: bool) -> None:
        self.free = free
        self.asked: list[list[int]] = []
        self.forgotten: list[SequenceState] = []

    def start_seconds(self, sequence: SequenceState) -> float:
        return 0.0

    def pass_seconds(self, sequences: int) -> float:
        return 0.0 if self.free else 0.01

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        self.asked.append([most for _, most in wanted])
        return [list(range(10, 10 + most)) for _, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return self.propose_all([(sequence, most)])[0]

    def forget(self, sequence: SequenceState) -> None:
        self.forgotten.append(sequence)


@pytest.mark.parametrize("free", [True, False])
def test_the_speculator_sets_the_drafts_of_every_sequence(free: bool) -> None:
    drafter = Counting(free=free)
    speculator = Speculator(drafter, DraftLength(most=4, prior=0.95))
    running = sequences(2)
    speculator.draft(running, rows=2, room=99, step_seconds=line(1.0, 0.0))
    assert [sequence.drafted for sequence in running] == [[10, 11, 12, 13]] * 2
    speculator.draft(running, rows=2, room=3, step_seconds=line(1.0, 0.0))
    assert sum(len(sequence.drafted) for sequence in running) == 3
    assert sum(drafter.asked[1]) == (8 if free else 3)
    speculator.observe(running[0], 2, 1)
    speculator.forget(running[0])
    assert (speculator.drafted, speculator.held) == (2, 1)
    assert drafter.forgotten == [running[0]]


def test_no_draft_reaches_past_what_is_wanted() -> None:
    speculator = Speculator(Counting(free=True), DraftLength(prior=0.95))
    (short,) = sequences(1, max_tokens=3)
    (unwilling,) = sequences(1, speculate=False)
    (last,) = sequences(1, max_tokens=1)
    speculator.draft([short, unwilling, last], rows=3, room=99, step_seconds=line(1.0, 0.0))
    assert [len(sequence.drafted) for sequence in (short, unwilling, last)] == [2, 0, 0]


@pytest.mark.parametrize("free", [True, False])
def test_drafts_that_a_grammar_cannot_follow_are_cut(free: bool) -> None:
    speculator = Speculator(Counting(free=free), DraftLength(most=6, prior=0.95))
    (bound,) = sequences(1, grammar=Grammar("json_object"))
    (unbound,) = sequences(1)
    speculator.draft([bound, unbound], rows=2, room=99, step_seconds=line(1.0, 0.0), fits=lambda _, drafts: 2)
    assert [len(sequence.drafted) for sequence in (bound, unbound)] == [2, 6]


class StartingDrafter:
    """A drafter that must compute a sequence first, which takes `seconds`."""

    free = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[int] = []

    def pass_seconds(self, sequences: int) -> float:
        return 0.0

    def start_seconds(self, sequence: SequenceState) -> float:
        return self.seconds

    def propose_all(self, wanted: DraftRequests) -> list[list[int]]:
        self.asked = [most for _, most in wanted]
        return [[1] * most for _, most in wanted]

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return self.propose_all([(sequence, most)])[0]

    def forget(self, sequence: SequenceState) -> None: ...


def drafted(speculator: Speculator, sequence: SequenceState) -> int:
    speculator.draft([sequence], rows=1, room=8, step_seconds=lambda rows: 0.01)
    return len(sequence.drafted)


def test_a_drafter_is_started_where_the_expected_answer_is_long_enough_to_pay_for_it() -> None:
    # A step takes 10 ms and drafts save up to half of it: an answer of 128 tokens is worth about 0.5 s.
    assert drafted(Speculator(StartingDrafter(0.2)), *sequences(1)) > 0
    assert drafted(Speculator(StartingDrafter(2.0)), *sequences(1)) == 0
    assert drafted(Speculator(StartingDrafter(0.0)), *sequences(1)) > 0
    # A request that may have 8 tokens at most is not worth 0.2 s.
    assert drafted(Speculator(StartingDrafter(0.2)), *sequences(1, max_tokens=8)) == 0


def test_the_expected_answer_follows_those_of_the_same_surface() -> None:
    speculator = Speculator(StartingDrafter(0.2))
    for _ in range(40):
        (short,) = sequences(1, surface="voice")
        short.tokens += [1] * 6
        (long,) = sequences(1, surface="agent")
        long.tokens += [1] * 200
        speculator.forget(short)
        speculator.forget(long)
    (voice,), (agent,) = sequences(1, surface="voice"), sequences(1, surface="agent", max_tokens=4096)
    assert speculator.expected_tokens(voice) == pytest.approx(6.0, rel=0.1)
    assert speculator.expected_tokens(agent) == pytest.approx(200.0, rel=0.1)
    assert drafted(speculator, voice) == 0
    assert drafted(speculator, agent) > 0
    agent.tokens += [1] * 400  # longer than any: it is expected to go on for a while
    assert 40.0 < speculator.expected_tokens(agent) < 60.0
