"""Upload: reads the fields of a multipart body, and yields its file as it arrives, never the whole file in memory.

python-multipart parses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.gateway.api_errors import invalid_request

_FIELD_BYTES: Final = 4096
_FIELDS: Final = 16
_NAME_BYTES: Final = 1024
FIRST_FIELDS: Final = "the fields of an upload come before its file"


class Upload:
    """`fields` are those before the file; `file` gives its bytes, and reads the rest after it.

    A field after the file is an error, which `file` raises: whether it arrives in time depends on how the body is cut.
    """

    def __init__(self, content_type: str, chunks: AsyncIterator[bytes]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
            raise invalid_request(
                "The content-type is not multipart/form-data with a boundary. Send the upload as a form."
            )
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._chunks = chunks
        self._ready: list[bytes] = []  # of the file, to be handed on
        self._in_file = False
        self._seen_file = False
        self._ended = False
        self._header = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field = ""
        self._late: str | None = None  # a field after the file
        self._data = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_end": self._body_ends,
            },
        )

    async def begin(self) -> None:
        """Read up to the beginning of the file."""
        while not self._seen_file:
            if not await self._feed():
                raise invalid_request("The upload has no field 'file'. Add the file under this name.", "file")

    async def file(self) -> AsyncIterator[bytes]:
        while True:
            if self._late is not None:
                raise invalid_request(f"'{self._late}' comes after the file. Note that {FIRST_FIELDS}.", self._late)
            ready, self._ready = self._ready, []
            for piece in ready:
                yield piece
            if not await self._feed() and not self._ready:
                break
        if not self._ended:
            raise invalid_request("The upload ends before its last boundary. Send it again.")

    async def _feed(self) -> bool:
        """Read more of the body. Return False at its end."""
        chunk = await anext(self._chunks, None)
        if chunk is None:
            return False
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise invalid_request("The body is not valid multipart/form-data, as the content-type says.") from None
        return True

    def _part_begins(self) -> None:
        self._headers.clear()
        self._header = self._value = b""
        self._data.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"")[:_NAME_BYTES].decode("utf-8", "replace")
        filename = options.get(b"filename")
        if self._field == "file":
            if self._seen_file:
                self._late = "file"
                return
            self.filename = (filename or b"")[:_NAME_BYTES].decode("utf-8", "replace")
            self._seen_file = self._in_file = True
        elif self._seen_file:
            self._late = self._field[:100]
        elif self._field in self.fields:
            raise invalid_request(f"'{self._field[:100]}' is there twice. Send each field once.", self._field[:100])
        elif filename is not None:
            raise invalid_request(f"The file is in the field '{self._field[:100]}'. Expected 'file'.", "file")
        elif len(self.fields) >= _FIELDS:
            raise invalid_request(f"The upload has more than {_FIELDS} fields.")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._ready.append(bytes(data[start:end]))
            return
        if self._seen_file:
            return
        self._data += data[start:end]
        if len(self._data) > _FIELD_BYTES:
            raise invalid_request(f"'{self._field[:100]}' is longer than {_FIELD_BYTES} bytes.", self._field[:100])

    def _part_ends(self) -> None:
        if self._in_file:
            self._in_file = False
            return
        if self._seen_file:
            return
        self.fields[self._field] = self._data.decode("utf-8", "replace")

    def _body_ends(self) -> None:
        self._ended = True
