"""The live view: what it shows, how often, and that it never gets in the way of a run."""

from __future__ import annotations

import io

from rich.console import Console

from headrace.bench.load_generator.live_display import LiveDisplay, PipeSafeConsole, line
from headrace.bench.results.benchmark_result import RunSnapshot
from tests.support.clock import Clock


def snapshot(seconds: float, **fields: object) -> RunSnapshot:
    return RunSnapshot(seconds=seconds, stages=1, stage_seconds=seconds, **fields)  # pyright: ignore[reportArgumentType]


def watched(live: LiveDisplay, clock: Clock, *, until: float, every: float = 0.5, **fields: object) -> None:
    passed = 0.0
    while passed < until:
        live.watch(snapshot(passed, **fields))
        passed += every
        clock.now += every


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    with LiveDisplay(console=Console(file=out, width=80), clock=clock, plain_every=5.0) as live:
        watched(
            live, clock, until=20.0, running=8, done=120, failed=2, tokens_per_s=512.0, ttft_p50=120.0, ttft_p99=1500.0
        )
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1] == ("0:05 running: 8 running, 120 done, 2 failed; TTFT p50 120 ms p99 1.50 s, 512 tokens/s")
    assert "\x1b" not in out.getvalue()


def test_a_new_stage_is_said_at_once() -> None:
    out, clock = io.StringIO(), Clock()
    with LiveDisplay(console=Console(file=out, width=80), clock=clock, plain_every=60.0) as live:
        live.watch(RunSnapshot(seconds=0.0, doing="warming up"))
        live.watch(RunSnapshot(seconds=1.0, stage=0, stages=2, load="1 at once"))
        live.watch(RunSnapshot(seconds=2.0, stage=0, stages=2, load="1 at once"))
        live.watch(RunSnapshot(seconds=3.0, stage=1, stages=2, load="8 at once"))
    said = out.getvalue().splitlines()
    assert len(said) == 3
    assert "warming up" in said[0]
    assert "stage 2 of 2, 8 at once" in said[2]


def test_quiet_shows_nothing() -> None:
    for terminal in (False, True):
        out, clock = io.StringIO(), Clock()
        with LiveDisplay(quiet=True, console=Console(file=out, force_terminal=terminal), clock=clock) as live:
            watched(live, clock, until=20.0)
        assert out.getvalue() == ""


def test_nothing_is_shown_outside_of_the_context() -> None:
    out, clock = io.StringIO(), Clock()
    live = LiveDisplay(console=Console(file=out), clock=clock)
    live.watch(snapshot(0.0))
    with live:
        pass
    live.watch(snapshot(1.0))
    assert out.getvalue() == ""


def test_a_terminal_shows_bar_counts_and_latencies_and_is_left_clean() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=120, height=20, color_system=None, legacy_windows=False)
    console.file = out
    with LiveDisplay(console=console, clock=clock, every=0.5) as live:
        watched(
            live, clock, until=3.0, running=4, done=10, most_seconds=30.0, itl_p50=20.0, itl_p99=35.0, tokens_per_s=80.0
        )
        shown = out.getvalue()
        assert "4 running" in shown
        assert "ITL p50 20.0 ms p99 35.0 ms" in shown
        assert "0:02 of 0:30" in shown
        assert "7 %" in shown
    after = out.getvalue()[len(shown) :]
    assert "\x1b[2K" in after  # the lines are erased
    assert "4 running" not in after.rsplit("\x1b[2K", 1)[1]


def test_drawings_are_no_closer_than_asked() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=120, height=20, color_system=None, legacy_windows=False)
    with LiveDisplay(console=console, clock=clock, every=1.0) as live:
        watched(live, clock, until=10.0, every=0.05, running=3)
    assert 10 <= out.getvalue().count("3 running") <= 12


def test_the_nearer_bound_is_the_progress() -> None:
    shown = line(snapshot(15.0, most_seconds=30.0, most_requests=100, stage_done=80))
    assert "80 of 100 requests, 0:15 of 0:30" in shown


def test_lag_and_requests_that_should_have_been_sent_are_shown() -> None:
    shown = line(snapshot(1.0, planned=12, sent=10, lag_ms=25.0))
    assert "2 not sent yet" in shown
    assert "lag 25.0 ms" in shown


def test_control_characters_of_a_load_are_not_written_to_the_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    with LiveDisplay(console=console) as live:
        live.watch(RunSnapshot(seconds=0.0, load="[red]\x1b]0;title\x07 8 at once"))
        assert "\x1b]0" not in out.getvalue()
        assert "[red]" in out.getvalue()  # no markup either


class Gone(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    for terminal in (False, True):
        clock = Clock()
        with LiveDisplay(console=PipeSafeConsole(file=Gone(), force_terminal=terminal), clock=clock) as live:
            watched(live, clock, until=10.0)
