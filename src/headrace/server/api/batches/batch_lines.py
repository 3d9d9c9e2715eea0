"""The lines of a batch's files: requests in the input file, results in the output and the error file.

Checks an input file and reports each mistake with its line. Writes results in OpenAI's shape and, for message batches,
in Anthropic's. Does not know states, storage or running.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, BinaryIO, Final, cast

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.server.api.response_store import encode
from headrace.server.http.bounded_json import decode_body
from headrace.server.http.json_structure import TooManyValuesError

_ERRORS: Final = 100  # mistakes to list
_CUSTOM_ID_LETTERS: Final = 512
_BOM: Final = b"\xef\xbb\xbf"  # byte order mark of UTF-8
_UNRUN: Final = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}
_FIELDS: Final = ("custom_id", "method", "url", "body")


class InputLine(msgspec.Struct, frozen=True):
    number: int  # from 1
    custom_id: str
    start: int  # in the file
    length: int


def batch_error(code: str, message: str, *, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in the shape of a batch's `errors.data`."""
    return {"code": code, "line": line, "message": message, "param": param}


def read_input(
    file: BinaryIO, endpoint: str, *, most: int, line_bytes: int, line_values: int
) -> tuple[list[InputLine], list[dict[str, Any]]]:
    """Return the file's requests and its mistakes. If there is a mistake, no request may run."""
    lines: list[InputLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[bytes] = set()  # digests of custom ids
    number = start = 0
    while len(errors) < _ERRORS and (raw := file.readline(line_bytes + 1)):
        number += 1
        length = len(raw)
        if length > line_bytes and not raw.endswith(b"\n"):
            errors.append(batch_error("line_too_long", f"A line may have at most {line_bytes} bytes.", line=number))
            break  # the next read would begin inside this line
        skip = len(_BOM) if start == 0 and raw.startswith(_BOM) else 0
        raw = raw[skip:]
        if raw.strip():
            found = _check(raw, endpoint, line_values)
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


def _check(raw: bytes, endpoint: str, most_values: int) -> str | tuple[str, str, str | None]:
    """Return the custom id of a valid line, else the error's code, message and parameter."""
    try:
        decoded: Any = decode_body(raw, most_values=most_values)
    except TooManyValuesError:
        return "too_many_values", f"A line may have at most {most_values} values.", None
    except (msgspec.DecodeError, RecursionError):
        return "invalid_json_line", "This line is not parseable as valid JSON.", None
    if not isinstance(decoded, dict):
        return "invalid_json_line", "This line is not a JSON object.", None
    request = cast(dict[str, Any], decoded)
    for name in _FIELDS:
        if name not in request:
            return "missing_required_parameter", f"Missing required parameter '{name}'.", name
    for name in request:
        if name not in _FIELDS:
            return "unknown_parameter", f"Unknown parameter '{name[:64]}'. Expected {', '.join(_FIELDS)}.", name[:64]
    custom_id = request["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _CUSTOM_ID_LETTERS:
        message = f"custom_id must be a string of 1 to {_CUSTOM_ID_LETTERS} characters."
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
    """Return the body of a valid line."""
    return decode_body(raw, most_values=len(raw))["body"]


def request_line(custom_id: str, url: str, body: dict[str, Any]) -> bytes:
    """Return a line of an input file."""
    return encode({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + b"\n"


def result_line(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": "req_" + secrets.token_hex(16), "body": body}
    return _line(custom_id, response, None)


def error_line(custom_id: str, error: ApiError) -> bytes:
    return result_line(custom_id, error.status, error.openai())


def unrun_line(custom_id: str, ending: str) -> bytes:
    code, message = _UNRUN.get(ending, _UNRUN["cancelled"])
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, mistake: dict[str, Any] | None) -> bytes:
    line = {
        "id": "batch_req_" + secrets.token_hex(16),
        "custom_id": custom_id,
        "response": response,
        "error": mistake,
    }
    return encode(line) + b"\n"


# Anthropic's shape


def message_result_line(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    result = {"type": "succeeded", "message": body} if status < 400 else {"type": "errored", "error": body}
    return _message_line(custom_id, result)


def message_error_line(custom_id: str, error: ApiError) -> bytes:
    return message_result_line(custom_id, error.status, error.anthropic())


def message_unrun_line(custom_id: str, ending: str) -> bytes:
    return _message_line(custom_id, {"type": "expired" if ending == "expired" else "canceled"})


def _message_line(custom_id: str, result: dict[str, Any]) -> bytes:
    return encode({"custom_id": custom_id, "result": result}) + b"\n"
