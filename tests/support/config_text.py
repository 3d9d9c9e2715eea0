"""A configuration from a text, without a file in the current folder."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.config import Config, ConfigError
from headrace.server.config_checks import load_config


def read(text: str, flags: dict[str, Any] | None = None, /, **environ: str) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder, "headrace.toml")
        path.write_text(text, encoding="utf-8")
        return load_config(path, environ=environ, flags=flags)


def mistakes(text: str, **environ: str) -> list[str]:
    """Return the mistakes of a text as those of a file headrace.toml."""
    with pytest.raises(ConfigError) as raised:
        read(text, **environ)
    assert raised.value.path is not None
    return [str(mistake).replace(f"{raised.value.path.parent}/", "") for mistake in raised.value.mistakes]
