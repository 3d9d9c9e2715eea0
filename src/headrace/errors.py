"""The errors that Headrace raises on purpose.

Owns the root class and the few classes that every layer may raise. A message says what is wrong, where, and, where it
helps, what was expected. Anything else that escapes is a bug.
"""

from __future__ import annotations

from pathlib import Path


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose; its text is fit to show to a user."""


class ModelError(HeadraceError):
    """A model that cannot be served: a wrong, corrupt or hostile file, or an unsupported architecture."""

    def __init__(self, reason: str, *, path: Path | str | None = None, tensor: str | None = None) -> None:
        self.reason = reason
        self.path = None if path is None else str(path)
        self.tensor = tensor
        where = "" if path is None else f"{path}: "
        what = "" if tensor is None else f"tensor '{tensor}': "
        super().__init__(f"{where}{what}{reason}")


class TemplateError(ModelError):
    """A chat template that is wrong, tries to escape its sandbox, or goes past its bounds."""


class RequestError(HeadraceError):
    """A request that cannot be served as it stands; `parameter` names the offending input."""

    def __init__(self, reason: str, *, parameter: str | None = None) -> None:
        self.parameter = parameter
        super().__init__(reason)
