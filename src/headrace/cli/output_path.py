"""Checks the path of a command's result before the command does its work."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import RequestError


def check_output_folder(path: Path | None, parameter: str) -> None:
    """Raise RequestError if the folder of a file to write does not exist. `-` stands for the standard output."""
    if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
        raise RequestError(f"The folder of {path} does not exist. Create it first.", parameter=parameter)
