"""Reads YAML with the extra 'yaml'. Tags that create objects, such as !function, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from headrace.errors import RequestError

MOST_BYTES: Final = 16 * 1024 * 1024


def read_yaml(path: Path) -> Any:
    try:
        import yaml  # pyright: ignore
    except ImportError:
        raise RequestError(
            "YAML files need the package 'pyyaml'. Install it with: pip install 'headrace[yaml]'.", parameter="prompts"
        ) from None
    if path.stat().st_size > MOST_BYTES:
        raise RequestError(f"{path} has more than {MOST_BYTES >> 20} MiB.", parameter="prompts")
    loader: Any = yaml  # its types are not installed
    try:
        return loader.safe_load(path.read_text(encoding="utf-8"))
    except (loader.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        if "could not determine a constructor" in text:
            text = f"tags that load code are not supported: {text}"
        raise RequestError(f"{path}: {text}", parameter="prompts") from None
