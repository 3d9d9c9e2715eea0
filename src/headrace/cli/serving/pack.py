"""`headrace pack`: pack models' weights into the cache folder, so that no start of a server has to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.cli.serving.loading_bars import LoadingBars
from headrace.config import variants_of
from headrace.config.loader import find_config_file
from headrace.engine.executors.default_sizes import usable_cores
from headrace.engine.executors.memory import gib
from headrace.errors import RequestError
from headrace.models.pack_ahead import PackedWeights, pack_ahead
from headrace.models.weight_cache import cache_folder
from headrace.server.config_checks import load_config
from headrace.variant import DEFAULT_MODEL, Variant


def pack(
    model: str | None = None,
    /,
    *,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    weights: str | None = None,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    check: Annotated[bool, Parameter(negative="")] = False,
    json: bool = False,
) -> None:
    """Pack the weights of models into the cache folder, so that a server starts without packing them.

    Usage: headrace pack path/to/model --weights int4, or headrace pack --config headrace.toml

    Run it when you build an image or deploy a model. Without a model, it packs all that the configuration serves: every
    variant, draft models, prediction modules and image parts. What is packed already stays as it is. The cache folder
    is HEADRACE_CACHE, by default ~/.cache/headrace.

    Parameters
    ----------
    model
        Model folder, GGUF file, bundled or downloaded model.
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists and you name no model.
    weights
        Precision of the weights, as in headrace serve.
    threads
        Threads to pack with. Default: the machine's cores.
    check
        Pack nothing; the exit code is 1 if something is missing.
    json
        Print one JSON list instead of lines.
    """
    if threads is not None and threads < 1:
        raise RequestError(f"--threads must be at least 1, not {threads}.", parameter="threads")
    variants = list(_variants(model, config, weights))
    cache = cache_folder()
    console = Console(stderr=True)
    found: list[PackedWeights] = []
    try:
        with LoadingBars(console, shown=console.is_terminal and not check) as bars:
            packing = pack_ahead(variants, cache, threads=threads or usable_cores(), check=check, progress=bars.show)
            for each in packing:
                found.append(each)
                if each.state == "unread":
                    print(f"{each.model} reads no images. {each.reason}", file=sys.stderr)
                elif not json:
                    print(f"{each.model} at {each.weights}: {_STATES[each.state]}, {gib(each.bytes)}, {each.path}")
    except OSError as error:
        raise OSError(
            f"Cannot write to the cache folder {cache}: {error.strerror or error}. Set HEADRACE_CACHE to a folder that "
            "you can write, and to the same one where you start the server."
        ) from None
    if json:
        print(msgspec.json.encode(found).decode())
    if any(each.state == "missing" for each in found):
        sys.exit(1)


_STATES = {"packed": "packed", "there": "packed before", "missing": "not packed"}


def _variants(model: str | None, config: Path | None, weights: str | None) -> Iterator[Variant]:
    if model is not None and config is not None:
        raise RequestError("Name a model or pass --config, not both.")
    file = None if model is not None else find_config_file(config, os.environ)
    if file is None:
        yield Variant.of(model or DEFAULT_MODEL, **({} if weights is None else {"weights": weights}))
        return
    if weights is not None:
        raise RequestError("--weights belongs to a model. For models in the configuration, set it there.")
    loaded = load_config(file, environ=os.environ)
    own = [each for name, one in loaded.models.items() for each in variants_of(name, one, loaded.surfaces).values()]
    if not own:
        raise RequestError(f"{file} has no model that an engine of Headrace serves, so there is nothing to pack.")
    yield from (each for each in own if each.cache)
