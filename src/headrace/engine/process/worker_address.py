"""Addresses of workers: a Unix socket of this machine, or a host and port, and the TLS between hosts.

Both sides of a TLS connection show a certificate that the same CA signed. Plain TCP is for this machine only. Opens no
connections.
"""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from os import PathLike, fspath
from typing import Final
from urllib.parse import urlsplit

import msgspec

from headrace.errors import HeadraceError

_SCHEMES: Final = {"tls": True, "tcp": False}


class WorkerAddressError(HeadraceError):
    """An address that no worker can have, or TLS files that cannot be used."""


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where a worker listens: `path` on this machine, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @property
    def is_remote(self) -> bool:
        """True for a worker that is reached over a network, which may be cut without either side noticing."""
        return not self.path

    def __str__(self) -> str:
        if self.path:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def parse_address(text: str | PathLike[str]) -> WorkerAddress:
    """Read `tls://HOST:PORT`, `tcp://HOST:PORT` (a loopback address), or a path. Raise WorkerAddressError."""
    text = fspath(text)
    if "://" not in text:
        return WorkerAddress(path=text)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    wrong = parts.path or parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in _SCHEMES or not host or port is None or wrong:
        raise WorkerAddressError(f"The worker address {text!r} is invalid. Expected tls://HOST:PORT.")
    address = WorkerAddress(host=host, port=port, tls=_SCHEMES[parts.scheme])
    if not address.tls and not is_loopback(host):
        raise WorkerAddressError(
            f"The worker address {text!r} is on another machine, where TLS is required. Use tls://{host}:{port}."
        )
    return address


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class WorkerTls(msgspec.Struct, frozen=True, kw_only=True):
    """This side's certificate and key, and the CA that signs the other side's, as paths of PEM files."""

    cert: str
    key: str
    ca: str
    name: str = ""  # that the workers' certificates are for; empty: the host of each address

    def client_context(self) -> ssl.SSLContext:
        """Read the files, so that a new connection uses a renewed certificate. WorkerAddressError if that fails."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise WorkerAddressError(f"Cannot use the CA file {self.ca}: {_reason(error)}.") from None
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise WorkerAddressError(
                f"Cannot use the certificate {self.cert} with the key {self.key}: {_reason(error)}."
            ) from None
        return context


def _no_password() -> str:
    return ""  # without this, an encrypted key would ask on the terminal


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{(error.reason or 'not a PEM file').replace('_', ' ').lower()}"
    return str(getattr(error, "strerror", None) or error)
