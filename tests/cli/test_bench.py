"""`headrace bench` as it is typed: flags, files, exit codes, and a real server of the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.results.benchmark_result import read
from headrace.cli.bench import bench
from headrace.errors import RequestError
from tests.conformance.conftest import Server, end, start
from tests.support.programs.fake_openai_server import Fake, OpenAI

SMALL = ["--concurrency", "2", "--input-tokens", "40", "--output-tokens", "6"]
FEW = [*SMALL, "--requests", "6", "--warmup", "1"]


def type_it(*arguments: str) -> Any:
    return bench(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")


def test_a_table_is_printed_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "a.json", tmp_path / "a.html"
    with Fake(OpenAI()) as fake:
        type_it(fake.url, *FEW, "--json", str(path), "--html", str(page), "--goodput", "ttft:60000", "e2el:60000")
    out = capsys.readouterr().out
    assert "6 of 6 requests ended well" in out
    assert "goodput" in out
    for name in ("TTFT", "ITL", "TPOT", "E2EL"):
        assert name in out
    found = json.loads(path.read_text())
    assert (found["completed"], found["max_concurrency"], found["total_output_tokens"]) == (6, 2, 36)
    result = read(path)
    assert result.objectives == {"ttft": 60_000.0, "e2el": 60_000.0}
    assert result.arguments["requests"] == 6
    assert "<html" in page.read_text()


def test_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    with Fake(OpenAI()) as fake:
        for path in paths:
            type_it(fake.url, *SMALL, "--warmup", "1", "--requests", "20", "--json", path)
    capsys.readouterr()
    type_it("compare", paths[0], paths[0])
    assert "no difference" in capsys.readouterr().out
    type_it("compare", *paths, *paths, "--json")
    assert json.loads(capsys.readouterr().out)["rounds_a"] == 2
    with pytest.raises(RequestError, match="pairs"):
        type_it("compare", *paths, paths[0])


def test_requests_that_fail_are_an_exit_code(tmp_path: Path) -> None:
    with Fake(OpenAI(refuse_each=4)) as fake:
        arguments = [fake.url, *SMALL, "--requests", "11", "--warmup", "0"]  # and one to look at the template
        with pytest.raises(ConnectionError, match=r"of 11 requests failed: http 429"):
            type_it(*arguments)
        type_it(*arguments, "--most-errors", "5")
        type_it(*arguments, "--most-errors", "40%")
        with pytest.raises(ConnectionError, match="failed"):
            type_it(*arguments, "--most-errors", "2%")


def test_tokens_that_are_miscounted_are_an_exit_code() -> None:
    with Fake(OpenAI(lie=1.5)) as fake:
        with pytest.raises(ConnectionError, match="output tokens"):
            type_it(fake.url, *FEW)
        type_it(fake.url, *FEW, "--token-mismatch", "warn")


def test_a_key_is_taken_from_the_environment_and_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    path = tmp_path / "a.json"
    with Fake(OpenAI()) as fake:
        type_it(fake.url, *FEW, "--api-key-env", "MY_KEY", "--header", "X-Token=hidden", "--json", str(path), "--live")
        heard = fake.asked("/v1/chat/completions")
        assert {each.headers["authorization"] for each in heard} == {"Bearer sk-secret"}
        assert {each.headers["x-token"] for each in heard} == {"hidden"}
    assert "sk-secret" not in path.read_text()
    assert "hidden" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--ramp", "1..2"], "one of"),
        (["--ramp", "1-2"], "ramp"),
        (["--sweep", "x.."], "sweep"),
        (["--goodput", "ttft"], "MILLISECONDS"),
        (["--goodput", "itl:5"], "itl"),
        (["--body", "[]"], "JSON object"),
        (["--header", "x"], "NAME=VALUE"),
        (["--buckets", "a"], "buckets"),
        (["--most-errors", "200%"], "most-errors"),
        (["--arrivals", "constant", "--burstiness", "2"], "Burstiness"),
        (["--workload", "chat", "--input-tokens", "5"], "scale"),
        (["--api-key-env", "NOT_THERE"], "NOT_THERE"),
        (["--json", "no/such/folder/a.json"], "folder"),
        (["--tokenizer", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], said: str) -> None:
    with Fake(OpenAI()) as fake, pytest.raises(RequestError, match=said):
        type_it(fake.url, *arguments)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start(tmp_path_factory.mktemp("bench") / "served")
    yield found
    assert end(found) == 0


@pytest.mark.parametrize("tokenizer", [(), ("--tokenizer", "mini")])
def test_headrace_itself_is_measured(server: Server, tokenizer: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    flags = ["--requests", "8", "--concurrency", "2", "--input-tokens", "64", "--output-tokens", "12"]
    # Where mini would end, it goes on, and writes few tokens as the tokenizer would cut their text.
    more = ["--prefix-tokens", "48", "--surface", "chat", "--json", str(path), "--token-mismatch", "warn", *tokenizer]
    type_it(server.url, *flags, *more)
    result = read(path)
    assert [text for text in result.warnings if "in no text" not in text and "a difference of" not in text] == []
    assert {row.prompt_tokens for row in result.rows} == {112}
    assert {row.output_tokens for row in result.rows} == {12}
    assert result.figures.prefill is not None
    assert result.figures.prefill.count == 8
    assert result.token_check is not None
    assert result.token_check.difference < 0.25  # usage counts tokens, not chunks or characters
    assert result.figures.cached_tokens > 0  # the beginning that they share
