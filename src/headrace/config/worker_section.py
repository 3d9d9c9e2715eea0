"""Configuration of workers: where those on other hosts are, TLS to them, and how many run on this machine.

Opens no connections and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from headrace.config.value_types import Finding, Milliseconds, Seconds, Section, Share, Text


class WorkersConfig(Section, frozen=True):
    """Where this server finds workers on other hosts, and the PEM files of TLS between them."""

    cert_file: str = ""  # this server's certificate
    key_file: str = ""  # its private key
    ca_file: str = ""  # the CA that signs the workers' certificates
    name: str = ""  # name in the certificates of all workers; empty: the host in each address
    redis_env: Text | None = None  # environment variable with the URL of the Redis that is their registry
    namespace: Text = "headrace"  # prefix of the registry's keys
    wait_ms: Milliseconds = 1000.0  # Redis timeout
    poll_s: Seconds = 1.0  # between two looks at the registry


class AutoscaleConfig(Section, frozen=True):
    """How many engine processes of a variant run on this machine, by the load."""

    least: Annotated[int, Meta(ge=0, le=64)] = 1  # 0: the last one stops after `idle_stop_s`
    most: Annotated[int, Meta(ge=1, le=64)] = 2
    ttft_ms: Milliseconds = 1000.0  # predicted time to the first token above which a replica is added
    calm: Share = 0.4  # share of ttft_ms that one replica less would have to keep before one is stopped
    up_s: Seconds = 2.0  # seconds that the prediction must be above ttft_ms
    down_s: Seconds = 60.0  # seconds that it must be calm
    idle_stop_s: Seconds = 300.0  # seconds without a request before the last replica stops
    replica_price: Annotated[float, Meta(ge=0)] = 0.0  # of one replica for an hour, in any currency
    most_price: Annotated[float, Meta(gt=0)] | None = None  # of all replicas for an hour; default: no ceiling


def check_autoscale(
    config: AutoscaleConfig | None, replicas: int | None, processes: int, where: str
) -> Iterator[Finding]:
    if config is None:
        return
    here = f"{where}.autoscale"
    if config.most < config.least:
        yield f"{here}.most", f"expected at least least ({config.least}), found {config.most}"
    if replicas is not None and not config.least <= replicas <= config.most:
        yield f"{where}.replicas", f"expected a number from least to most of {here}, found {replicas}"
    if config.most_price is not None and config.replica_price <= 0:
        yield f"{here}.replica_price", "expected the price of a replica, because most_price is set"
    if processes > 1:
        yield here, "this needs server.processes = 1"


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
