"""The errors that Headrace raises on purpose, in any layer.

A message says what is wrong, where, what was expected and what to do. Any other exception that escapes is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose. Its message is fit to show to a user."""


class ModelError(HeadraceError):
    """The model cannot be loaded: a wrong, corrupt or hostile file, or an unsupported architecture."""

    def __init__(self, reason: str, *, path: Path | str | None = None, tensor: str | None = None) -> None:
        self.reason = reason
        self.path = None if path is None else str(path)
        self.tensor = tensor
        where = "" if path is None else f"{path}: "
        what = "" if tensor is None else f"tensor '{tensor}': "
        super().__init__(f"{where}{what}{reason}")


class InsufficientMemoryError(HeadraceError):
    """A model needs more memory than is available."""


class TemplateError(ModelError):
    """A chat template is invalid, tries to escape its sandbox, or exceeds its limits."""


class RequestError(HeadraceError):
    """A request is invalid; `parameter` names the offending input."""

    def __init__(self, reason: str, *, parameter: str | None = None) -> None:
        self.parameter = parameter
        super().__init__(reason)


class DownloadError(HeadraceError):
    """A download failed, or what came is not what was promised."""


def similar_names(name: str, known: Sequence[str], *, most: int = 1, cutoff: float = 0.7) -> list[str]:
    """Return the known names that a wrong one may mean, the most similar first. `cutoff`: 0 is any, 1 the same."""
    import difflib  # milliseconds of every start, for names that are seldom wrong

    return difflib.get_close_matches(name, known, n=most, cutoff=cutoff)
