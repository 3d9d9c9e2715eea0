"""Shares one generation among identical requests under way.

Owns Flights (which requests may join which), Flight (one generation and its output) and FlightReader (one request's
position in it). Does not generate or store anything itself.

    source ──▶ flight: one list of deltas ──▶ reader, reader, ...: each at its own position

A reader gets all earlier deltas at once, and then each delta in the turn of the event loop in which it arrives. A slow
reader falls behind in the list and delays no other. The generation belongs to no reader: it ends early only when the
last one has left. Exactly one reader pays for it: the first, and if that one leaves, the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, Protocol

import msgspec
from msgspec.structs import replace

from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta, TokenUsage, combine_usages

log: Final = logging.getLogger(__name__)

_BATCH: Final = 128  # deltas that one reader takes before others have a turn
_TRIM_AT: Final = 256  # deltas read by all, before they are dropped from a list that is too long

Role = Literal["leader", "joiner", "hit", "alone"]


class PieceSource(Protocol):
    """Produces deltas: an engine's answer, or an upstream's."""

    async def run(self, take: TakeDelta) -> bool:
        """Pass deltas to `take` as they come. True once all have; False as soon as `take` returns False."""
        ...

    def cancel(self) -> None:
        """Stop; a `run` under way ends."""
        ...


class ShareableSource(PieceSource, Protocol):
    """A source whose answer may be shared and stored."""

    def keeps(self) -> bool:
        """True if the finished answer is by the variant of the cache key, and so may be stored under it."""
        ...


class AnswerFacts(msgspec.Struct, frozen=True):
    """How an answer came about, for the ledger, headers and metrics. Final once it has been read or left."""

    role: Role
    pays: bool  # for the generation; exactly one of its readers does
    saved: TokenUsage  # what did not have to be computed for this answer
    age_s: float = 0.0  # of a hit


class JoinTerms(msgspec.Struct, frozen=True):
    """When a request runs. A request joins only a generation whose terms are no worse than its own."""

    deadline: float | None = None  # on the monotonic clock
    surface: str = ""
    priority: int = 0
    whole: bool = False  # the client sees only the complete answer, so a broken one may start again

    def as_good_as(self, other: JoinTerms, slack_s: float) -> bool:
        """True if the other request may join. `slack_s`: how much earlier than the other's deadline this one may be."""
        if self.surface != other.surface or self.priority < other.priority:
            return False
        if self.deadline is None or other.deadline is None:
            return self.deadline is other.deadline
        return self.deadline <= other.deadline <= self.deadline + slack_s


class FlightReader:
    """One request's position in a flight. Call `cancel` once it ends, however it ends."""

    __slots__ = ("_at", "_flight", "_later", "_over", "_take", "gone", "role")

    def __init__(self, flight: Flight, role: Role) -> None:
        self.role: Role = role
        self.gone = False
        self._flight = flight
        self._at = 0  # index of the next delta
        self._take: TakeDelta | None = None
        self._over: asyncio.Future[bool] | None = None  # result of the waiting `run`
        self._later: asyncio.Handle | None = None  # continues a reader that was far behind

    @property
    def source(self) -> ShareableSource:
        """The source of the answer, whichever request started it."""
        return self._flight.source

    @property
    def pays(self) -> bool:
        """True if this reader currently pays for the generation."""
        return self._flight.payer is self

    @property
    def at(self) -> int:
        return self._at

    async def run(self, take: TakeDelta) -> bool:
        """Pass the deltas on, as PieceSource.run does. They are shared: do not modify them."""
        if self.gone:
            return True
        self._over, self._take = asyncio.get_running_loop().create_future(), take
        self.deliver()
        try:
            return await self._over
        finally:
            self._over = self._take = None
            if self._later is not None:
                self._later.cancel()
                self._later = None

    def deliver(self) -> None:
        """Pass on what has arrived; called by the flight."""
        over, take, flight = self._over, self._take, self._flight
        if over is None or take is None or over.done() or self._later is not None:
            return
        try:
            for _ in range(_BATCH):
                if self._at >= flight.end:
                    break
                piece = flight.piece(self._at)
                self._at += 1
                if piece.usage is not None and self.role != "leader":
                    piece = _without_times(piece, piece.usage)
                if not take(piece):
                    over.set_result(False)
                    return
            if self._at < flight.end:
                self._later = asyncio.get_running_loop().call_soon(self._continue)
            elif flight.over:
                if flight.error is not None:
                    raise flight.error.with_traceback(None)
                over.set_result(True)
        except Exception as error:
            if not over.done():
                over.set_exception(error)

    def _continue(self) -> None:
        self._later = None
        self.deliver()

    def cancel(self) -> None:
        """Leave the flight; other readers continue."""
        if self.gone:
            return
        self.gone = True
        self._flight.leave(self)
        if self._over is not None and not self._over.done():
            self._over.set_result(True)

    def facts(self) -> AnswerFacts:
        flight, pays = self._flight, self.pays
        is_read = flight.over and self._at >= flight.end
        return AnswerFacts(
            self.role, pays, total_usage(flight.usages, flight.n) if is_read and not pays else TokenUsage()
        )


