"""Configuration of workers on other hosts: where they are, and the TLS between them and this server.

Opens no connections and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.config.value_types import Finding, Section


class WorkersConfig(Section, frozen=True):
    """How this server identifies itself to workers on other hosts, and they to it. PEM files."""

    cert_file: str = ""  # this server's certificate
    key_file: str = ""  # its private key
    ca_file: str = ""  # the CA that signs the workers' certificates
    name: str = ""  # name in the certificates of all workers; empty: the host in each address


def check_worker_addresses(addresses: Sequence[str], tls: WorkersConfig, where: str) -> Iterator[Finding]:
    for place, address in enumerate(addresses):
        here = f"{where}.workers[{place}]"
        try:
            parts = urlsplit(address)
            is_valid = parts.scheme in ("tls", "tcp") and bool(parts.hostname) and bool(parts.port)
        except ValueError:
            parts, is_valid = urlsplit(""), False
        if not is_valid or parts.path or parts.query or parts.fragment or parts.username is not None:
            yield here, "expected an address such as tls://10.0.0.5:9000"
        elif address in addresses[:place]:
            yield here, "this address is already in the list"
        elif parts.scheme == "tcp" and not _is_loopback(parts.hostname or ""):
            yield here, "expected tls:// for a worker on another machine; tcp:// is for this machine only"
        elif parts.scheme == "tls":
            for key in ("cert_file", "key_file", "ca_file"):
                if not getattr(tls, key):
                    yield f"workers.{key}", f"missing: {here} needs TLS"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
