"""Reads the examples of a documentation page, and runs them in order as a reader does, in an empty folder.

An example is a code block. Its language says how it runs; CONTRIBUTING.md ("Examples") describes that, and the
HTML comments `<!-- example: ... -->` that change it. A block for which neither says how it runs is an error.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from headrace.cli import main

WAIT_S = 300  # for a server or a block that ends on no machine
PORT = re.compile(r"(localhost|127\.0\.0\.1):8000\b")
GRPC_PORT = re.compile(r"(localhost:|grpc_port = )9500\b")
BLOCK = re.compile(
    r"^[ ]*<!--\ example:\s*(?P<note>.*?)\s*-->[ ]*\n"
    r"|^(?P<indent>[ ]*)```(?P<language>[^\n`]*)\n(?P<text>.*?)^[ ]*```[ ]*$",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
SHOWS_STATUS = re.compile(r"curl -si|http_code")  # such a block expects an error
SERVE = re.compile(r"^(?:\w+=\S+ )*headrace serve\b(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
STATE = "export -p > .environment"


class ExampleError(AssertionError):
    """An example that cannot be read or did not do what its page says."""


@dataclass(frozen=True)
class Example:
    """A block with the comment before it as its `note`, or a comment that hides a block."""

    line: int
    language: str
    text: str
    note: str = ""

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else ""


HIDDEN: Final = {"setup": "sh", "prints": "text"}


def read_examples(page: str) -> list[Example]:
    examples: list[Example] = []
    note = ""
    for found in BLOCK.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        if found["note"] is not None:
            if note:
                raise ExampleError(f"line {line}: the comment before this one, '{note}', has no block")
            hidden, _, lines = found["note"].partition("\n")
            if hidden in HIDDEN:
                examples.append(Example(line, HIDDEN[hidden], lines + "\n", hidden))
            else:
                note = " ".join(found["note"].split())
            continue
        text = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        example = Example(line, found["language"].strip(), text, note)
        check_note(example)
        examples.append(example)
        note = ""
    if note:
        raise ExampleError(f"the comment '{note}' has no block after it")
    return examples


NOTES: Mapping[str, tuple[str, ...]] = {  # what the comment before a block of a language may say
    "sh": (r"exit \d+",),
    "console": (),
    "python": ("continues",),
    "js": (),  # tests have no npm packages, so it needs a reason not to be run
    "toml": ("continues", r"file \S+"),
    "json": (r"(?:POST|PUT|PATCH) /\S+", r"file \S+", "output", "output, numbers vary"),
    "text": ("output", "output, numbers vary", r"file \S+"),
}


def check_note(example: Example) -> None:
    if example.note.startswith("not run:"):
        if len(example.reason.split()) < 2:
            raise ExampleError(f"line {example.line}: say why the block is not run")
        return
    expected = NOTES.get(example.language)
    if expected is None:
        raise ExampleError(f"line {example.line}: unknown language '{example.language}': expected {', '.join(NOTES)}")
    if example.language in ("json", "text", "js") and not example.note:
        raise ExampleError(f"line {example.line}: say in a comment what the block is: {', '.join(expected)} or not run")
    if example.note and not any(re.fullmatch(each, example.note) for each in expected):
        raise ExampleError(f"line {example.line}: unknown comment '{example.note}' for {example.language}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Reader:
    """Runs examples one after another in `folder`. Leave the context to stop the server that they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = ""  # of the last block that ran
        self._server: subprocess.Popen[bytes] | None = None
        self._configuration = self._program = ""
        programs = folder / ".programs"
        programs.mkdir()
        for name, target in (("headrace", "-m headrace"), ("python", ""), ("python3", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {target} "$@"\n')
            (programs / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OPENAI_"))}
        isa = {"HEADRACE_ISA": os.environ["HEADRACE_ISA"]} if "HEADRACE_ISA" in os.environ else {}
        self._environment = {
            **kept,
            **isa,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "HEADRACE_SERVER_PORT": str(self.port),
            "HEADRACE_STORAGE_FOLDER": str(folder / "storage"),
            "HEADRACE_ADMIN_URL": self.url,
        }
        (folder / ".environment").write_text("")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, example: Example) -> None:
        try:
            self._run(example)
        except ExampleError as error:
            log = self.folder / ".server.log"
            said = f"\nserver: {log.read_text()[-3000:]}" if self._server is not None else ""
            raise ExampleError(f"line {example.line}: {error}{said}") from None

    def _run(self, example: Example) -> None:
        text = self._here(example.text)
        kind, _, rest = example.note.partition(" ")
        if example.reason:
            check_syntax(example)
        elif kind == "file":
            (self.folder / rest).write_text(text)
        elif example.note.startswith(("output", "prints")):
            check_output(example, self.output)
        elif example.language == "sh":
            self.output = self._shell(text, int(rest) if kind == "exit" else 0)
        elif example.language == "console":
            self._console(text)
        elif example.language == "python":
            self._program = (self._program if kind == "continues" else "") + text
            (self.folder / ".program.py").write_text(self._program)
            self.output = self._bash("python .program.py")
        elif example.language == "toml":
            self._configuration = (self._configuration if kind == "continues" else "") + text
            (self.folder / "headrace.toml").write_text(self._configuration)
            self._check_configuration()
        else:
            json.loads(text)
            method, path = kind, rest
            self._bash(f"cat > .body.json <<'BODY'\n{text}BODY\n")
            header = "content-type: application/json"
            self.output = self._bash(f"curl -sS -X {method} {self.url}{path} -H '{header}' -d @.body.json")

    def _check_configuration(self) -> None:
        """Do as `headrace config check headrace.toml` would in the reader's shell, with the imports of this process."""
        variables = re.findall(r'^\w*_env = (?:\{ [\w-]+ = )?"(\w+)"', self._configuration, re.MULTILINE)
        unset = "".join(f"export {name}=${{{name}:-value-of-{name.lower()}}}\n" for name in variables)
        environment = dict(each.split("=", 1) for each in self._bash(f"({unset}env -0)").split("\0")[:-1])
        output = io.StringIO()
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = main(["config", "check", "headrace.toml"])
        if code != 0:
            raise ExampleError(f"exit code {code}, not 0:\nheadrace config check headrace.toml\n{output.getvalue()}")

    def stop(self) -> None:
        """Stop the server as Ctrl-C does."""
        if (server := self._server) is None:
            return
        self._server = None
        server.send_signal(signal.SIGINT)
        try:
            code = server.wait(WAIT_S)
        finally:
            server.kill()
        if code != 0:
            raise ExampleError(f"the server ended with {code}: {(self.folder / '.server.log').read_text()[-3000:]}")

    def _here(self, text: str) -> str:
        """The text with free ports, and with folders of the reader's machine in the page's own folder."""
        text = PORT.sub(rf"127.0.0.1:{self.port}", text)
        text = re.sub(r"--port \d+", f"--port {self.port}", text)
        text = GRPC_PORT.sub(rf"\g<1>{self.grpc_port}", text)
        return re.sub(r"(?<![\w./])/(srv|tmp)/", rf"{self.folder}/\1/", text)

    def _shell(self, script: str, code: int) -> str:
        if code:
            return self._bash(script, code)
        output, place = "", 0
        for serve in SERVE.finditer(script):
            output += self._bash(script[place : serve.start()])
            self._serve(serve[0])
            place = serve.end()
        return output + self._bash(script[place:])

    def _bash(self, script: str, code: int = 0) -> str:
        """Run in the reader's shell: variables and the folder carry over to the next block."""
        if not script.strip():
            return ""
        script_and_state = f"set -aeuo pipefail\n. ./.environment\n{script}\n{STATE}"
        command = ["bash", "-c", script_and_state]
        try:
            run = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ExampleError(f"does not end within {WAIT_S} s:\n{script}") from None
        if run.returncode != code:
            raise ExampleError(f"exit code {run.returncode}, not {code}:\n{script}\n{run.stdout}\n{run.stderr}")
        errors = [value for value in json_values(run.stdout) if is_error(value)]
        if errors and not SHOWS_STATUS.search(script):
            raise ExampleError(f"the server rejects it:\n{script}\n{errors}")
        return run.stdout + (run.stderr if code else "")

    def _serve(self, command: str) -> None:
        self.stop()
        with (self.folder / ".server.log").open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f". ./.environment\nexec env {command}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + WAIT_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health/ready", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._server.poll() is not None or time.monotonic() > end:
                    raise ExampleError(f"the server does not start: {command}") from None
                time.sleep(0.05)

    def _console(self, text: str) -> None:
        """Lines after `$ ` are commands, and those after them what they print."""
        for command, expected in re.findall(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", text, re.MULTILINE):
            self.output = self._shell(command + "\n", 0)
            check_lines(expected, self.output)


def json_values(text: str) -> Iterator[Any]:
    """JSON objects that stand in the text one after another."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            return
        yield value


def is_error(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.get("error"))


def check_syntax(example: Example) -> None:
    """A block that is not run is at least written in its language."""
    try:
        if example.language == "json":
            json.loads(example.text)
        elif example.language == "python":
            ast.parse(example.text)
        elif example.language == "toml":
            tomllib.loads(example.text)
        elif example.language in ("sh", "console"):
            script = "".join(re.findall(r"^(?:\$ |> |)(.*\n)", example.text, re.MULTILINE))
            subprocess.run(["bash", "-nc", script], check=True, capture_output=True, text=True)
    except (ValueError, SyntaxError, subprocess.CalledProcessError) as error:
        raise ExampleError(f"is not {example.language}: {getattr(error, 'stderr', '') or error}") from None


def check_output(example: Example, output: str) -> None:
    numbers_vary = example.note.endswith("numbers vary")
    if example.language == "json":
        values = list(json_values(output))
        if not values or not has_shape(json.loads(example.text), values[-1], numbers_vary=numbers_vary):
            raise ExampleError(f"expected:\n{example.text}\nfound:\n{output}")
    else:
        check_lines(example.text, output, numbers_vary=numbers_vary)


def check_lines(expected: str, output: str, *, numbers_vary: bool = False) -> None:
    """Each expected line is in the output, after the one before it, however the output breaks lines."""
    rest = " ".join(output.split())
    for line in filter(None, (" ".join(line.split()) for line in expected.splitlines())):
        found = re.search(as_pattern(line, numbers_vary=numbers_vary), rest)
        if found is None:
            raise ExampleError(f"expected this line:\n{line}\nfound:\n{output}")
        rest = rest[found.end() :]


def as_pattern(text: str, *, numbers_vary: bool) -> str:
    """`...` stands for anything, and with `numbers_vary` a number for any number."""
    pattern = re.escape(text).replace(re.escape("..."), ".*?")
    return re.sub(r"\d+(?:\\\.\d+)?", r"\\d+(?:\\.\\d+)?", pattern) if numbers_vary else pattern


def has_shape(expected: Any, found: Any, *, numbers_vary: bool = False) -> bool:
    """The found value has what the expected one has. Objects may have more fields."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            name in found and has_shape(value, found[name], numbers_vary=numbers_vary)
            for name, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(expected) == len(found)
            and all(has_shape(*pair, numbers_vary=numbers_vary) for pair in zip(expected, found, strict=True))
        )
    if isinstance(expected, str):
        pattern = as_pattern(expected, numbers_vary=numbers_vary)
        return isinstance(found, str) and re.fullmatch(pattern, found, re.DOTALL) is not None
    return type(expected) is type(found) and (numbers_vary or expected == found)
