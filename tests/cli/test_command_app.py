"""The line that a command prints for wrong arguments: what is wrong, and where its help is."""

from __future__ import annotations

import pytest

from headrace.cli import WRONG_USAGE, main


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["advise", "x"], "headrace advise takes no argument 'x'. Run `headrace advise --help`."),
        (["admin", "usage", "a"], "headrace admin usage takes no argument 'a'. Run `headrace admin usage --help`."),
        (["trace"], "headrace trace needs ID. Run `headrace trace --help`."),
        (["serve", "--port"], "--port needs a value. Run `headrace serve --help`."),
        (["plan", "mini", "--users"], "--users needs a value. Run `headrace plan --help`."),
        (
            ["serve", "--port", "abc"],
            'Invalid value for --port: unable to convert "abc" into int. Run `headrace serve --help`.',
        ),
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port? Run `headrace serve --help`."),
    ],
)
def test_wrong_arguments(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == WRONG_USAGE
    assert capsys.readouterr().err == f"headrace: {line}\n"


def test_an_unknown_command_names_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frobnicate"]) == WRONG_USAGE
    line = capsys.readouterr().err
    assert line.startswith('headrace: Unknown command "frobnicate".')
    assert line.endswith("Run `headrace --help`.\n")


def test_a_list_needs_an_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rate"]) == WRONG_USAGE
    assert "--rate" in capsys.readouterr().err
