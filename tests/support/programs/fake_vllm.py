"""A program that speaks as much of vLLM's API as a managed engine needs: /health, /metrics and streamed chats.

It writes its arguments and what it was told by its environment to the file that FAKE_VLLM names. Its metrics are those
in the file FAKE_VLLM.metrics, if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NOTES = Path(os.environ["FAKE_VLLM"])
WORDS = ("one ", "two ", "three")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        metrics = NOTES.with_suffix(".metrics")
        text = metrics.read_text() if self.path == "/metrics" and metrics.exists() else ""
        self._reply(200, text.encode(), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        NOTES.with_suffix(".asked").write_text(json.dumps(body))
        if self.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self._reply(401, b"{}", "application/json")
            return
        chunks = [{"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in WORDS]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}})
        events = [f"data: {json.dumps({'id': 'a', 'model': 'm', **chunk})}\n\n" for chunk in chunks]
        self._reply(200, ("".join(events) + "data: [DONE]\n\n").encode(), "text/event-stream")

    def _reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    given = sys.argv[1:]
    NOTES.write_text(json.dumps({"arguments": given, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}))
    ThreadingHTTPServer(("127.0.0.1", int(given[given.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
