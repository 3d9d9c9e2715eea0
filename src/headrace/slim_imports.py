"""Imports libraries of a server without their parts that a server does not use, so that it starts sooner.

Called before anything else imports them. Changes no result. Imports next to nothing itself: see `headrace.__main__`.
"""

import gc
import os
import sys

ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy computes next to nothing: the core has threads of its own


def import_for_server() -> None:
    """Import structlog without rich and numpy without threads, and collect no garbage until
    `process_settings.keep_what_is_loaded`: nothing that a start imports is garbage."""
    gc.disable()
    _import_structlog()
    _import_numpy()


def _import_structlog() -> None:
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    # It would import rich, and pygments with it, to format tracebacks; ours are plain (observe/logs.py).
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        del sys.modules["rich"]


def _import_numpy() -> None:
    # Only while numpy is imported: the engines of others, which this process may start, keep their own setting.
    added = {name: value for name, value in ONE_BLAS_THREAD.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import numpy  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        for name in added:
            del os.environ[name]
