"""The stages of a request leave no gaps."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.traces.timeline import GenerationTimes, Timeline


def timeline(**entered: float) -> Timeline:
    """Stages by when they began; `identify` began at 0, `end` is the end."""
    made = Timeline(0.0)
    made.ended = entered.pop("end")
    made.entered += list(entered.items())
    return made


def spans(made: Timeline, times: GenerationTimes | None = None) -> list[tuple[str, float, float]]:
    return [(name, round(began, 9), round(ended, 9)) for name, began, ended in made.stages(times)]


def test_a_stage_ends_where_the_next_one_begins() -> None:
    made = timeline(read=0.1, shape=0.3, end=0.6)
    assert spans(made) == [("identify", 0.0, 0.1), ("read", 0.1, 0.3), ("shape", 0.3, 0.6)]


def test_a_generation_is_split_by_the_times_of_the_engine() -> None:
    made = timeline(generate=1.0, settle=3.0, end=3.0)
    times = GenerationTimes(first_at=2.0, last_at=2.75, queue_s=0.25, prefill_s=0.5)
    assert spans(made, times)[1:-1] == [
        ("hop", 1.0, 1.25),
        ("queue", 1.25, 1.5),
        ("prefill", 1.5, 2.0),
        ("decode", 2.0, 2.75),
        ("post", 2.75, 3.0),
    ]


def test_an_answer_that_was_held_was_decoded_before_its_first_output() -> None:
    made = timeline(generate=1.0, settle=4.0, end=4.0)
    times = GenerationTimes(first_at=3.5, last_at=3.75, queue_s=0.25, prefill_s=0.5, decode_s=1.75)
    assert spans(made, times)[1:-1] == [
        ("hop", 1.0, 1.25),
        ("queue", 1.25, 1.5),
        ("prefill", 1.5, 2.0),
        ("decode", 2.0, 3.75),
        ("post", 3.75, 4.0),
    ]


def test_an_answer_from_a_cache_is_replayed() -> None:
    made = timeline(generate=1.0, settle=2.0, end=2.0)
    assert ("replay", 1.0, 2.0) in spans(made, GenerationTimes(1.5, 1.75, 0.0, 0.0, "exact"))


def test_who_joins_a_generation_waits_for_its_first_output() -> None:
    made = timeline(generate=1.0, settle=2.0, end=2.0)
    times = GenerationTimes(1.5, 1.75, 0.0, 0.0, "shared")
    assert spans(made, times)[1:4] == [("wait", 1.0, 1.5), ("decode", 1.5, 1.75), ("post", 1.75, 2.0)]


def test_a_generation_without_output_is_a_wait() -> None:
    made = timeline(generate=1.0, settle=2.0, end=2.0)
    assert ("wait", 1.0, 2.0) in spans(made, GenerationTimes(0.0, 0.0, 0.0, 0.0))


seconds = st.floats(0.0, 100.0, allow_nan=False)


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds, st.sampled_from(["", "exact", "shared"]))
def test_stages_have_no_gaps_whatever_an_engine_reports(
    start: float, length: float, first: float, last: float, queue: float, prefill: float, decode: float, source: str
) -> None:
    made = timeline(generate=start, settle=start + length, end=start + length + 1.0)
    stages = made.stages(GenerationTimes(first, last, queue, prefill, source, decode))
    assert stages[0].began == 0.0
    assert stages[-1].ended == made.ended
    for one, next in itertools.pairwise(stages):
        assert abs(one.ended - next.began) < 1e-9
        assert one.ended >= one.began - 1e-9
    sums: dict[str, float] = {}
    for stage in stages:
        sums[stage.name] = sums.get(stage.name, 0.0) + stage.seconds
    assert made.seconds_by_stage(GenerationTimes(first, last, queue, prefill, source, decode)) == sums
    assert abs(sum(sums.values()) - made.ended) < 1e-6


def test_parts_are_bounded() -> None:
    made = Timeline(0.0)
    for _ in range(1000):
        made.part("generate", "attempt", 0.0, 1.0)
    assert len(made.parts) == 64
