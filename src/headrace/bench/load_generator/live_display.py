"""Shows a running benchmark: a few redrawn lines in a terminal, occasional plain lines elsewhere.

It runs on the event loop that measures, so it draws rarely and only text. A terminal that goes away ends the display,
never the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live as Screen
from rich.text import Text

from headrace.bench.results.benchmark_result import RunSnapshot
from headrace.bench.results.formatting import clean, milliseconds, number

_BAR: Final = 40  # characters
_HISTORY: Final = 60  # snapshots in the sparkline
_SPARKS: Final = "▁▂▃▄▅▆▇█"


class PipeSafeConsole(Console):
    """Goes quiet on a broken pipe, where Rich would exit the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveDisplay:
    """A context manager; outside of it, `watch` shows nothing."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        every: float = 0.5,
        plain_every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every`, `plain_every`: seconds between updates, in a terminal and elsewhere."""
        self._console = console if console is not None else PipeSafeConsole(stderr=True, highlight=False)
        self._quiet = quiet
        self._clock = clock
        self._every = every if self._console.is_terminal else plain_every
        self._screen: Screen | None = None
        self._open = False
        self._last: float | None = None  # clock time of the last update
        self._stage: tuple[int, str] | None = None
        self._tokens: deque[float] = deque(maxlen=_HISTORY)

    def __enter__(self) -> Self:
        self._open = not self._quiet
        if self._open and self._console.is_terminal:
            # transient: the result's tables replace it
            self._screen = Screen(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._guard(self._screen.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen is not None:
            self._guard(self._screen.stop)
        self._open = False

    def watch(self, snapshot: RunSnapshot) -> None:
        """Show a snapshot, unless the last update was recent and no stage has begun."""
        if not self._open:
            return
        if snapshot.doing == "running":
            self._tokens.append(snapshot.tokens_per_s)
        now = self._clock()
        stage = (snapshot.stage, snapshot.doing)
        if stage == self._stage and self._last is not None and now - self._last < self._every - 1e-3:
            return
        self._last, self._stage = now, stage
        screen = self._screen
        if screen is not None:
            shown = view(snapshot, self._tokens, plain=not self._console.encoding.lower().startswith("utf"))
            self._guard(lambda: screen.update(shown, refresh=True))
        else:
            self._guard(lambda: self._console.print(Text(line(snapshot)), soft_wrap=True))

    def _guard(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # the terminal has gone
            self._open = False


def view(snapshot: RunSnapshot, tokens: deque[float], *, plain: bool = False) -> Text:
    """Format a snapshot as four lines for a terminal; `plain` avoids Unicode."""
    between = "  " if plain else " · "
    found = Text(no_wrap=True, overflow="ellipsis")
    found.append(between.join(part for part in (_where(snapshot), clean(snapshot.load, 60)) if part), style="bold")
    found.append(f"{between}{snapshot.doing}{between}{_passed(snapshot.seconds)}\n")
    part, said = _progress(snapshot)
    if part is not None:
        done = round(_BAR * part)
        found.append(("#" if plain else "█") * done, style="green")
        found.append(("-" if plain else "░") * (_BAR - done), style="dim")
        found.append(f" {100 * part:3.0f} %  ")
    found.append(f"{said}\n")
    found.append(between.join(_counts(snapshot)), style="red" if snapshot.failed else "")
    found.append("\n")
    found.append(between.join(_latencies(snapshot)))
    if len(tokens) > 1 and not plain:
        found.append(f"{between}{_sparks(tokens)}", style="cyan")
    return found


def line(snapshot: RunSnapshot) -> str:
    """Format a snapshot as one line."""
    where = ", ".join(part for part in (_where(snapshot), clean(snapshot.load, 60), snapshot.doing) if part)
    _, said = _progress(snapshot)
    parts = [said, ", ".join(_counts(snapshot)), ", ".join(_latencies(snapshot))]
    return f"{_passed(snapshot.seconds)} {where}: {'; '.join(part for part in parts if part)}"


def _passed(duration: float) -> str:
    """Format minutes and seconds."""
    return f"{int(duration) // 60}:{int(duration) % 60:02}"


def _where(snapshot: RunSnapshot) -> str:
    if snapshot.stages == 1:
        return ""
    of = "" if snapshot.stages is None else f" of {snapshot.stages}"
    return f"stage {snapshot.stage + 1}{of}"


def _progress(snapshot: RunSnapshot) -> tuple[float | None, str]:
    """Return the finished share of the stage, by its nearer limit, and the same in words."""
    parts: list[float] = []
    said: list[str] = []
    if snapshot.most_requests:
        parts.append(snapshot.stage_done / snapshot.most_requests)
        said.append(f"{snapshot.stage_done:,} of {snapshot.most_requests:,} requests")
    if snapshot.most_seconds:
        parts.append(snapshot.stage_seconds / snapshot.most_seconds)
        said.append(f"{_passed(snapshot.stage_seconds)} of {_passed(snapshot.most_seconds)}")
    return (min(1.0, max(parts)) if parts else None), ", ".join(said)


def _counts(snapshot: RunSnapshot) -> list[str]:
    found = [f"{snapshot.running:,} running", f"{snapshot.done:,} done"]
    if snapshot.failed:
        found.append(f"{snapshot.failed:,} failed")
    if snapshot.planned > snapshot.sent:
        found.append(f"{snapshot.planned - snapshot.sent:,} not sent yet")
    if snapshot.lag_ms >= 1.0:
        found.append(f"lag {milliseconds(snapshot.lag_ms)}")
    return found


def _latencies(snapshot: RunSnapshot) -> list[str]:
    found: list[str] = []
    for name, p50, p99 in (
        ("TTFT", snapshot.ttft_p50, snapshot.ttft_p99),
        ("ITL", snapshot.itl_p50, snapshot.itl_p99),
    ):
        if p50 is not None:
            found.append(f"{name} p50 {milliseconds(p50)} p99 {milliseconds(p99)}")
    return [*found, f"{number(snapshot.tokens_per_s)} tokens/s"]


def _sparks(values: deque[float]) -> str:
    most = max(values)
    if most <= 0.0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * value / most))] for value in values)
