"""`headrace models`: list the models on this machine with their size and precision, and whether they fit its memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.engine.executors.cpu_executor import memory_of
from headrace.engine.executors.memory import gib, usable_memory
from headrace.errors import HeadraceError
from headrace.models.formats.shard_names import existing_files
from headrace.models.model_folder import BUNDLED, BUNDLED_NAMES, open_model
from headrace.models.sources.downloaded_models import downloaded_models
from headrace.variant import Variant


class LocalModel(msgspec.Struct, frozen=True):
    name: str  # what `headrace serve` takes
    path: str
    bytes: int  # on disk
    precision: str | None = None  # of the weights in memory, with default options
    memory: int | None = None  # bytes of weights and KV cache, with default options
    fits: bool | None = None  # into the memory that is available now
    problem: str | None = None  # why it cannot be served


def models(*, json: bool = False) -> None:
    """List the models on this machine: bundled and downloaded ones, their size and precision, and whether they fit.

    Precision and memory are those of headrace serve without options. A model in a folder of your own is not listed.

    Parameters
    ----------
    json
        Print one JSON list instead of the table.
    """
    available = usable_memory()
    found = [describe(name, path, available) for name, path in _places()]
    if json:
        print(msgspec.json.encode(found).decode())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "size", "precision", "memory", "fits"):
        table.add_column(heading, justify="right" if heading in ("size", "memory") else "left", overflow="fold")
    for each in found:
        fits = each.problem or ("yes" if each.fits else "no")
        table.add_row(each.name, _size(each.bytes), each.precision or "", _size(each.memory), fits)
    console = Console(soft_wrap=True)
    console.print(table, highlight=False)
    if available:
        console.print(f"\n{gib(available)} of memory available", highlight=False)


def describe(name: str, path: Path, available: int) -> LocalModel:
    size = _bytes_of(path)
    try:
        need = memory_of(open_model(path), Variant(model=str(path)))
    except (HeadraceError, OSError) as error:
        return LocalModel(name, str(path), size, problem=" ".join(str(error).split()))
    return LocalModel(name, str(path), size, need.precision, need.total, not available or need.total <= available)


def _places() -> list[tuple[str, Path]]:
    return [*((name, BUNDLED / name) for name in BUNDLED_NAMES), *downloaded_models()]


def _bytes_of(path: Path) -> int:
    files = existing_files(path) if path.is_file() else (each for each in path.rglob("*") if each.is_file())
    return sum(each.stat().st_size for each in files)


def _size(size: int | None) -> str:
    return "" if size is None else gib(size)
