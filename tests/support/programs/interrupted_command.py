"""Runs `headrace` with a SIGINT at a chosen moment: `python -m tests.support.programs.interrupted_command MOMENT …`.

MOMENT is `import:MODULE` (as the module is about to be imported), `exit` (as the interpreter ends), or
`call:MODULE:NAME` (as a function of a module is called for the first time).
"""

from __future__ import annotations

import atexit
import importlib
import runpy
import signal
import sys
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any


class AtImport:
    """A finder that finds nothing, and presses Ctrl-C when a module is looked for."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == self.module:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)
        return None


def main() -> None:
    moment, *arguments = sys.argv[1:]
    kind, _, where = moment.partition(":")
    if kind == "import":
        sys.meta_path.insert(0, AtImport(where))  # type: ignore[arg-type]
    elif kind == "exit":
        atexit.register(signal.raise_signal, signal.SIGINT)
    else:
        module, _, name = where.partition(":")
        code: Any = importlib.import_module(module)
        for part in name.split("."):
            code = getattr(code, part)
        code = code.__code__

        def at_call(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code is code:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(at_call)
    sys.argv = ["headrace", *arguments]
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
