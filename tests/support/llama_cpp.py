"""A llama.cpp server in a process of its own, from the package xllamacpp: the reference for GGUF files."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_SERVE = """
import sys
import xllamacpp as xlc
params = xlc.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 1024
params.n_parallel = 1
params.cpuparams.n_threads = 2
params.warmup = False
server = xlc.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaCpp:
    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenise a text as a user's, or as a template's with `special`: then control tokens are found in it."""
        return self.post("/tokenize", content=text, add_special=False, parse_special=special)["tokens"]

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        answer = self.post(
            "/completion", prompt=tokens, n_predict=count, temperature=0, return_tokens=True, cache_prompt=False
        )
        return answer["tokens"]

    def likeliest(self, tokens: list[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the likeliest next tokens; nothing if the first of them ends the text."""
        body = {"n_predict": 1, "temperature": 0, "n_probs": count, "cache_prompt": False}
        found = self.post("/completion", prompt=tokens, **body).get("completion_probabilities")
        return {each["id"]: each["logprob"] for each in found[0]["top_logprobs"]} if found else {}


@contextmanager
def llama_cpp(file: Path) -> Generator[LlamaCpp]:
    """Run a server of a GGUF file, or skip the test."""
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: no llama.cpp to compare with")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield LlamaCpp(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
