"""The command line as cyclopts reads it: every command, with its help and completion."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from headrace.cli.command_table import COMMANDS, module_of
from headrace.errors import HeadraceError
from headrace.version import __version__

app = App(
    name="headrace",
    help="Serve large language models with low latency.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)

for _name, _help in COMMANDS.items():
    app.command(f"{module_of(_name)}:{_name.replace('-', '_')}", name=_name, help=_help)


class UsageError(HeadraceError):
    """Arguments that no command takes."""


def run_app(arguments: Sequence[str]) -> None:
    """Run a command. UsageError if its arguments are wrong; else what it raises."""
    try:
        app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise UsageError(usage_text(error)) from None


def usage_text(error: CycloptsError) -> str:
    """Say in a line what is wrong with a command's arguments, and where its help is."""
    command = " ".join(("headrace", *(error.command_chain or ())))
    return f"{_problem(error, command)} Run `{command} --help`."


def _problem(error: CycloptsError, command: str) -> str:
    match error:
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"{command} takes no argument '{first}'."
        case MissingArgumentError(argument=argument) if argument is not None:
            if error.keyword is None and not argument.tokens:
                return f"{command} needs {argument.name}."
            return f"{error.keyword or argument.name} needs a value."
        case _:
            text = " ".join(str(error).split())
            return text if text.endswith((".", "?", "!")) else f"{text}."
