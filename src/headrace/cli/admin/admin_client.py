"""Names the server of `headrace admin`, and sends one request to its admin API, over HTTP or its Unix socket.

Raises HeadraceError if the server rejects the request and ConnectionError if it cannot be reached or fails. The key is
read from HEADRACE_ADMIN_KEY and never from a flag, because other users of the machine can see flags.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast
from urllib.parse import quote, urlencode, urlsplit

from cyclopts import Parameter

from headrace.errors import HeadraceError, RequestError

_TIMEOUT_S: Final = 60.0
_RESPONSE_BYTES: Final = 64 * 1024 * 1024  # 64 MiB, longest response; usage exports are no longer


@Parameter(name="*")
@dataclass(frozen=True)
class AdminTarget:
    """The server to ask and the output format.

    Parameters
    ----------
    url
        URL of the server, or unix:PATH for its admin.socket. Default: $HEADRACE_ADMIN_URL or $HEADRACE_URL, else
        http://localhost:8000.
    json
        Print the response as JSON.
    """

    url: Annotated[str, Parameter(env_var=("HEADRACE_ADMIN_URL", "HEADRACE_URL"))] = "http://localhost:8000"
    json: Annotated[bool, Parameter(negative=())] = False


DEFAULT_TARGET: Final = AdminTarget()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection and the path prefix of the URL."""
    if url.startswith("unix:"):
        return _UnixConnection(str(Path(url.removeprefix("unix:")).expanduser())), ""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}.get(parts.scheme)
    try:
        port = parts.port
    except ValueError:
        port = kind = None
    if kind is None or not parts.hostname:
        raise RequestError(f"Invalid URL '{url}'. Expected http://HOST:PORT, https://HOST or unix:PATH.")
    return kind(parts.hostname, port, timeout=_TIMEOUT_S), parts.path.rstrip("/").removesuffix("/v1")


def request(
    url: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    root: str = "/admin/v1/",
    key_variable: str = "HEADRACE_ADMIN_KEY",
    **query: Any,
) -> bytes:
    """`root`: what the path is below. `key_variable`: the environment variable with the key."""
    headers = {"accept": "application/json"}
    if key := os.environ.get(key_variable):
        if not key.isascii() or not key.isprintable():
            raise RequestError(f"{key_variable} contains characters that are not allowed in a key.")
        headers["authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["content-type"] = "application/json"
    connection, prefix = _connection(url)
    parameters = {name: str(value) for name, value in query.items() if value is not None}
    try:
        connection.request(
            method, f"{prefix}{root}{path}{'?' if parameters else ''}{urlencode(parameters)}", data, headers
        )
        reply = connection.getresponse()
        answer = reply.read(_RESPONSE_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise ConnectionError(f"{url}: {printable(reason)}") from None
    finally:
        connection.close()
    if len(answer) > _RESPONSE_BYTES:
        raise ConnectionError(f"{url}: the response is longer than {_RESPONSE_BYTES} bytes")
    if reply.status >= 400:
        reason = printable(_reason(answer, reply.status))
        if reply.status == 401:
            action = "Check" if key else "Set"
            reason += f" {action} {key_variable}, which this command reads the key from."
        raise ConnectionError(f"{url}: {reason}") if reply.status >= 500 else HeadraceError(reason)
    return answer


def request_json(
    url: str, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Like `request`, with its options, for a response that is a JSON object."""
    answer = request(url, method, path, body, **options)
    try:
        parsed: object = json.loads(answer)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ConnectionError(f"{url}: not a Headrace server")
    return cast("dict[str, Any]", parsed)


def _reason(answer: bytes, status: int) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server responded with status {status}."


def path_segment(part: str) -> str:
    return quote(part, safe="")


def printable(text: str) -> str:
    """Escape control characters, so that text from a server cannot move the cursor."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
