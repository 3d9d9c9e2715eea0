"""A minimal HTTP server for OpenVINO GenAI's ContinuousBatchingPipeline.

    openvino_http.py MODEL PORT THREADS

One thread steps the pipeline; each connection has a thread that waits for its tokens and sends what each step produced.
It implements only what `headrace bench` uses.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import openvino as ov
import openvino_genai as genai
from transformers import AutoTokenizer

KV_GIB: Final = 1
STEP_TOKENS: Final = 2048
MAX_SEQUENCES: Final = 32
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


class Asked:
    def __init__(self, prompt: list[int], new: int, ignore_eos: bool) -> None:
        self.prompt = prompt
        self.new = new
        self.ignore_eos = ignore_eos
        self.tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()  # None: the end


class Steps(threading.Thread):
    """The thread that steps the pipeline."""

    def __init__(self, model: str, threads: int) -> None:
        super().__init__(daemon=True)
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = KV_GIB
        scheduling.enable_prefix_caching = True
        scheduling.max_num_seqs = MAX_SEQUENCES
        scheduling.max_num_batched_tokens = STEP_TOKENS
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._coming: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._running: list[tuple[Asked, Any]] = []
        self._numbers = itertools.count()

    def add(self, asked: Asked) -> None:
        self._coming.put(asked)

    def run(self) -> None:
        while True:
            if not self._running:
                self._begin(self._coming.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    self._begin(self._coming.get_nowait())
            self._pipeline.step()
            self._running = [each for each in self._running if not self._hand_out(*each)]

    def _begin(self, asked: Asked) -> None:
        import numpy as np

        config = genai.GenerationConfig()
        config.max_new_tokens = asked.new
        config.ignore_eos = asked.ignore_eos
        config.do_sample = False
        prompt = ov.Tensor(np.array([asked.prompt], dtype=np.int64))
        self._running.append((asked, self._pipeline.add_request(next(self._numbers), prompt, config)))

    def _hand_out(self, asked: Asked, handle: Any) -> bool:
        """Return whether it has finished."""
        while handle.can_read():
            for output in handle.read().values():
                asked.tokens.put(list(output.generated_ids))
        if handle.get_status() == genai.GenerationStatus.RUNNING:
            return False
        asked.tokens.put(None)
        return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    steps: Steps
    tokenizer: Any
    model: str

    def do_GET(self) -> None:
        if self.path == "/health":
            self._whole({"status": "ok"})
        elif self.path == "/v1/models":
            self._whole({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], chat_template=TEMPLATE, tokenize=True, return_dict=False
        )
        asked = Asked(prompt, body.get("max_tokens") or 128, bool(body.get("ignore_eos")))
        self.steps.add(asked)
        if body.get("stream"):
            self._stream(asked, (body.get("stream_options") or {}).get("include_usage", False))
        else:
            ids: list[int] = []
            while (some := asked.tokens.get()) is not None:
                ids += some
            message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            self._whole(self._event("chat.completion") | {"choices": [choice], "usage": self._usage(asked, len(ids))})

    def _stream(self, asked: Asked, usage: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids: list[int] = []
        sent = 0  # tokens whose text is out
        while (some := asked.tokens.get()) is not None:
            ids += some
            text = self.tokenizer.decode(ids[sent:], skip_special_tokens=True)
            if text and not text.endswith("\ufffd"):
                sent = len(ids)
                self._send({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        self._send({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if usage:
            self._send({"choices": [], "usage": self._usage(asked, len(ids))})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _usage(self, asked: Asked, output: int) -> dict[str, int]:
        prompt = len(asked.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _event(self, kind: str) -> dict[str, Any]:
        return {"id": "x", "object": kind, "created": int(time.time()), "model": self.model}

    def _send(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(self._event("chat.completion.chunk") | event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    model, port, threads = sys.argv[1:]
    Handler.steps = Steps(model, int(threads))
    Handler.tokenizer = AutoTokenizer.from_pretrained(model)
    Handler.model = Path(model).name
    Handler.steps.start()
    Server(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