class Flight:
    """One generation and its readers."""

    def __init__(self, source: ShareableSource, terms: JoinTerms, *, n: int, most_bytes: int) -> None:
        self.terms = terms
        self.n = n  # choices of each prompt
        self.mark = 0  # invalidations before it started
        self.pieces: list[ChoiceDelta] = []
        self.usages: dict[int, TokenUsage] = {}  # of the choices that have ended
        self.whole = True  # nothing was dropped, so that it can be read from its beginning
        self.over = False
        self.error: Exception | None = None
        self.readers: list[FlightReader] = []
        self.payer: FlightReader | None = None
        self.source = source
        self._most_bytes = most_bytes
        self._bytes = 0
        self._dropped = 0  # deltas before the first in the list

    @property
    def end(self) -> int:
        return self._dropped + len(self.pieces)

    @property
    def abandoned(self) -> bool:
        """True if all readers left before its end."""
        return not self.readers and not self.over

    def piece(self, index: int) -> ChoiceDelta:
        return self.pieces[index - self._dropped]

    def join(self, role: Role) -> FlightReader:
        reader = FlightReader(self, role)
        self.readers.append(reader)
        if self.payer is None:
            self.payer = reader
        return reader

    def leave(self, reader: FlightReader) -> None:
        self.readers.remove(reader)
        if self.over:
            return
        if not self.readers:
            self.source.cancel()
        elif self.payer is reader:
            self.payer = self.readers[0]  # the one that has waited longest

    async def run(self) -> None:
        """Run the generation to its end; an error is kept in `error`, not raised."""
        try:
            await self.source.run(self._append)
        except Exception as error:
            self.error = error
        self.over = True
        self._notify()

    def stop(self, error: Exception) -> None:
        """End it because the server shuts down."""
        if not self.over:
            self.over, self.error = True, error
            self.source.cancel()
            self._notify()

    def _append(self, piece: ChoiceDelta) -> bool:
        self.pieces.append(piece)
        if piece.usage is not None:
            self.usages[piece.index] = piece.usage
        self._bytes += _bytes_of(piece)
        if self._bytes > self._most_bytes:
            self.whole = False
        self._notify()
        if not self.whole:
            self._trim()
        return True

    def _notify(self) -> None:
        for reader in tuple(self.readers):
            reader.deliver()

    def _trim(self) -> None:
        """Drop what all readers have read of an answer too long to be shared or stored. A slow reader holds back at
        most one answer; the writer disconnects clients that do not read at all."""
        read = min((reader.at for reader in self.readers), default=self.end) - self._dropped
        if read >= _TRIM_AT:
            del self.pieces[:read]
            self._dropped += read


class Flights:
    """The generations that further requests may join."""

    def __init__(
        self,
        *,
        most: int = 4096,  # joinable at once; further ones run alone
        readers: int = 1024,  # of one flight
        slack_s: float = 1.0,  # how much earlier than a joiner's deadline its leader's may be
        most_bytes: int = 8 * 1024**2,  # 8 MiB of one answer; longer ones cannot be joined
    ) -> None:
        self._most = most
        self._readers = readers
        self._slack_s = slack_s
        self._most_bytes = most_bytes
        self._open: dict[bytes, Flight] = {}
        self._tasks: dict[asyncio.Task[None], Flight] = {}

    def __len__(self) -> int:
        """Generations under way."""
        return len(self._tasks)

    def find(self, key: bytes, terms: JoinTerms) -> Flight | None:
        """Return a flight that a request may join."""
        flight = self._open.get(key)
        if flight is None or not flight.whole or flight.abandoned or flight.error is not None:
            return None
        if len(flight.readers) >= self._readers or (flight.terms.whole and not terms.whole):
            return None
        # No deadline can cut a flight that has ended already.
        return flight if flight.over or flight.terms.as_good_as(terms, self._slack_s) else None

    def lead(
        self,
        key: bytes,
        terms: JoinTerms,
        source: ShareableSource,
        *,
        n: int,
        ended: Callable[[Flight], Awaitable[None]],
        mark: int = 0,
    ) -> FlightReader:
        """Start a generation, which further requests join in place of an earlier one.

        `ended` is called when it is over; until that returns the flight can be joined, so that its entry is stored
        before the flight disappears.
        """
        flight = Flight(source, terms, n=n, most_bytes=self._most_bytes)
        flight.mark = mark
        reader = flight.join("leader")
        if key in self._open or len(self._open) < self._most:
            self._open[key] = flight
        task = asyncio.get_running_loop().create_task(self._run(key, flight, ended))
        self._tasks[task] = flight
        task.add_done_callback(self._tasks.pop)
        return reader

    async def _run(self, key: bytes, flight: Flight, ended: Callable[[Flight], Awaitable[None]]) -> None:
        try:
            await flight.run()
            await ended(flight)
        except Exception:
            log.exception("The result of a shared answer could not be stored")
        finally:
            if self._open.get(key) is flight:
                del self._open[key]

    async def close(self, error: Exception) -> None:
        """End all generations; their readers get the error."""
        self._open.clear()
        running = list(self._tasks.items())
        for task, flight in running:
            flight.stop(error)
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)


def total_usage(usages: Mapping[int, TokenUsage], n: int) -> TokenUsage:
    """Return the tokens and compute time of all choices. A prompt counts once, however many choices it has."""
    usage = combine_usages([usages[index] for index in sorted(usages)], n)
    usage.drafted = usage.accepted = 0
    usage.queue_s = 0.0
    return usage


def _without_times(piece: ChoiceDelta, usage: TokenUsage) -> ChoiceDelta:
    """Keep the tokens and drop the times, for a reader that waited for no engine."""
    return replace(
        piece,
        usage=replace(usage, drafted=0, accepted=0, queue_s=0.0, prefill_s=0.0, decode_s=0.0),
    )


def _bytes_of(piece: ChoiceDelta) -> int:
    """Estimate the memory that a delta takes."""
    size = 160 + len(piece.content) + len(piece.reasoning)
    for call in piece.calls:
        size += 120 + len(call.arguments)
    for token in piece.logprobs or ():
        size += 200 + 160 * len(token.top)
    return size
