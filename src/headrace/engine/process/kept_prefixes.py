"""KeptPrefixes: the prefixes that every replica of a client keeps in its memory, those that connect later too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.engine.process import wire
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.submission import Replica
from headrace.engine.process.worker_questions import WorkerQuestions
from headrace.errors import HeadraceError, RequestError

Key = tuple[str, tuple[int, ...]]  # salt and tokens


class KeptPrefixes:
    """A prefix is kept as long as one of its owners wants it. To keep it twice for one owner changes nothing."""

    def __init__(self, questions: WorkerQuestions, connected: Callable[[], list[Replica]]) -> None:
        self._questions = questions
        self._connected = connected
        self._kept: dict[Key, dict[str, bool]] = {}  # by owner: whether it is public

    async def keep(self, tokens: Sequence[int], salt: str, *, public: bool, owner: str = "") -> None:
        """Return when every connected replica has computed the prefix. A replica that connects later, such as one that
        was restarted, computes it then. RequestError if a replica rejects it; then none keeps it for this owner."""
        key = salt, tuple(tokens)
        self._kept.setdefault(key, {})[owner] = public
        try:
            await self._tell(key, public=public, keep=True)
        except RequestError:
            if self._forget(key, owner):
                with suppress(HeadraceError):  # a replica that has rejected it does not have it
                    await self._tell(key, public=False, keep=False)
            raise

    async def drop(self, tokens: Sequence[int], salt: str, *, owner: str = "") -> None:
        """Stop keeping a prefix for an owner. RequestError if it is not kept for it."""
        key = salt, tuple(tokens)
        if owner not in self._kept.get(key, {}):
            raise RequestError("This prefix is not pinned.", parameter="pin")
        if self._forget(key, owner):
            await self._tell(key, public=False, keep=False)

    async def keep_all_of(self, other: KeptPrefixes) -> None:
        for (salt, tokens), owners in list(other._kept.items()):
            for owner, public in list(owners.items()):
                await self.keep(tokens, salt, public=public, owner=owner)

    def _forget(self, key: Key, owner: str) -> bool:
        """Return whether this was the last owner of a kept prefix."""
        owners = self._kept.get(key, {})
        if owners.pop(owner, None) is None or owners:
            return False
        del self._kept[key]
        return True

    def _is_needed(self, replica: Replica, key: Key) -> bool:
        """Return whether a replica keeps the same blocks for another prefix. It keeps whole blocks only."""
        salt, tokens = key
        block = 1 if replica.welcome is None else replica.welcome.block_tokens
        whole = len(tokens) // block * block
        return any(
            other == salt and len(kept) // block * block == whole and kept[:whole] == tokens[:whole]
            for other, kept in self._kept
        )

    def send_all(self, replica: Replica) -> None:
        """Have a replica that has just connected keep them. Does not wait until it has computed them."""
        for key, owners in self._kept.items():
            if replica.connection is not None:
                number = self._questions.next_number()
                replica.connection.send(_message(number, key, public=any(owners.values()), keep=True))

    async def _tell(self, key: Key, *, public: bool, keep: bool) -> None:
        def message(number: int) -> wire.Pin:
            return _message(number, key, public=public, keep=keep)

        replicas = [each for each in self._connected() if keep or not self._is_needed(each, key)]
        replies = await asyncio.gather(
            *(self._questions.ask(replica, message, patient=keep) for replica in replicas),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, WorkerLostError) and key in self._kept:
                continue  # the worker that replaces it computes the prefix
            if isinstance(reply, BaseException):
                raise reply
            if reply.reason is not None and keep:
                raise RequestError(reply.reason, parameter="pin")


def _message(number: int, key: Key, *, public: bool, keep: bool) -> wire.Pin:
    salt, tokens = key
    return wire.Pin(number=number, tokens=tokens, salt=salt, public=public, keep=keep)
