"""What the benchmarks' command lines and results files have in common.

Owns the reading of lists and of the shorter command lines, which Headrace was measured and when, the writing of a
results file, which is whole whenever a run is ended, and the end by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
_ended: list[int] = []  # signals that came


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For argparse: names with commas between, each of them known."""
    names = list(known)

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        unknown = [word for word in found if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
        return found

    return parse


def options(what: str, kinds: Iterable[str], *, repeat: str, out: Path) -> argparse.Namespace:
    """The command line of a run of several kinds of measurements. `repeat`: what that flag means."""
    known = list(kinds)
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--kinds", type=listed(known), default=known, help=f"of {','.join(known)}")
    parser.add_argument("--repeat", type=int, default=3, help=repeat)
    parser.add_argument("--out", type=Path, default=out, help="results file")
    return parser.parse_args()


def commit() -> str:
    """Which Headrace this is; a tree with changes says so."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return found.stdout.strip() or "unknown"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def rounds_of(results: dict[str, Any]) -> str:
    if results["quick"]:
        return "one short round, so no result"
    return "one round" if results["repeat"] == 1 else f"{results['repeat']} rounds"


def save(results: dict[str, Any], out: Path) -> None:
    """Writes it whole, and leaves where SIGTERM came: its exception is lost where it comes while a destructor runs."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)
    if _ended:
        sys.exit(128 + _ended[0])


def end(number: int, frame: object) -> None:
    """For SIGTERM: leaves by an exception, so that what was started ends with the run."""
    _ended.append(number)
    sys.exit(128 + number)
