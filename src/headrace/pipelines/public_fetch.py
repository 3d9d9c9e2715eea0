"""Fetches URLs that clients name, and keeps them out of the server's own network (SSRF).

Only hosts that the operator allows are contacted, over http and https, at public addresses: the address that was
checked is the one that is connected to, and every redirect is checked again. Size and time are bounded. Sends no
cookies, and no credentials from a URL or the environment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from headrace.gateway.api_errors import ApiError

if TYPE_CHECKING:  # slow to import, and only needed when something is fetched
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult

_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_CHUNK: Final = 64 * 1024
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class FetchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What may be fetched. Without `hosts`, nothing may."""

    hosts: Sequence[str] = ()  # host names; "*.example.com" for its subdomains, "*" for every host
    private_hosts: Sequence[str] = ()  # host names or addresses that may be private; not covered by `hosts`
    max_bytes: int = 16 * 1024 * 1024
    timeout_s: float = 20.0  # of all requests together, redirects included
    redirects: int = 5


class FetchedPage(msgspec.Struct, frozen=True):
    url: str  # of the last request, after redirects
    status: int
    content_type: str  # media type in lower case, without parameters
    charset: str | None
    body: bytes
    headers: Mapping[str, str] = {}  # names in lower case


class FetchError(ApiError):
    """The URL may not or could not be fetched."""


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet. Addresses that embed a private one do not."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped or found.sixtofour
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast


def check_url(url: str, policy: FetchPolicy) -> SplitResult:
    """Return the parts of a URL that may be requested. FetchError otherwise; names are not resolved here."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise _refused(f"Invalid URL '{url[:200]}'.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise _refused(f"Invalid URL '{url[:200]}'. Expected http:// or https:// and a host.")
    if parts.username is not None or parts.password is not None:
        raise _refused("A URL must not contain a user name or a password.")
    if not policy.hosts and not policy.private_hosts:
        raise _refused("This server fetches no URLs. Send the text, or ask its operator to allow the host.")
    if _matches(host, policy.private_hosts):
        return parts
    if not _matches(host, policy.hosts):
        raise _refused(f"The host '{host[:200]}' is not allowed. Send the text, or ask the operator to allow the host.")
    if _is_address(host) and not is_public(host):
        raise _refused(f"The address '{host[:200]}' is not public.")
    return parts


async def fetch(
    url: str,
    policy: FetchPolicy,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> FetchedPage:
    """Request a URL. FetchError if it or one of its redirects is not allowed, or it fails, is late or too long.

    Redirects are followed for GET only; those to another origin get none of the `headers`.
    """
    import aiohttp

    try:
        async with asyncio.timeout(policy.timeout_s):
            return await _follow(url, policy, method, dict(headers or {}), body)
    except TimeoutError:
        raise FetchError(
            f"The URL did not answer within {policy.timeout_s:g} s: {_shown(url)}", kind="server_error", status=504
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise FetchError(
            f"The URL cannot be fetched: {_shown(url)}: {reason}", kind="server_error", status=502
        ) from None


async def _follow(
    url: str, policy: FetchPolicy, method: str, headers: dict[str, str], body: bytes | None
) -> FetchedPage:
    import aiohttp

    resolver = cast("AbstractResolver", _PublicResolver(policy))
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=4)
    async with aiohttp.ClientSession(
        connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=True
    ) as session:
        for _ in range(policy.redirects + 1):
            parts = check_url(url, policy)
            async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
                if response.status not in _REDIRECTS or method != "GET":
                    return FetchedPage(
                        url,
                        response.status,
                        response.content_type.lower(),
                        response.charset,
                        await _read(response, policy.max_bytes),
                        {name.lower(): value for name, value in response.headers.items()},
                    )
                url = urljoin(url, response.headers.get("location", ""))
                if _origin(parts) != _origin(urlsplit(url)):
                    headers = {}
    raise _refused(f"The URL redirects more than {policy.redirects} times.")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body after decompression, so that a small compressed one cannot fill the memory."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise FetchError(
                f"The response is longer than {max_bytes} bytes: {_shown(str(response.url))}", parameter="url"
            )
    return bytes(body)


class _PublicResolver:
    """Resolves names to public addresses only, so that a name cannot point into this network."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        private = _matches(host, self._policy.private_hosts)
        results: list[ResolveResult] = [
            {
                "hostname": host,
                "host": str(address[0]),
                "port": port,
                "family": kind,
                "proto": proto,
                "flags": int(socket.AI_NUMERICHOST | socket.AI_NUMERICSERV),
            }
            for kind, _, proto, _, address in found
            if private or is_public(str(address[0]))
        ]
        if not results:
            raise FetchError(f"The host '{host[:200]}' has no public address.", parameter="url", code="url_not_allowed")
        return results

    async def close(self) -> None:
        """There is nothing to close."""


def _matches(host: str, patterns: Sequence[str]) -> bool:
    host = host.lower().rstrip(".")
    return any(
        pattern == "*" or host == pattern.lower() or (pattern.startswith("*.") and host.endswith(pattern[1:].lower()))
        for pattern in patterns
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # Names that resolvers read as addresses (127.1, 0x7f000001) are judged after resolving.
        return False
    return True


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port


def _shown(url: str) -> str:
    return url.partition("?")[0][:200]


def _refused(message: str) -> FetchError:
    return FetchError(message, parameter="url", code="url_not_allowed")
