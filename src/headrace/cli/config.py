"""`headrace config`: check a configuration, show the one in force, write one to begin with.

Owns the three commands. headrace.config.loader reads a file, headrace.config.toml_text writes one; the
file that `init` writes lies beside this one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cyclopts import App

from headrace.config import ConfigError, ConfigProblem
from headrace.config.loader import CONFIG_FILE, find_config_file
from headrace.config.toml_text import config_toml
from headrace.server.config_checks import load_config

TEMPLATE: Final = Path(__file__).with_name("config_template.toml")

config = App(
    name="config",
    help="Check the server's configuration, show the one in force, or write one to begin with.",
    help_flags=["--help", "-h"],
    version_flags=[],
)


@config.command
def check(file: Path | None = None, /) -> None:
    """Say whether a configuration is fine, or all that is wrong with it.

    Parameters
    ----------
    file
        File to check; the one that HEADRACE_CONFIG names, or ./headrace.toml, by default.
    """
    found = find_config_file(file, os.environ)
    try:
        load_config(file, environ=os.environ)
    except ConfigError as error:
        print(*error.mistakes, sep="\n")
        count = "a mistake" if len(error.mistakes) == 1 else f"{len(error.mistakes)} mistakes"
        raise ConfigError(ConfigProblem(str(found or "the configuration"), "", count), path=found) from None
    print("There is no file, and the configuration is fine" if found is None else f"{found} is fine")


@config.command
def show(file: Path | None = None, /) -> None:
    """Print the configuration in force: the file, the environment over it, and every default. Secrets are hidden.

    Parameters
    ----------
    file
        File to read; the one that HEADRACE_CONFIG names, or ./headrace.toml, by default.
    """
    print(config_toml(load_config(file, environ=os.environ)), end="")


@config.command
def init(file: Path = Path(CONFIG_FILE), /) -> None:
    """Write a configuration to begin with: every key with its meaning and its default. Overwrites nothing.

    Parameters
    ----------
    file
        File to write.
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(TEMPLATE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(
            ConfigProblem(str(file), "", "there is such a file already, and it stays"), path=file
        ) from None
    print(f"Wrote {file}")
