"""Says in a line what is wrong with a command's arguments, and where its help is."""

from __future__ import annotations

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError


def usage_text(error: CycloptsError) -> str:
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
