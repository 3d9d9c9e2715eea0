"""Imports libraries of a server without their parts that a server does not use, so that it starts sooner.

Called before anything else imports them. Changes no result. Imports next to nothing itself: see `headrace.__main__`.
"""

import gc
import os
import sys
from types import ModuleType

ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy computes next to nothing: the core has threads of its own


def import_for_server() -> None:
    """Import structlog without rich, prometheus_client without its servers and numpy without threads, and collect no
    garbage until `process_settings.keep_what_is_loaded`: nothing that a start imports is garbage."""
    gc.disable()
    _import_structlog()
    _import_prometheus_client()
    _import_numpy()


def _import_structlog() -> None:
    # It would import rich, and pygments with it, to format tracebacks; ours are plain (observe/logs.py). It would
    # import colorama, which it uses on Windows alone.
    blocked = [each for each in ("rich", "colorama") if each not in sys.modules]
    if len(blocked) < 2 or "structlog" in sys.modules:
        return
    for each in blocked:
        sys.modules[each] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        for each in blocked:
            del sys.modules[each]


class _UnusedModule(ModuleType):
    """Has every name, as an empty class that others may inherit."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _import_prometheus_client() -> None:
    # Its own HTTP server and its client of gateways, which nothing here uses, would import Python's HTTP and e-mail.
    unused = [each for each in ("http.server", "urllib.request", "wsgiref.simple_server") if each not in sys.modules]
    if len(unused) < 3 or "prometheus_client" in sys.modules:
        return
    for each in unused:
        sys.modules[each] = _UnusedModule(each)
    try:
        import prometheus_client  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        for each in unused:
            del sys.modules[each]


def _import_numpy() -> None:
    # Only while numpy is imported: the engines of others, which this process may start, keep their own setting.
    added = {name: value for name, value in ONE_BLAS_THREAD.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import numpy  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        for name in added:
            del os.environ[name]
