"""KeptPrefixes: the prefixes that every replica of a client keeps in its memory, those that connect later too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.engine.process import wire
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.submission import Replica
from headrace.engine.process.worker_questions import WorkerQuestions
from headrace.errors import RequestError

Key = tuple[str, tuple[int, ...]]  # salt and tokens


class KeptPrefixes:
    def __init__(self, questions: WorkerQuestions, connected: Callable[[], list[Replica]]) -> None:
        self._questions = questions
        self._connected = connected
        self._kept: dict[Key, bool] = {}  # whether it is public

    async def keep(self, tokens: Sequence[int], salt: str, *, public: bool) -> None:
        """Return when every connected replica has computed the prefix. A replica that connects later, such as one that
        was restarted, computes it then. RequestError if a replica rejects it; then none keeps it."""
        key = salt, tuple(tokens)
        self._kept[key] = public
        try:
            await self._tell(key, public=public, keep=True)
        except RequestError:
            if self._kept.pop(key, None) is not None:
                for replica in self._connected():
                    self._send(replica, key, keep=False)
            raise

    async def drop(self, tokens: Sequence[int], salt: str) -> None:
        """Stop keeping a prefix. RequestError if it is not kept."""
        key = salt, tuple(tokens)
        if self._kept.pop(key, None) is None:
            raise RequestError("This prefix is not pinned.", parameter="pin")
        await self._tell(key, public=False, keep=False)

    async def keep_all_of(self, other: KeptPrefixes) -> None:
        for (salt, tokens), public in list(other._kept.items()):
            await self.keep(tokens, salt, public=public)

    def send_all(self, replica: Replica) -> None:
        """Have a replica that has just connected keep them. Does not wait until it has computed them."""
        for key, public in self._kept.items():
            self._send(replica, key, public=public)

    async def _tell(self, key: Key, *, public: bool, keep: bool) -> None:
        def message(number: int) -> wire.Pin:
            return _message(number, key, public=public, keep=keep)

        replies = await asyncio.gather(
            *(self._questions.ask(replica, message, patient=keep) for replica in self._connected()),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, WorkerLostError) and self._kept.get(key) is not None:
                continue  # the worker that replaces it computes the prefix
            if isinstance(reply, BaseException):
                raise reply
            if reply.reason is not None and keep:
                raise RequestError(reply.reason, parameter="pin")

    def _send(self, replica: Replica, key: Key, *, public: bool = False, keep: bool = True) -> None:
        if replica.connection is not None:
            replica.connection.send(_message(self._questions.next_number(), key, public=public, keep=keep))


def _message(number: int, key: Key, *, public: bool, keep: bool) -> wire.Pin:
    salt, tokens = key
    return wire.Pin(number=number, tokens=tokens, salt=salt, public=public, keep=keep)
