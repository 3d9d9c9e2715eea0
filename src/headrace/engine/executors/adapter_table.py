"""The adapters that an executor holds: loaded beside running steps, and evicted when others need their memory.

Does not know which requests have which adapter: whoever uses one holds it, and a held adapter is never evicted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
import numpy as np

import headrace._core as _core
from headrace.engine.interface.request import AdapterRef
from headrace.errors import HeadraceError, ModelError
from headrace.models.adapters.adapter_folder import (
    AdapterWeights,
    ProductPart,
    adapter_digest,
    panel_columns,
    product_of,
    read_adapter,
)
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import CoreTensor
from headrace.models.precision import WeightFormat

MOST_LOADED: Final = 4096

AdapterFormat = Literal["f32", "bf16", "int8"]


def adapter_format(base: WeightFormat) -> AdapterFormat:
    """Return the format of adapters beside a base model's weights."""
    return base if base in ("f32", "bf16") else "int8"


class AdapterMemoryError(HeadraceError):
    """The adapters that requests use now leave no memory for another."""


class _Loaded(msgspec.Struct):
    core: _core.Adapter
    bytes: int
    held: int = 0  # sequences that use it


class AdapterTable:
    def __init__(
        self,
        folder: ModelFolder,
        model: _core.Model,
        tensors: Mapping[str, CoreTensor],
        *,
        format: AdapterFormat,
        most_bytes: int,
    ) -> None:
        """`format`: of the weights that are kept. `most_bytes`: of all adapters together."""
        self._folder = folder
        self._model = model
        self._tensors = tensors
        self._format: AdapterFormat = format
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # the loading thread adds and evicts, the engine's holds and releases
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # by digest, least recently used first
        self._loading: dict[str, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._loads = 0
        self._evictions = 0

    def load(self, ref: AdapterRef) -> Future[None]:
        """Load an adapter on a thread of its own, unless it is there. The future raises HeadraceError if it fails."""
        with self._lock:
            if ref.digest in self._loaded:
                done = Future[None]()
                done.set_result(None)
                return done
            loading = self._loading.get(ref.digest)
            if loading is None:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "headrace-adapter")
                loading = self._loading[ref.digest] = self._thread.submit(self._load, ref)
            return loading

    def has(self, ref: AdapterRef) -> bool:
        return ref.digest in self._loaded

    def hold(self, ref: AdapterRef, times: int = 1) -> bool:
        """Keep an adapter in memory until it is released as often. Return False if it is not loaded."""
        with self._lock:
            loaded = self._loaded.get(ref.digest)
            if loaded is None:
                return False
            loaded.held += times
            self._loaded.move_to_end(ref.digest)
            return True

    def release(self, ref: AdapterRef, times: int = 1) -> None:
        with self._lock:
            self._loaded[ref.digest].held -= times

    def core(self, ref: AdapterRef) -> _core.Adapter:
        return self._loaded[ref.digest].core

    def drop(self, digest: str) -> None:
        """Free an adapter that nothing uses. One that is in use stays until it is evicted."""
        with self._lock:
            loaded = self._loaded.get(digest)
            if loaded is not None and not loaded.held:
                del self._loaded[digest]

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "loaded": len(self._loaded),
                "bytes": sum(each.bytes for each in self._loaded.values()),
                "most_bytes": self._most_bytes,
                "in_use": sum(each.held > 0 for each in self._loaded.values()),
                "loads": self._loads,
                "evictions": self._evictions,
            }

    def digests(self) -> list[str]:
        return list(self._loaded)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _load(self, ref: AdapterRef) -> None:
        try:
            path = Path(ref.path)
            if adapter_digest(path, cache=False) != ref.digest:
                raise ModelError(
                    f"The files of the adapter '{ref.name}' are not those that it was registered with. Load it again "
                    "under /admin/v1/models, or restart the server.",
                    path=path,
                )
            core = pack_adapter(self._model, read_adapter(path, self._folder), self._tensors, format=self._format)
            with self._lock:
                self._make_room(core.bytes, ref)
                self._loaded[ref.digest] = _Loaded(core, core.bytes)
                self._loads += 1
        finally:
            with self._lock:
                del self._loading[ref.digest]

    def _make_room(self, needed: int, ref: AdapterRef) -> None:
        if needed > self._most_bytes:
            raise ModelError(
                f"The adapter '{ref.name}' needs {needed} bytes of memory, and adapter_memory_bytes is "
                f"{self._most_bytes}. Raise it.",
                path=ref.path,
            )
        total = sum(each.bytes for each in self._loaded.values())
        for digest, each in list(self._loaded.items()):
            if total + needed <= self._most_bytes and len(self._loaded) < MOST_LOADED:
                return
            if not each.held:
                del self._loaded[digest]
                self._evictions += 1
                total -= each.bytes
        if total + needed > self._most_bytes:
            raise AdapterMemoryError(
                f"The adapters in use fill the {self._most_bytes} bytes of adapter_memory_bytes. Retry later."
            )


def pack_adapter(
    model: _core.Model, weights: AdapterWeights, tensors: Mapping[str, CoreTensor], *, format: AdapterFormat
) -> _core.Adapter:
    """Lay an adapter out for the core. Modules of one product share a pass over its rows."""
    products: dict[str, list[ProductPart]] = {}
    for part in weights.parts:
        products.setdefault(part.tensor, []).append(part)
    adapter = _core.Adapter(model, format)
    for tensor, parts in products.items():
        found = product_of(tensor)
        packed = tensors[tensor]
        assert found is not None, tensor
        assert isinstance(packed, _core.Packed), tensor
        layer, name = found
        parts.sort(key=lambda part: part.rows.start)
        columns = [panel_columns(part) for part in parts]
        magnitudes = None
        if any(part.magnitudes is not None for part in parts):
            base = packed.unpack()
            magnitudes = np.ones(len(base), dtype=np.float32)
            for part, places in zip(parts, columns, strict=True):
                if part.magnitudes is not None:
                    changed = base[places] + part.up @ part.down
                    magnitudes[places] = part.magnitudes / np.linalg.norm(changed, axis=1)
        adapter.add(
            layer,
            cast("Literal['qkv', 'o', 'up', 'down', 'in', 'out']", name),
            np.ascontiguousarray(np.concatenate([part.down for part in parts])),
            [(places, np.ascontiguousarray(part.up)) for part, places in zip(parts, columns, strict=True)],
            magnitudes,
        )
    return adapter
