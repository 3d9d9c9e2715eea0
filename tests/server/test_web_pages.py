"""The dashboard and the playground as HTTP: to whom they are served, and with which headers."""

from __future__ import annotations

from headrace.config import KeyConfig
from headrace.observe.web import CONTENT_POLICY, web_file, web_files
from tests.support.running_server import asynchronous, serving


@asynchronous
async def test_pages_need_no_key_and_hold_no_data() -> None:
    async with serving(keys=(KeyConfig(name="site", key="key-of-site"),)) as running:
        for path, name in (
            ("/", "dashboard.html"),
            ("/lab", "lab.html"),
            ("/playground", "playground.html"),
            ("/playground/", "playground.html"),
        ):
            answer = await running.ask("GET", path)
            assert (answer.status, answer.body) == (200, web_file(name).body)
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["content-security-policy"] == CONTENT_POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await running.ask("GET", "/v1/models")).status == 401


@asynchronous
async def test_each_file_is_served_with_its_type() -> None:
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    async with serving() as running:
        for file in web_files():
            if not file.name.endswith(".html"):
                answer = await running.ask("GET", f"/web/{file.name}")
                assert (answer.status, answer.body) == (200, file.body)
                assert answer.headers["content-type"] == types[file.name.rpartition(".")[2]]
        assert (await running.ask("GET", "/web/../web/base.css")).status == 404
        assert (await running.ask("GET", "/web/__init__.py")).status == 404


@asynchronous
async def test_a_browser_that_has_a_file_gets_no_second_copy() -> None:
    async with serving() as running:
        tag = (await running.ask("GET", "/web/base.css")).headers["etag"]
        again = await running.ask("GET", "/web/base.css", **{"if-none-match": tag})
        assert (again.status, again.body) == (304, b"")
        assert (await running.ask("GET", "/web/base.css", **{"if-none-match": '"other"'})).status == 200


@asynchronous
async def test_pages_can_be_turned_off() -> None:
    async with serving(pages="off") as running:
        assert (await running.ask("GET", "/")).status == 405  # Ollama clients ask HEAD /
        for path in ("/playground", "/web/base.css"):
            answer = await running.ask("GET", path)
            assert (answer.status, answer.error["code"]) == (404, "unknown_url")
