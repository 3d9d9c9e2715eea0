"""Recordings on disk: one folder for each tenant, bounded, encrypted if there is a key, and gone when deleted."""

from __future__ import annotations

import base64
import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError
from headrace.lab.comparison.answer import Answer
from headrace.lab.recording import recording_store
from headrace.lab.recording.line_cipher import LineCipher, RecordingError
from headrace.lab.recording.recorded_request import RecordedRequest, read_trace, write_trace
from headrace.lab.recording.recording_store import RecordingStore
from tests.support.clock import Clock

KEY = base64.b64encode(bytes(range(32))).decode()


def record(tenant: str = "acme", arrived: float = 1000.0, text: str = "Hi", **fields: Any) -> RecordedRequest:
    body = {"model": "mini", "messages": [{"role": "user", "content": text}]}
    answers = (Answer(text="Hello", prompt_tokens=5, output_tokens=2),)
    return RecordedRequest(id=f"id-{arrived}", tenant=tenant, arrived=arrived, body=body, answers=answers, **fields)


def store(folder: Path, clock: Clock | None = None, **options: Any) -> RecordingStore:
    options = {"most_bytes": 1 << 20, "days": 1.0, **options}
    return RecordingStore(folder, clock=clock or Clock(1000.0), **options)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "recordings").rglob("*") if path.is_file())


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    kept = store(tmp_path)
    first, second = record(), record(arrived=1001.0, text="grüß dich\n")
    kept.append(first)
    kept.append(second)
    kept.append(record("globex"))
    assert list(kept.read("acme")) == [first, second]
    assert list(kept.read("acme", since=1000.5)) == [second]
    assert [(each.tenant, each.segments, each.encrypted) for each in kept.tenants()] == [
        ("acme", 1, False),
        ("globex", 1, False),
    ]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path))


@pytest.mark.parametrize("tenant", ["", "../../etc", "a/b", ".", "ü" * 100, "no-tenant"])
def test_any_name_has_a_folder_of_its_own(tmp_path: Path, tenant: str) -> None:
    kept = store(tmp_path)
    kept.append(record(tenant))
    assert [each.tenant for each in kept.tenants()] == [tenant]
    [path] = [path for path in files(tmp_path) if path.suffix == ".jsonl"]
    assert path.parent.parent == tmp_path / "recordings"
    assert kept.delete(tenant)
    assert kept.tenants() == []


def test_the_oldest_go_when_the_bytes_are_used_up(tmp_path: Path) -> None:
    kept = store(tmp_path, most_bytes=65_536)
    for number in range(200):
        kept.append(record(arrived=float(number), text="x" * 1000))
        for path in files(tmp_path):  # the order of segments within one second
            os.utime(
                path, (int(path.name.split("-")[2].partition(".")[0]),) * 2
            ) if path.stat().st_mtime > 500 else None
    kept.apply_bounds()
    left = [each.arrived for each in kept.read("acme")]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 65_536
    assert 20 < len(left) < 60


def test_a_line_that_a_full_disk_cut_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    first, lost, after = record(), record(arrived=1001.0), record(arrived=1002.0)
    kept.append(first)

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(
            recording_store, "open", lambda path, mode, opener: FullDisk(path, mode, opener=opener), raising=False
        )
        with pytest.raises(OSError, match="No space"):
            kept.append(lost)
    kept.append(after)
    assert list(kept.read("acme")) == [first, after]
    assert len(files(tmp_path)) == 1  # a disk that stays full costs no file for each record


def test_old_recordings_go(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    kept = store(tmp_path, clock)
    kept.append(record())
    [path] = files(tmp_path)
    os.utime(path, (1000.0, 1000.0))
    clock.now += 86_000.0
    kept.apply_bounds()
    assert len(list(kept.read("acme"))) == 1
    clock.now += 500.0
    kept.apply_bounds()
    assert files(tmp_path) == []
    kept.append(record(arrived=2000.0))  # to a new file
    assert len(list(kept.read("acme"))) == 1


def test_a_half_written_line_is_skipped(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.append(record())
    [path] = files(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"id": "cut')
    assert len(list(kept.read("acme"))) == 1


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.append(record())
    [path] = files(tmp_path)
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(RecordingError, match="line 2"):
        list(kept.read("acme"))


def test_encrypted_recordings_need_their_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    cipher = LineCipher.from_environment("RECORDING_KEY", {"RECORDING_KEY": KEY})
    kept = store(tmp_path, cipher=cipher)
    kept.append(record(text="a secret plan"))
    [path] = files(tmp_path)
    assert path.name.endswith(".jsonl.enc")
    assert b"secret" not in path.read_bytes()
    assert [each.body["messages"][0]["content"] for each in kept.read("acme")] == ["a secret plan"]
    with pytest.raises(RecordingError, match="encrypted"):
        list(store(tmp_path).read("acme"))
    with pytest.raises(RecordingError, match="cannot be decrypted"):
        list(store(tmp_path, cipher=LineCipher(bytes(32))).read("acme"))


def test_a_line_cannot_move_to_another_tenant(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    cipher = LineCipher(bytes(32))
    line = cipher.encrypt(b"{}", "acme")
    assert cipher.decrypt(line, "acme") == b"{}"
    with pytest.raises(RecordingError):
        cipher.decrypt(line, "globex")


@pytest.mark.parametrize(
    ("value", "message"),
    [("", "not set"), ("%%%", "openssl rand"), (base64.b64encode(b"short").decode(), "5 bytes")],
)
def test_a_wrong_key_is_explained(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LineCipher.from_environment("RECORDING_KEY", {"RECORDING_KEY": value})


def test_a_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"headrace\[encryption\]"):
        LineCipher(bytes(32))


def test_an_export_is_a_trace_in_the_order_of_arrival(tmp_path: Path) -> None:
    records = [record(arrived=1010.0), record(arrived=1000.0, surface="agent", deadline_s=2.0)]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(write_trace(records)))
    from headrace.bench.load_generator.trace_reader import read_trace as read_sessions

    sessions = list(read_sessions(path))
    assert [(each.at, each.surface, each.turns[0].tokens, each.turns[0].answer) for each in sessions] == [
        (0.0, "agent", 5, 2),
        (10.0, "chat", 5, 2),
    ]
    assert read_trace(path) == [records[1], records[0]]
