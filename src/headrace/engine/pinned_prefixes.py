"""Pinned prefixes of a running engine: computed when they are pinned, kept, and saved so that they outlive the process.

Owns PinnedPrefixes: who waits for which prefix, and the file. What a pin holds is the blocks' matter, the file's format
prefix_file's.
"""

from __future__ import annotations

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

PinCallback = Callable[[str | None], None]  # why it could not be done; None: it is

_MARK: Final = "pin."  # begins the ids of the requests by which prefixes are computed


class PinnedPrefixes:
    def __init__(self, engine: Engine, folder: Path | None = None, identity: KvIdentity | None = None) -> None:
        """`folder`: where to save them; None: they live as long as the process."""
        self._engine = engine
        self._identity = identity
        self._path = None
        if folder is not None and identity is not None:
            # One file for each kind of KV: variants may share the folder.
            self._path = (
                folder / f"{identity.model[:16]}-{re.sub(r'[^a-z0-9]', '', identity.kv)}-{identity.isa}.prefixes"
            )
        self._numbers = itertools.count()
        self._waiting: dict[str, PinCallback] = {}
        self.restored_tokens = 0

    def restore(self) -> None:
        """Puts back what was saved; a file that does not fit is left alone, with a word in the log."""
        if self._path is None or self._identity is None or not self._path.exists():
            return
        try:
            loaded = load_pinned(self._path, self._identity, self._engine.blocks, self._engine.executor.write_block)
        except (PrefixFileError, OtherKvError) as error:
            log.warning("saved prefixes are not used: %s", error)
            return
        self.restored_tokens = loaded.tokens
        for why in loaded.left_out:
            log.warning("a saved prefix is left out: %s", why)

    def pin(self, tokens: Sequence[int], salt: str, told: PinCallback, *, public: bool = False) -> None:
        """Keeps a prefix, and computes what of it is not there; `told` is called once that is done, or is not."""
        blocks = self._engine.blocks
        if public:
            blocks.declare_public(tokens)
        computed = blocks.pin(tokens, salt)
        whole = len(tokens) // blocks.block_tokens * blocks.block_tokens
        if computed >= whole:
            self._done(None, told)
            return
        id = f"{_MARK}{next(self._numbers)}"
        # An answer of one token: its prompt is computed, and nothing is sampled from it that anybody sees.
        try:
            admission = self._engine.submit(GenerationRequest(id=id, prompt=tuple(tokens), max_tokens=1, salt=salt))
        except HeadraceError:
            blocks.unpin(tokens, salt)
            raise
        if not admission.accepted:
            blocks.unpin(tokens, salt)
            raise RequestError(admission.why, parameter="pin")
        self._waiting[id] = told

    def unpin(self, tokens: Sequence[int], salt: str) -> None:
        if not self._engine.blocks.unpin(tokens, salt):
            raise RequestError("this prefix is not pinned", parameter="pin")
        self._save()

    def takes(self, output: SequenceOutput) -> bool:
        """Whether an output is of a prefix that is computed to be pinned; nobody else wants it then."""
        told = self._waiting.get(output.request)
        if told is None:
            return False
        if output.ending is not None:
            del self._waiting[output.request]
            self._done(output.ending.why or None, told)
        return True

    def _done(self, why: str | None, told: PinCallback) -> None:
        if why is None:
            try:
                self._save()
            except (OSError, HeadraceError) as error:
                why = f"pinned, but not saved: {error}"
        told(why)

    def _save(self) -> None:
        if self._path is not None and self._identity is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_pinned(self._path, self._identity, self._engine.blocks, self._engine.executor.read_block)
