"""Secrets that the configuration names by environment variable. Holds no values itself."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config import ConfigError


def required_secret(environ: Mapping[str, str], variable: str, key: str) -> str:
    """Return the variable's value. ConfigError, which names the configuration `key`, where it is unset or empty."""
    value = environ.get(variable)
    if not value:
        raise ConfigError(f"{key}: The environment variable {variable} is not set or empty. Set it before you start.")
    return value
