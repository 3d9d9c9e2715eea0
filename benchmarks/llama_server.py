"""llama.cpp's own server, from the package xllamacpp, in a process of its own.

Benchmarks and tests compare GGUF files with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_SERVE: Final = """
import sys, time
import xllamacpp as xlc
print(time.time(), time.process_time(), flush=True)
params = xlc.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = int(sys.argv[3])
params.n_parallel = 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xlc.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaServer:
    def __init__(self, url: str, process: int, imported: float, imports_cpu_s: float) -> None:
        """`imported` is the time at which Python had imported the package, and `imports_cpu_s` what that took: the
        library is part of a Python extension, so nothing loads it without Python."""
        self.port = int(url.rpartition(":")[2].strip("/"))
        self.process = process
        self.imported = imported
        self.imports_cpu_s = imports_cpu_s
        self._url = url

    def processor_s(self) -> float:
        """Return the user time of the process so far."""
        after_name = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return int(after_name[11]) / os.sysconf("SC_CLK_TCK")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenise a text as a user's, or as a template's with `special`: then control tokens are found in it."""
        return self.post("/tokenize", {"content": text, "add_special": False, "parse_special": special})["tokens"]

    def complete(self, tokens: list[int], count: int, **options: Any) -> dict[str, Any]:
        body = {"prompt": tokens, "n_predict": count, "temperature": 0, "return_tokens": True, **options}
        return self.post("/completion", body)

    def likeliest(self, tokens: list[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the likeliest next tokens; nothing if the first of them ends the text."""
        answer = self.complete(tokens, 1, n_probs=count, cache_prompt=False)
        found = answer.get("completion_probabilities")
        return {each["id"]: each["logprob"] for each in found[0]["top_logprobs"]} if found else {}

    def log_likelihood(self, tokens: list[int], following: int) -> float | None:
        """Return the log-likelihood of a token after others. A bias makes it the answer; its probability is without
        the bias. None for a part of a character, whose probability the server does not say."""
        answer = self.complete(tokens, 1, n_probs=1, logit_bias=[[following, 1000.0]], cache_prompt=True)
        if "completion_probabilities" not in answer:
            return None
        (found,) = answer["completion_probabilities"]
        assert found["id"] == following, found
        return float(found["logprob"])


@contextmanager
def llama_server(file: Path, threads: int, context: int = 1024) -> Iterator[LlamaServer]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file), str(threads), str(context)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        imported, cpu = process.stdout.readline().split() or ("0", "0")
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"llama.cpp does not open {file.name}: is xllamacpp new enough for this architecture?")
        yield LlamaServer(url, process.pid, float(imported), float(cpu))
    finally:
        process.kill()
        process.wait()
