"""Shared by the benchmark programs: command lines, results files, versions and shutdown on SIGTERM."""

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
_signals: list[int] = []  # received signals


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: a comma-separated list of known names."""
    names = list(known)

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        unknown = [word for word in found if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; expected {', '.join(names)}")
        return found

    return parse


def options(what: str, kinds: Iterable[str], *, repeat: str, out: Path) -> argparse.Namespace:
    """Parse the command line of a run with several kinds of measurements. `repeat`: help text of that flag."""
    known = list(kinds)
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--kinds", type=listed(known), default=known, help=f"of {','.join(known)}")
    parser.add_argument("--repeat", type=int, default=3, help=repeat)
    parser.add_argument("--out", type=Path, default=out, help="results file")
    return parser.parse_args()


def commit() -> str:
    """Return the commit, marked if the tree has changes."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return found.stdout.strip() or "unknown"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def rounds_of(results: dict[str, Any]) -> str:
    if results["quick"]:
        return "one shortened round, not a result"
    return "one round" if results["repeat"] == 1 else f"{results['repeat']} rounds"


def save(results: dict[str, Any], out: Path) -> None:
    """Write the file atomically. Exit if SIGTERM came: its exception is lost if it comes during a destructor."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)
    if _signals:
        sys.exit(128 + _signals[0])


def end(number: int, frame: object) -> None:
    """Handle SIGTERM by an exception, so that child processes end with the run."""
    _signals.append(number)
    sys.exit(128 + number)
