"""Prints the error that ends a command, in the format of its log."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

_json_errors = False


def report_errors_as_json() -> None:
    """Print errors in the format of the JSON log, for a command whose output is one."""
    global _json_errors
    _json_errors = True


def report_error(error: object, code: int) -> int:
    """Print an error in one line and return the exit code."""
    line = " ".join(str(error).split())
    if _json_errors:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = json.dumps({"event": line, "logger": "headrace", "level": "error", "timestamp": now})
    else:
        line = f"headrace: {line}"
    print(line, file=sys.stderr)
    return code
