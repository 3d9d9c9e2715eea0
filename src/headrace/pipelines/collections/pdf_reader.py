"""Reads the text of a PDF file page by page, with pypdf (the extra `pdf`), in a process of its own.

    python -m headrace.pipelines.collections.pdf_reader < file.pdf

A hostile file can make a parser loop or allocate without end, so that process has bounds on memory and on processor
time, and nothing of the server's. It prints a JSON list with the text of each page.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import io
import json
import re
import resource
import sys
from typing import Any, Final

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.pipelines.collections.blocks import ReadDocument, StructureBlock

_MEMORY_BYTES: Final = 1024**3
_PROCESSOR_S: Final = 60
_TIMEOUT_S: Final = 120.0
_PAGES: Final = 5000
_OUTPUT_BYTES: Final = 64 * 1024 * 1024
_ENCRYPTED: Final = 3  # exit codes
_INVALID: Final = 4
_HYPHEN: Final = re.compile(r"(?<=[a-z])-\n(?=[a-z])")


async def read_pdf(data: bytes) -> ReadDocument:
    """ApiError if the extra is missing, or the file is encrypted, damaged, or takes too long."""
    if importlib.util.find_spec("pypdf") is None:
        raise ApiError(
            "This server cannot read PDF files. Install the extra on the server (pip install 'headrace[pdf]'), "
            "or send the text.",
            kind="server_error",
            status=501,
            code="extra_missing",
        )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace.pipelines.collections.pdf_reader",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate(data)
    except TimeoutError:
        raise invalid_request(f"The PDF file takes longer than {_TIMEOUT_S:g} s to read.", "documents") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == _ENCRYPTED:
        raise invalid_request("The PDF file is encrypted. Save it without a password.", "documents")
    if process.returncode != 0:
        raise invalid_request("The PDF file cannot be read: it is damaged, or too large.", "documents")
    found = json.loads(output)
    blocks: list[StructureBlock] = []
    for number, page in enumerate(found["pages"], start=1):
        paragraphs = [_joined(each) for each in re.split(r"\n[ \t]*\n", page)]
        if any(paragraphs):
            blocks.append(StructureBlock("heading", f"Page {number}", 2))
            blocks += [StructureBlock("text", each) for each in paragraphs if each]
    return ReadDocument(found["title"], blocks)


def _joined(text: str) -> str:
    return _HYPHEN.sub("", text).strip()


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    pypdf: Any = importlib.import_module("pypdf")
    try:
        reader = pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read()))
        if reader.is_encrypted and not reader.decrypt(""):
            return _ENCRYPTED
        pages: list[str] = []
        length = 0
        for page in reader.pages[:_PAGES]:
            pages.append(page.extract_text() or "")
            length += len(pages[-1])
            if length > _OUTPUT_BYTES // 4:
                break
        information: Any = reader.metadata
        title = str(information.title or "")[:500] if information is not None else ""
    except Exception:  # pypdf raises almost anything for a damaged file
        return _INVALID
    json.dump({"title": title, "pages": pages}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
