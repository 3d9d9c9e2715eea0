"""URLs that clients name: which are fetched, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from headrace.pipelines.public_fetch import FetchedPage, FetchError, FetchPolicy, check_url, fetch, is_public


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # metadata of clouds
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("localhost", False),
    ],
)
def test_only_addresses_of_the_public_internet_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


ALL = FetchPolicy(hosts=("*",))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/",
        "http://",
        "http://user:secret@example.com/",
        "http://127.0.0.1/",
        "http://[::1]:80/",
        "http://169.254.169.254/latest/meta-data/",
        "http://example.com:port/",
    ],
)
def test_urls_that_are_never_fetched(url: str) -> None:
    with pytest.raises(FetchError) as caught:
        check_url(url, ALL)
    assert caught.value.code == "url_not_allowed"
    assert "secret" not in str(caught.value)


def test_only_allowed_hosts_are_fetched() -> None:
    policy = FetchPolicy(hosts=("docs.example.com", "*.example.org"))
    assert check_url("https://docs.example.com/a", policy).hostname == "docs.example.com"
    assert check_url("https://A.Example.Org/a", policy).path == "/a"
    for url in ("https://example.com/", "https://example.org/", "https://evil-example.org/"):
        with pytest.raises(FetchError, match="not allowed"):
            check_url(url, policy)
    with pytest.raises(FetchError, match="fetches no URLs"):
        check_url("https://docs.example.com/", FetchPolicy())


@contextlib.asynccontextmanager
async def site(**pages: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return pages[request.path.strip("/")](request)

    runner = web.AppRunner(web.Application())
    runner.app.router.add_route("*", "/{tail:.*}", answer)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


LOCAL = FetchPolicy(private_hosts=("127.0.0.1",), max_bytes=1000)


def test_a_page_is_fetched_with_its_type() -> None:
    async def it() -> FetchedPage:
        async with site(page=lambda request: web.Response(text="<p>Grüße", content_type="text/html")) as url:
            return await fetch(f"{url}/page?q=1", LOCAL)

    page = asyncio.run(it())
    assert (page.status, page.content_type, page.body.decode(page.charset or "")) == (200, "text/html", "<p>Grüße")


def test_a_redirect_to_a_private_address_is_refused() -> None:
    def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"location": "http://[::1]:1/secret"})

    async def it() -> None:
        async with site(page=away) as url:
            await fetch(f"{url}/page", FetchPolicy(hosts=("*",), private_hosts=("127.0.0.1",)))

    with pytest.raises(FetchError, match="not public"):
        asyncio.run(it())


def test_a_name_that_points_to_a_private_address_is_refused() -> None:
    async def it(name: str) -> None:
        async with site(page=lambda request: web.Response(text="inside")) as url:
            await fetch(url.replace("127.0.0.1", name) + "/page", ALL)

    for name, reason in (("localhost", "no public address"), ("127.1", "not a canonical IPv4 address")):
        with pytest.raises(FetchError, match=reason):
            asyncio.run(it(name))


def test_redirects_end_and_other_origins_get_no_headers() -> None:
    seen: list[str | None] = []

    def again(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("x-token"))
        return web.Response(status=302, headers={"location": "/page"})

    async def it() -> None:
        async with site(page=again) as url:
            await fetch(f"{url}/page", LOCAL, headers={"x-token": "t"})

    with pytest.raises(FetchError, match="redirects more than 5 times"):
        asyncio.run(it())
    assert seen == ["t"] * 6


def test_headers_stay_with_their_origin() -> None:
    seen: list[str | None] = []

    def end(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("x-token"))
        return web.Response(text="end")

    async def it() -> FetchedPage:
        async with site(end=end) as other:
            away = web.HTTPFound(f"{other}/end")
            async with site(page=lambda request: web.Response(status=302, headers=away.headers)) as url:
                return await fetch(f"{url}/page", LOCAL, headers={"x-token": "t"})

    assert asyncio.run(it()).body == b"end"
    assert seen == [None]


def test_a_long_answer_is_cut_off_also_when_it_is_compressed() -> None:
    def bomb(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=b"0" * 10_000_000)
        response.enable_compression()
        return response

    async def it() -> None:
        async with site(page=bomb) as url:
            await fetch(f"{url}/page", LOCAL)

    with pytest.raises(FetchError, match="longer than 1000 bytes"):
        asyncio.run(it())


def test_a_silent_host_costs_a_bounded_wait() -> None:
    async def it() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            policy = FetchPolicy(private_hosts=("127.0.0.1",), timeout_s=0.05)
            await fetch(f"http://127.0.0.1:{port}/", policy)

    with pytest.raises(FetchError, match=r"within 0\.05 s"):
        asyncio.run(it())
