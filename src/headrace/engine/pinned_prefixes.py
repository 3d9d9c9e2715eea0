"""Pinned prefixes of a running engine: computes, keeps and saves them so that they survive a restart.

What a pin holds is up to `memory/block_manager.py`; the file format is in `memory/prefix_file.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from headrace.engine.engine import Engine
from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.memory.prefix_file import KvIdentity, OtherKvError, PrefixFileError, load_pinned, save_pinned
from headrace.errors import HeadraceError, RequestError

log = logging.getLogger(__name__)

PinCallback = Callable[[str | None], None]  # receives None on success, else the reason

_MARK: Final = "pin."  # prefix of the ids of the requests that compute prefixes


class PinnedPrefixes:
    def __init__(self, engine: Engine, folder: Path | None = None, identity: KvIdentity | None = None) -> None:
        """`folder` is where prefixes are saved; None keeps them only as long as the process lives."""
        self._engine = engine
        self._identity = identity
        self._path = None
        if folder is not None and identity is not None:
            # One file for each kind of KV, because variants may share the folder.
            kind = hashlib.sha256(f"{identity.weights} {identity.block_tokens}".encode()).hexdigest()[:8]
            kv = re.sub(r"[^a-z0-9]", "", identity.kv)
            self._path = folder / f"{identity.model[:16]}-{kv}-{identity.arithmetic}-{kind}.prefixes"
        self._numbers = itertools.count()
        self._waiting: dict[str, PinCallback] = {}
        self.restored_tokens = 0

    def restore(self) -> None:
        """Restore the saved prefixes. A file that does not fit is left alone and logged."""
        if self._path is None or self._identity is None or not self._path.exists():
            return
        try:
            loaded = load_pinned(self._path, self._identity, self._engine.blocks, self._engine.executor.write_block)
        except (PrefixFileError, OtherKvError) as error:
            log.warning("saved prefixes are ignored: %s", error)
            return
        self.restored_tokens = loaded.tokens
        for why in loaded.left_out:
            log.warning("a saved prefix was not restored: %s", why)

    def pin(self, tokens: Sequence[int], salt: str, on_done: PinCallback, *, public: bool = False) -> None:
        """Keep a prefix and compute what is missing of it. `on_done` is called with None when that is done, else with
        the reason."""
        blocks = self._engine.blocks
        if not blocks.reuses:
            raise RequestError("This variant reuses no prefixes, so it cannot pin one.", parameter="pin")
        if public:
            blocks.declare_public(tokens)
        computed = blocks.pin(tokens, salt)
        whole = len(tokens) // blocks.block_tokens * blocks.block_tokens
        if computed >= whole:
            self._done(None, on_done)
            return
        id = f"{_MARK}{next(self._numbers)}"
        # Generate one token, which nobody sees, so that the prompt is computed.
        try:
            admission = self._engine.submit(GenerationRequest(id=id, prompt=tuple(tokens), max_tokens=1, salt=salt))
        except HeadraceError:
            blocks.unpin(tokens, salt)
            raise
        if not admission.accepted:
            blocks.unpin(tokens, salt)
            raise RequestError(admission.why, parameter="pin")
        self._waiting[id] = on_done

    def unpin(self, tokens: Sequence[int], salt: str) -> None:
        if not self._engine.blocks.unpin(tokens, salt):
            raise RequestError("This prefix is not pinned.", parameter="pin")
        self._save()

    def takes(self, output: SequenceOutput) -> bool:
        """Return whether an output belongs to a prefix that is being computed for a pin. If so, no client waits for
        it."""
        on_done = self._waiting.get(output.request)
        if on_done is None:
            return False
        if output.ending is not None:
            del self._waiting[output.request]
            self._done(output.ending.why or None, on_done)
        return True

    def _done(self, why: str | None, on_done: PinCallback) -> None:
        if why is None:
            try:
                self._save()
            except (OSError, HeadraceError) as error:
                why = f"pinned, but not saved: {error}"
        on_done(why)

    def _save(self) -> None:
        if self._path is not None and self._identity is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_pinned(self._path, self._identity, self._engine.blocks, self._engine.executor.read_block)
