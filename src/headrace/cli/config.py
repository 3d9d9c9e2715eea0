"""`headrace config`: checks a configuration, shows the effective one, and writes a new file.

headrace.config.loader reads files and headrace.config.toml_text writes them; `init` copies config_template.toml.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cyclopts import App

from headrace.config import ConfigError, ConfigProblem
from headrace.config.loader import CONFIG_FILE, find_config_file
from headrace.config.toml_text import config_toml
from headrace.lab.techniques import explain, turned_off
from headrace.server.config_checks import load_config, read_declared

TEMPLATE: Final = Path(__file__).with_name("config_template.toml")

config = App(
    name="config",
    help="Check the server's configuration, show the effective one, or write a new file.",
    version_flags=[],
)


@config.command
def check(file: Path | None = None, /, *, file_only: bool = False) -> None:
    """Check a configuration and what it needs of this machine, and print every mistake.

    It opens the models' folders, and looks for extras, environment variables and the storage folder. It loads no
    weights and connects to nothing.

    Parameters
    ----------
    file
        File to check. Default: $HEADRACE_CONFIG, else ./headrace.toml.
    file_only
        Check no models, extras, storage folder and shared stores, which another machine may have.
    """
    found = find_config_file(file, os.environ)
    from headrace.server.deployment_checks import check_deployment

    try:
        declared = read_declared(file, environ=os.environ, check=None if file_only else check_deployment)
    except ConfigError as error:
        print(*error.mistakes, sep="\n")
        count = "1 mistake" if len(error.mistakes) == 1 else f"{len(error.mistakes)} mistakes"
        raise ConfigError(ConfigProblem(str(found or "the configuration"), "", count), path=found) from None
    if declared.safety.lossless_only:
        print(*explain(declared), sep="\n", end="\n" if turned_off(declared) else "")
    print("The configuration is valid (no file, defaults only)" if found is None else f"{found} is valid")


@config.command
def show(file: Path | None = None, /) -> None:
    """Print the effective configuration: file, environment and defaults. Secrets are hidden.

    Parameters
    ----------
    file
        File to read. Default: $HEADRACE_CONFIG, else ./headrace.toml.
    """
    print(config_toml(load_config(file, environ=os.environ)), end="")


@config.command
def init(file: Path = Path(CONFIG_FILE), /) -> None:
    """Write a new configuration file with every key, its meaning and its default. Never overwrites a file.

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
            ConfigProblem(str(file), "", "the file already exists and was not changed"), path=file
        ) from None
    print(f"Wrote {file}")
