"""The `headrace` command: lists the subcommands and turns errors into one line and an exit code.

A subcommand's module is imported only when it runs, so that `headrace --help` is quick.

Exit codes: 0 success; 1 failure (disk, memory, network, a broken promise); 2 wrong usage or an invalid model; 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.command_table import COMMANDS as COMMANDS
from headrace.cli.error_report import report_error
from headrace.cli.serving.plain_arguments import read_plain
from headrace.errors import DownloadError, HeadraceError, InsufficientMemoryError

if TYPE_CHECKING:
    from headrace.cli.command_app import app as app

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def __getattr__(name: str) -> Any:
    # The command line's library is imported when it is needed: `headrace serve` with plain flags reads them itself.
    if name == "app":
        from headrace.cli.command_app import app

        return app
    raise AttributeError(f"module 'headrace.cli' has no attribute '{name}'")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` default to the process's own."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        serving = read_plain(given[1:]) if given[:1] == ["serve"] else None
        if serving is not None:
            from headrace.cli.serving.server_start import start_server

            start_server(**serving)
        else:
            from headrace.cli.command_app import run_app

            run_app(given)
    except (InsufficientMemoryError, DownloadError) as error:
        return report_error(error, FAILED)
    except HeadraceError as error:
        return report_error(error, WRONG_USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Without this, Python's flush at exit would fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MemoryError as error:
        return report_error(f"Not enough memory: {error}" if str(error) else "Not enough memory.", FAILED)
    except OSError as error:
        return report_error(error, FAILED)
    return 0
