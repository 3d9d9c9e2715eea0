"""Which addresses a worker can have, and which files make a TLS connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.process.worker_address import WorkerAddress, WorkerAddressError, WorkerTls, parse_address
from tests.support.programs.certificates import CertificateAuthority


def test_paths_and_hosts_are_told_apart_and_written_as_they_were() -> None:
    assert parse_address(Path("/run/worker-0.socket")) == WorkerAddress(path="/run/worker-0.socket")
    remote = parse_address("tls://worker.example:9000")
    assert (remote.host, remote.port, remote.tls, remote.is_remote) == ("worker.example", 9000, True, True)
    for text in ("tls://10.0.0.5:9000", "tls://[fd00::5]:9000", "tcp://127.0.0.1:9000", "tcp://localhost:1", "a/b"):
        assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["tls://", "tls://host", "http://host:1", "tls://host:x", "tls://host:1/x", "tls://a:b@host:1", "tls://h:1?q"],
)
def test_what_is_no_address_is_rejected_by_name(text: str) -> None:
    with pytest.raises(WorkerAddressError, match="Expected tls://HOST:PORT"):
        parse_address(text)


def test_another_machine_needs_tls() -> None:
    with pytest.raises(WorkerAddressError, match=r"TLS is required\. Use tls://10\.0\.0\.5:9000"):
        parse_address("tcp://10.0.0.5:9000")


def test_unusable_files_are_named(tmp_path: Path) -> None:
    tls = CertificateAuthority(tmp_path / "ca").issue("worker")
    assert tls.client_context().check_hostname
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for changes, named in (
        ({"ca": str(tmp_path / "missing")}, "missing: No such file"),
        ({"ca": str(broken)}, "broken.pem"),
        ({"key": str(broken)}, "with the key .*broken.pem"),
    ):
        values = {"cert": tls.cert, "key": tls.key, "ca": tls.ca} | changes
        with pytest.raises(WorkerAddressError, match=named):
            WorkerTls(**values).server_context()
