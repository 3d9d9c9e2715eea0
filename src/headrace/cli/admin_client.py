"""One question to a server's admin API, over HTTP or its Unix socket.

Owns the connection, and how what goes wrong becomes an error of the command: what the server refuses is a
HeadraceError, a server that is not there or has failed a ConnectionError. The key is read from HEADRACE_ADMIN_KEY,
never from a flag: other users of a machine can see those.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, urlencode, urlsplit

from headrace.errors import HeadraceError, RequestError

_WAIT_S: Final = 60.0  # for an answer
_LONGEST: Final = 64 * 1024 * 1024  # 64 MiB of an answer; exports of usage are no longer


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_WAIT_S)
        self.sock.connect(self._path)


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """With the path that comes before the API's."""
    if url.startswith("unix:"):
        return _UnixConnection(str(Path(url.removeprefix("unix:")).expanduser())), ""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}.get(parts.scheme)
    try:
        port = parts.port
    except ValueError:
        port = kind = None
    if kind is None or not parts.hostname:
        raise RequestError(f"'{url}' is no server's URL; expected http://HOST:PORT, https://HOST or unix:PATH")
    return kind(parts.hostname, port, timeout=_WAIT_S), parts.path.rstrip("/").removesuffix("/v1")


def ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> bytes:
    headers = {"accept": "application/json"}
    if key := os.environ.get("HEADRACE_ADMIN_KEY"):
        if not key.isascii() or not key.isprintable():
            raise RequestError("HEADRACE_ADMIN_KEY holds characters that no key has")
        headers["authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["content-type"] = "application/json"
    connection, before = _connection(url)
    given = {name: str(value) for name, value in query.items() if value is not None}
    try:
        connection.request(method, f"{before}/admin/v1/{path}{'?' if given else ''}{urlencode(given)}", data, headers)
        reply = connection.getresponse()
        answer = reply.read(_LONGEST + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise ConnectionError(f"{url}: {printable(reason)}") from None
    finally:
        connection.close()
    if len(answer) > _LONGEST:
        raise ConnectionError(f"{url}: the answer is longer than {_LONGEST} bytes")
    if reply.status >= 400:
        reason = printable(_reason(answer, reply.status))
        raise ConnectionError(f"{url}: {reason}") if reply.status >= 500 else HeadraceError(reason)
    return answer


def asked(url: str, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
    answer = ask(url, method, path, body, **query)
    try:
        found: object = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConnectionError(f"{url}: this is no admin API of Headrace")
    return cast("dict[str, Any]", found)


def _reason(answer: bytes, status: int) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


def in_path(part: str) -> str:
    return quote(part, safe="")


def printable(text: str) -> str:
    """What a server or another administrator has written moves no cursor here."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
