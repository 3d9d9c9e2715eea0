"""The pages of the server (dashboard and playground) and what benchmark reports share with them: styles and scripts.

Holds files and their types. Knows no HTTP and no data: the pages fetch everything they show.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

import msgspec

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing from elsewhere is loaded or sent, and no markup in an answer can run as a script.
CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WebFile(msgspec.Struct, frozen=True):
    name: str
    body: bytes
    type: str
    tag: str  # of its content, quoted, as an ETag


@functools.cache
def web_file(name: str) -> WebFile:
    path = _FOLDER / name
    body = path.read_bytes()
    return WebFile(name, body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def web_text(*names: str) -> str:
    """Return several files as one text."""
    return "\n".join(web_file(name).body.decode() for name in names)


@functools.cache
def web_files() -> tuple[WebFile, ...]:
    return tuple(web_file(path.name) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES)
