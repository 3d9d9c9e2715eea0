"""The `headrace` command: lists the subcommands and turns errors into one line and an exit code.

A subcommand's module is imported only when it runs, so that `headrace --help` is quick.

Exit codes: 0 success; 1 failure (disk, memory, network, a broken promise); 2 wrong usage or an invalid model; 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from headrace import __version__
from headrace.errors import HeadraceError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

COMMANDS = {
    "admin": "Manage tenants, keys, fast mode, caches and usage of a running server.",
    "bench": "Benchmark any OpenAI-compatible server and compare results.",
    "chat": "Chat with a model in the terminal.",
    "config": "Check the configuration, show the effective one, or write a starting point.",
    "drill": "Rehearse a failure on a temporary server and check what the playbook promises.",
    "generate": "Continue a prompt with a model and print the text as it comes.",
    "inspect": "Describe a model: its size, its memory, and the best speed this machine allows.",
    "make-model": "Create a model with random weights in the shape of a public one.",
    "serve": "Serve models to OpenAI and Anthropic clients.",
    "simulate": "Simulate the scheduler under traffic larger than this machine could serve.",
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
    """Run one command and return its exit code. `arguments` default to the process's own."""
    try:
        app(
            sys.argv[1:] if arguments is None else list(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, HeadraceError) as error:
        return _report_error(error, WRONG_USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Without this, Python's flush at exit would fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MemoryError as error:
        return _report_error(f"Not enough memory: {error}" if str(error) else "Not enough memory.", FAILED)
    except OSError as error:
        return _report_error(error, FAILED)
    return 0


def _report_error(error: object, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"headrace: {line}", file=sys.stderr)
    return code
