"""Progress bars on a terminal while the weights of models are packed. Imports rich, which a service never shows."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class LoadingBars:
    """A bar for each model while its weights are packed: minutes for a large model, and only once."""

    def __init__(self, console: Console, *, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("packing {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not shown,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingBars:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def show(self, model: str, done: int, total: int) -> None:
        if not self._bars:
            self._progress.start()
        if model not in self._bars:
            self._bars[model] = self._progress.add_task(model, total=total)
        self._progress.update(self._bars[model], completed=done)

    def stop(self) -> None:
        if self._bars:
            self._progress.stop()
