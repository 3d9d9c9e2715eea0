"""Spoils files of packed blobs: weights and pinned prefixes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAILER = struct.Struct("<32sQ8s")  # sha256 of the footer, its length, end magic


def change_footer(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the footer of a file and sign it anew: the lie is told by a writer that knows the format."""
    content = path.read_bytes()
    _, length, end = TRAILER.unpack(content[-TRAILER.size :])
    body, footer = content[: -TRAILER.size - length], json.loads(content[-TRAILER.size - length : -TRAILER.size])
    change(footer)
    encoded = json.dumps(footer).encode()
    path.write_bytes(body + encoded + TRAILER.pack(hashlib.sha256(encoded).digest(), len(encoded), end))
    return path
