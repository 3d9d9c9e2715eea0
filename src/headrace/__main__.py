"""The command `headrace`, also as `python -m headrace`. Ctrl-C at any moment ends it with exit code 130, no traceback.

Imports next to nothing before it is ready for Ctrl-C.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal  # `signal` itself imports for milliseconds in which Ctrl-C would print a traceback

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def run() -> "NoReturn":
    # A program in the background may have been started with SIGINT ignored; leave that as it is.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _exit_at_once)
        # Registered first, so run last: from here on the exit code is decided, and the process ends in a moment.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1:] == ["--version"]:  # programs ask for it often, and the command line's own imports take 0.1 s
        from headrace.version import __version__

        print(__version__)
        sys.exit(0)
    if sys.argv[1:2] == ["serve"] and not {"--help", "-h"}.intersection(sys.argv):
        # The first worker imports the engine while this process imports the server.
        from headrace import slim_imports
        from headrace.engine.process import early_worker

        early_worker.launch_early()
        atexit.register(early_worker.discard)
        slim_imports.import_for_server()
    from headrace.cli import main

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
    except KeyboardInterrupt:  # the second one, while `main` dealt with the first
        code = _INTERRUPTED
    if interruptible:
        signal.signal(signal.SIGINT, _exit_at_once)
    if code == _INTERRUPTED:
        _exit_at_once()  # without waiting for a step that still runs
    sys.exit(code)


def _exit_at_once(*_: "Any") -> "NoReturn":
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - an import here could be interrupted
            stream.flush()
        except (OSError, ValueError, RuntimeError):  # closed, broken, or in use by the code that was interrupted
            pass
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    run()
