"""An HTTP server of files in a thread, for download clients: ranges, redirects, and connections that break off."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class FileServer:
    """`answer` maps a path to its reply; None is a 404. A file in `cuts` breaks off after so many bytes, once."""

    answer: Callable[[str, dict[str, str]], Reply | None]
    url: str = ""
    cuts: dict[str, int] = field(default_factory=dict[str, int])
    asked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])  # method, path, range


@contextlib.contextmanager
def serving_files(answer: Callable[[str, dict[str, str]], Reply | None]) -> Iterator[FileServer]:
    found = FileServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            wanted = self.headers.get("range", "")
            found.asked.append((self.command, path, wanted))
            reply = found.answer(path, {name.lower(): value for name, value in self.headers.items()})
            if reply is None:
                reply = Reply(b"not found", 404)
            body, status = reply.body, reply.status
            if wanted and status == 200:
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                status = 206 if start < len(body) else 416
                reply.headers["content-range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body = body[start:]
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = found.cuts.pop(path, None)
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
