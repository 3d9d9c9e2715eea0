"""ImageMemory: holds the features of an image once for all requests that have it, and bounds the bytes of all.

Features stay as long as a request that has them: a request that is preempted computes its prompt again. What was
counted is given back when the last such request is freed, in whichever thread. Does not know engines or clients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import msgspec

from headrace.engine.interface.image_rows import ImageRows


class _Held:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.uses = 0


class ImageMemory:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: dict[tuple[bytes, int], _Held] = {}  # by the image's digest and its tokens
        self._uses: dict[int, weakref.ref[ImageRows]] = {}
        self._lock = threading.RLock()  # a callback may come in the middle of an addition
        self.bytes = 0

    def shared(self, images: Sequence[ImageRows]) -> tuple[ImageRows, ...] | None:
        """Return images with the features that are held already in place of equal ones, or None if the others have no
        room. One request always has room if no other has images."""
        with self._lock:
            fresh: dict[tuple[bytes, int], bytes] = {}  # an image may come twice in a request
            found = tuple(self._known(image, fresh) for image in images)
            new = {id(each.data): len(each.data) for each in found if not self._is_held(each)}
            if self.bytes and self.bytes + sum(new.values()) > self._most:
                return None
            for each in found:
                self._hold(each)
            return found

    def _known(self, image: ImageRows, fresh: dict[tuple[bytes, int], bytes]) -> ImageRows:
        key = (image.digest, image.count)
        held = self._held.get(key)
        known = fresh.setdefault(key, image.data) if held is None else held.data
        # Encoders on hosts with other instruction sets round differently, so bytes are compared.
        data = known if known == image.data else image.data
        return msgspec.structs.replace(image, data=data)

    def _is_held(self, image: ImageRows) -> bool:
        held = self._held.get((image.digest, image.count))
        return held is not None and held.data is image.data

    def _hold(self, image: ImageRows) -> None:
        key = (image.digest, image.count)
        held = self._held.get(key)
        if held is None or held.data is not image.data:
            held = self._held[key] = _Held(image.data)
            self.bytes += len(image.data)
        held.uses += 1
        number = id(image)
        self._uses[number] = weakref.ref(image, lambda _: self._release(number, key, held))

    def _release(self, number: int, key: tuple[bytes, int], held: _Held) -> None:
        with self._lock:
            self._uses.pop(number, None)
            held.uses -= 1
            if held.uses:
                return
            self.bytes -= len(held.data)
            if self._held.get(key) is held:
                del self._held[key]
