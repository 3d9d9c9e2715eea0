"""The lines of a batch's files: what is asked in the input, what is answered in the output and the error file.

Owns the checks of an input file, each mistake with its line, and the shapes of OpenAI's lines. Knows nothing of states,
storage and running.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any, BinaryIO, Final, cast

import msgspec

_ERRORS: Final = 100  # mistakes that are listed; further ones say nothing new
_CUSTOM_ID_LETTERS: Final = 512
_MARK: Final = b"\xef\xbb\xbf"  # of UTF-8, which some editors put first
_WANTED: Final = ("custom_id", "method", "url", "body")


class InputLine(msgspec.Struct, frozen=True):
    number: int  # from 1
    custom_id: str
    start: int  # in the file
    length: int


def batch_error(code: str, message: str, *, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """In the shape of a batch's `errors.data`."""
    return {"code": code, "line": line, "message": message, "param": param}


def read_input(
    file: BinaryIO, endpoint: str, *, most: int, line_bytes: int
) -> tuple[list[InputLine], list[dict[str, Any]]]:
    """The file's requests and mistakes; where there is a mistake, nothing is to be run."""
    lines: list[InputLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[bytes] = set()  # of custom ids, digests, which are short
    number = start = 0
    while len(errors) < _ERRORS and (raw := file.readline(line_bytes + 1)):
        number += 1
        length = len(raw)
        if length > line_bytes and not raw.endswith(b"\n"):
            errors.append(batch_error("line_too_long", f"A line may have at most {line_bytes} bytes.", line=number))
            break  # what follows is the middle of it
        skip = len(_MARK) if start == 0 and raw.startswith(_MARK) else 0
        raw = raw[skip:]
        if raw.strip():
            found = _check(raw, endpoint)
            if isinstance(found, str):
                digest = hashlib.blake2b(found.encode(), digest_size=16).digest()
                if digest in seen:
                    message = "The custom_id of this request was used by an earlier one; each must be unique."
                    errors.append(batch_error("duplicate_custom_id", message, line=number, param="custom_id"))
                seen.add(digest)
                lines.append(InputLine(number, found, start + skip, length - skip))
            else:
                code, message, param = found
                errors.append(batch_error(code, message, line=number, param=param))
        start += length
        if len(lines) > most:
            errors.append(batch_error("request_limit_exceeded", f"A batch may have at most {most} requests."))
            break
    if not lines and not errors:
        errors.append(batch_error("empty_file", "The input file has no requests."))
    return lines, errors


def _check(raw: bytes, endpoint: str) -> str | tuple[str, str, str | None]:
    """The custom id of a good line; of another the code, the message and the parameter."""
    try:
        decoded: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return "invalid_json_line", "This line is not parseable as valid JSON.", None
    if not isinstance(decoded, dict):
        return "invalid_json_line", "This line is not a JSON object.", None
    request = cast(dict[str, Any], decoded)
    for name in _WANTED:
        if name not in request:
            return "missing_required_parameter", f"{name} is missing.", name
    for name in request:
        if name not in _WANTED:
            return "unknown_parameter", f"Only {', '.join(_WANTED)} are known here.", name[:64]
    custom_id = request["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _CUSTOM_ID_LETTERS:
        message = f"custom_id must be a text of 1 to {_CUSTOM_ID_LETTERS} letters."
        return "invalid_custom_id", message, "custom_id"
    if request["method"] != "POST":
        return "invalid_method", "method must be POST.", "method"
    if request["url"] != endpoint:
        return "invalid_url", f"url must be the batch's endpoint, {endpoint}.", "url"
    if not isinstance(request["body"], dict):
        return "invalid_type", "body must be a JSON object.", "body"
    if cast(dict[str, Any], request["body"]).get("stream"):
        return "invalid_value", "A request of a batch cannot be streamed.", "body.stream"
    return custom_id


def body_of(raw: bytes) -> dict[str, Any]:
    """The body of a line that was found good."""
    return msgspec.json.decode(raw)["body"]


def result_line(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": "req_" + secrets.token_hex(16), "body": body}
    return _line(custom_id, response, None)


def unrun_line(custom_id: str, code: str, message: str) -> bytes:
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, mistake: dict[str, Any] | None) -> bytes:
    line = {
        "id": "batch_req_" + secrets.token_hex(16),
        "custom_id": custom_id,
        "response": response,
        "error": mistake,
    }
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(line).encode() + b"\n"
