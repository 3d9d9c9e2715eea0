"""Markdown, HTML, PDF and plain text become the same kinds of blocks; what is not content is dropped."""

from __future__ import annotations

import asyncio

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.collections import pdf_reader
from headrace.pipelines.collections.blocks import ReadDocument, StructureBlock, read_markdown, read_text
from headrace.pipelines.collections.document_source import document_type, read_document
from headrace.pipelines.collections.html_reader import read_html


def test_markdown_has_headings_code_and_paragraphs() -> None:
    read = read_markdown(
        "---\ntitle: hidden\n---\n# One\n\nA [link](http://a) and\na line.\n<!-- gone -->\n\n"
        "Two\n===\n\n```python\n# no heading\n\nx = 1\n```\n\n### Three ###\n* item\n"
    )
    assert read.title == "One"
    assert read.blocks == [
        StructureBlock("heading", "One", 1),
        StructureBlock("text", "A link and\na line."),
        StructureBlock("heading", "Two", 1),
        StructureBlock("code", "# no heading\n\nx = 1"),
        StructureBlock("heading", "Three", 3),
        StructureBlock("text", "* item"),
    ]


def test_a_fence_that_is_never_closed_is_code_to_the_end() -> None:
    assert read_markdown("~~~\na\n```\nb").blocks == [StructureBlock("code", "a\n```\nb")]


def test_plain_text_is_cut_at_blank_lines() -> None:
    assert read_text("a\r\nb\r\n \r\nc\n\n\n").blocks == [StructureBlock("text", "a\nb"), StructureBlock("text", "c")]


PAGE = """<html><head><title>A &amp; B</title><style>x{}</style><script>var a = "<p>no</p>";</script></head>
<body><nav><a href="/">Home</a></nav><h1>Top</h1><p>One <b>bold</b>
  text.<br>Next line</p><ul><li>first<li>second</ul>
<table><tr><th>k</th><th>v</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>if x:
    y()</pre><form><p>Sign up</p></form><footer>Imprint</footer></body></html>"""


def test_html_keeps_what_is_read_and_drops_what_surrounds_it() -> None:
    assert read_html(PAGE) == ReadDocument(
        "A & B",
        [
            StructureBlock("heading", "Top", 1),
            StructureBlock("text", "One bold text.\nNext line"),
            StructureBlock("text", "first"),
            StructureBlock("text", "second"),
            StructureBlock("text", "k | v"),
            StructureBlock("text", "1 | 2"),
            StructureBlock("code", "if x:\n    y()"),
        ],
    )


def test_html_with_a_main_part_is_only_that_part() -> None:
    content = "word " * 50
    read = read_html(f"<div>menu</div><main><p>{content}</p></main><div>more links</div>")
    assert [block.text for block in read.blocks] == [content.strip()]
    read = read_html("<div>menu</div><main></main><p>all of it</p>")  # an empty one is not believed
    assert [block.text for block in read.blocks] == ["menu", "all of it"]


@pytest.mark.parametrize(
    "text", ["<p>a<div>b</p></div>", "</div></p>", "<" * 1000, "<div>" * 5000 + "deep", "&#xffffff;"]
)
def test_broken_html_is_read_as_far_as_it_goes(text: str) -> None:
    for block in read_html(text).blocks:
        assert block.text


@pytest.mark.parametrize(
    ("given", "source", "data", "kind"),
    [
        (None, "a/b.MD", None, "markdown"),
        (None, "page.html", b"x", "html"),
        (None, "unknown", b"%PDF-1.4", "pdf"),
        (None, "unknown", b"x", "text"),
        ("text/html; charset=utf-8", "a.md", None, "html"),
    ],
)
def test_the_type_comes_from_the_client_the_name_or_the_bytes(
    given: str | None, source: str, data: bytes | None, kind: str
) -> None:
    assert document_type(given, source, data) == kind


@pytest.mark.parametrize(
    ("data", "charset"),
    [
        ("Grüße".encode(), None),
        ("Grüße".encode("utf-16"), None),
        ("Grüße".encode("latin-1"), "iso-8859-1"),
        ("Grüße".encode("cp1252"), "no-such-charset"),
    ],
)
def test_text_is_decoded(data: bytes, charset: str | None) -> None:
    read = asyncio.run(read_document(data, "text", charset=charset))
    assert read.blocks == [StructureBlock("text", "Grüße")]


def test_pdf_files_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_reader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ApiError, match=r"headrace\[pdf\]") as caught:
        asyncio.run(read_document(b"%PDF-1.4", "pdf"))
    assert (caught.value.status, caught.value.code) == (501, "extra_missing")


def test_a_pdf_file_is_read_page_by_page() -> None:
    pytest.importorskip("pypdf")
    read = asyncio.run(read_document(made_pdf(["The ferry leaves at nine.", "Bread needs salt."]), "pdf"))
    assert read.blocks == [
        StructureBlock("heading", "Page 1", 2),
        StructureBlock("text", "The ferry leaves at nine."),
        StructureBlock("heading", "Page 2", 2),
        StructureBlock("text", "Bread needs salt."),
    ]
    for damaged in (b"%PDF-1.4 nothing", made_pdf(["a"])[:150]):
        with pytest.raises(ApiError, match="cannot be read"):
            asyncio.run(read_document(damaged, "pdf"))


def made_pdf(pages: list[str]) -> bytes:
    """A PDF file with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * place} 0 R" for place in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for place, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * place} 0 R >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    body, offsets = "%PDF-1.4\n", list[int]()
    for number, each in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{each}\nendobj\n"
    start = len(body)
    entries = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    body += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{entries}"
    body += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return body.encode("latin-1")
