"""The command `headrace`: which commands there are, and how an error becomes one line and an exit code.

A command's module is imported only when that command runs, so that `headrace --help` is quick. Knows nothing of what
the commands do.

Exit codes: 0 done; 1 the machine failed us (disk, memory, a bug); 2 the request or the model is wrong; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from headrace import __version__
from headrace.errors import HeadraceError

FAILED = 1
REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

COMMANDS = {
    "admin": "Look after tenants, keys, fast mode, caches and usage of a server that runs.",
    "bench": "Measure any OpenAI-compatible server, and compare measurements.",
    "chat": "Talk to a model in the terminal.",
    "config": "Check the server's configuration, show the one in force, or write one to begin with.",
    "drill": "Hold a playbook's drill on a server of its own, and see whether its promises hold.",
    "generate": "Continue a prompt with a model and stream the text.",
    "inspect": "Say what a model is, what it takes, and how fast this machine can be.",
    "make-model": "Make a model with random weights in the shape of a public one.",
    "serve": "Serve models to OpenAI and Anthropic clients.",
    "simulate": "Show what the scheduler does to traffic that no test machine could serve.",
}

app = App(
    name="headrace",
    help="Serve large language models with low latency.",
    version=__version__,
    version_flags=["--version"],
    help_flags=["--help", "-h"],
    suppress_keyboard_interrupt=False,
)
for _name, _help in COMMANDS.items():
    _function = _name.replace("-", "_")
    app.command(f"headrace.cli.{_function}:{_function}", name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; without `arguments`, the process's own."""
    try:
        app(
            sys.argv[1:] if arguments is None else list(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, HeadraceError) as error:
        return complain(error, REFUSED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; a second failure while Python flushes at exit would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MemoryError as error:
        return complain(f"not enough memory: {error}" if str(error) else "not enough memory", FAILED)
    except OSError as error:
        return complain(error, FAILED)
    return 0


def complain(error: object, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"headrace: {line}", file=sys.stderr)
    return code
