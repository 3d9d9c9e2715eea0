"""Downloads from a hub: the real client against a hub in this process. Files are chosen, verified, resumed, found."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import FAILED, WRONG_USAGE, main
from headrace.config import Config, ModelConfig
from headrace.errors import DownloadError, RequestError
from headrace.models.model_folder import find_model, local_model, open_model
from headrace.models.sources.downloaded_models import HubName, downloaded_models, hub_name
from headrace.models.sources.hub import pull_from_hub
from tests.support.programs.file_server import FileServer, Reply, serving_files

pytest.importorskip("huggingface_hub")

COMMIT = "c" * 40
GGUF = b"GGUF" + bytes(2_000_000)


class Hub:
    """A hub with one model."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.wrong: set[str] = set()  # files whose hash is another one

    def answer(self, path: str, headers: dict[str, str]) -> Reply | None:
        if path == "/api/models/acme/tiny":
            return Reply(json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": self.siblings()}).encode())
        name = path.removeprefix("/acme/tiny/resolve/main/")
        if name == path or name not in self.files:
            code = "RepoNotFound" if name == path else "EntryNotFound"
            return Reply(b"{}", 404, {"x-error-code": code})
        found = {"etag": f'"{self.digest(name)}"', "x-repo-commit": COMMIT}
        return Reply(self.files[name], headers=found)

    def siblings(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, data in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": self.digest(name)}
            if is_large(name):
                sibling["lfs"] = {"size": len(data), "sha256": self.digest(name), "pointerSize": 134}
            found.append(sibling)
        return found

    def digest(self, name: str) -> str:
        data = self.files[name] + (b"!" if name in self.wrong else b"")
        if is_large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


@pytest.fixture
def hub(tiny_folder: Path) -> Hub:
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    return Hub({**files, "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit", "README.md": b"#"})


@pytest.fixture
def server(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    with serving_files(hub.answer) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


TINY = HubName("acme/tiny")


def test_a_model_is_downloaded_without_code_and_found_by_name(server: FileServer, tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match="run: headrace pull acme/tiny"):
        find_model("acme/tiny")
    lines: list[str] = []
    path = pull_from_hub(TINY, report=lines.append)
    assert open_model(path).spec == open_model(tiny_folder).spec
    assert not {"pytorch_model.bin", "modeling_tiny.py", "README.md"} & {each.name for each in path.iterdir()}
    assert find_model("acme/tiny") == path
    assert list(downloaded_models()) == [("acme/tiny", path)]
    assert lines[0].startswith("acme/tiny: ")
    assert pull_from_hub(TINY, offline=True) == path


def test_the_configuration_comes_last(server: FileServer) -> None:
    pull_from_hub(TINY)
    got = [path.rpartition("/")[2] for method, path, _ in server.asked if method == "GET" and "/resolve/" in path]
    assert got[-1] == "config.json"
    assert "model.safetensors" in got


def test_a_download_that_breaks_off_resumes(server: FileServer, hub: Hub) -> None:
    hub.files["tiny.Q8_0.gguf"] = GGUF + bytes(12_000_000)  # the client keeps what it has in pieces of 10 MiB
    server.cuts["/acme/tiny/resolve/main/tiny.Q8_0.gguf"] = 13_000_000
    path = pull_from_hub(HubName("acme/tiny", "q8_0"))
    assert path.read_bytes() == hub.files["tiny.Q8_0.gguf"]
    ranges = [each[2] for each in server.asked if each[0] == "GET" and each[1].endswith(".gguf")]
    assert ranges == ["", f"bytes={10 * 2**20}-"]
    assert local_model("acme/tiny:Q8_0") == path


def test_a_file_that_is_not_what_the_hub_promises_is_deleted(server: FileServer, hub: Hub) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.wrong = {name}
        with pytest.raises(DownloadError, match=f"'{name}' is not what the hub promises"):
            pull_from_hub(TINY)
        assert local_model("acme/tiny") is None
    hub.wrong.clear()
    assert pull_from_hub(TINY) == local_model("acme/tiny")


def test_several_gguf_files_need_a_choice(server: FileServer, hub: Hub) -> None:
    hub.files = {"a.Q4_K_M.gguf": GGUF, "a.Q8_0.gguf": GGUF, "README.md": b"#"}
    with pytest.raises(RequestError, match=r"several GGUF files. Add one of them after a colon: a.Q4_K_M.gguf, a.Q8"):
        pull_from_hub(TINY)
    with pytest.raises(RequestError, match="No GGUF file of 'acme/tiny' matches 'Q2'"):
        pull_from_hub(HubName("acme/tiny", "Q2"))
    pull_from_hub(HubName("acme/tiny", "Q4_K_M"))
    assert [name for name, _ in downloaded_models()] == ["acme/tiny:a.Q4_K_M.gguf"]
    assert local_model("acme/tiny:Q8_0") is None


def test_all_files_of_a_split_gguf_model_are_downloaded(server: FileServer, hub: Hub) -> None:
    shards = [f"Q4/a.Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.files = {"a.Q8_0.gguf": GGUF, **{each: GGUF[:2000] + each.encode() for each in shards}}
    with pytest.raises(RequestError, match=r"several GGUF files.* a.Q8_0.gguf, Q4/a.Q4_K_M-00001-of-00003.gguf\."):
        pull_from_hub(TINY)
    for wanted in ("Q4_K_M", *shards):
        path = pull_from_hub(HubName("acme/tiny", wanted))
        assert str(path).endswith(shards[0])
        assert [(path.parents[1] / each).exists() for each in shards] == [True] * 3
        assert local_model(f"acme/tiny:{wanted}") == path
    assert [name for name, _ in downloaded_models()] == [f"acme/tiny:{shards[0]}"]
    got = [each[1].rpartition("/")[2] for each in server.asked if each[0] == "GET" and "/resolve/" in each[1]]
    assert got == ["a.Q4_K_M-00003-of-00003.gguf", "a.Q4_K_M-00002-of-00003.gguf", "a.Q4_K_M-00001-of-00003.gguf"]
    path.unlink()
    assert list(downloaded_models()) == []  # what was interrupted does not look complete
    del hub.files[shards[1]]
    with pytest.raises(DownloadError, match=r"lacks Q4/a.Q4_K_M-00002-of-00003.gguf"):
        pull_from_hub(HubName("acme/tiny", "Q4_K_M"))


def test_a_model_that_can_only_be_unpickled_is_refused(server: FileServer, hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(RequestError, match="neither safetensors"):
        pull_from_hub(TINY)


def test_what_the_hub_does_not_have_is_said_in_one_line(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "acme/absent"]) == FAILED
    line = capsys.readouterr().err.strip()
    assert "has no model 'acme/absent' that you may read" in line
    assert "\n" not in line
    assert main(["pull", "acme/tiny", "--offline"]) == FAILED
    assert main(["pull", "/tmp"]) == WRONG_USAGE


def test_the_command_prints_the_path_and_how_to_serve(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "acme/tiny"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(local_model("acme/tiny"))
    assert "headrace serve acme/tiny" in printed.err
    assert main(["models", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (listed["acme/tiny"]["precision"], listed["acme/tiny"]["fits"]) == ("bf16", True)
    assert {"mini", "draft"} <= set(listed)
    assert main(["models"]) == 0
    assert "acme/tiny" in capsys.readouterr().out


def test_a_server_pulls_what_is_missing_if_it_may(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from headrace.cli.serving.pull import pull_missing
    from headrace.cli.serving.server_start import served_name

    assert main(["serve", "acme/tiny", "--port", "0"]) == WRONG_USAGE
    assert "headrace pull acme/tiny" in capsys.readouterr().err
    pull_missing(
        Config(models={"t": ModelConfig(path="acme/tiny"), "m": ModelConfig(path="mini")}), Console(quiet=True)
    )
    assert local_model("acme/tiny") is not None
    assert served_name("acme/tiny") == "tiny"
    assert served_name("mini") is None
    assert served_name("pypi:Llm_Smol") == "llm-smol"


def test_an_interrupted_download_is_not_taken_for_a_model(server: FileServer) -> None:
    path = pull_from_hub(TINY)
    (path / "config.json").unlink()
    assert local_model("acme/tiny") is None
    shutil.rmtree(path)
    assert list(downloaded_models()) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("acme/tiny", HubName("acme/tiny")),
        ("acme/tiny:a/b.gguf", HubName("acme/tiny", "a/b.gguf")),
        ("acme/..", None),
        ("acme/tiny:../x", None),
        ("a/b/c", None),
        ("own er/x", None),
    ],
)
def test_names(name: str, found: HubName | None) -> None:
    assert hub_name(name) == found
