"""Identical requests under way share one generation.

Owns Flights (who may join whom), Flight (one generation, and what has come of it) and Reader (one request's way through
it). What is generated, and what becomes of it in the end, is the callers'; a flight knows neither engine nor store.

    source ──▶ flight: one list of pieces ──▶ reader, reader, ...: each a place in the list

A reader is where a client is: it takes what is there at once, and then every piece in the turn of the event loop in
which it comes. One that reads slowly stays behind in the list and holds up nobody. The generation belongs to no reader:
it ends early only when the last one has left. One of them pays for it: the first, and where that one leaves, the next.
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

_AT_ONCE: Final = 128  # pieces that one reader takes before others have a turn
_TRIMMED: Final = 256  # pieces that everybody has read, before they are dropped from a list that is too long

Role = Literal["leader", "joiner", "hit", "alone"]


class PieceSource(Protocol):
    """What makes pieces: an engine's answer, or an upstream's."""

    async def run(self, take: TakeDelta) -> bool:
        """Hands pieces over as they come. True once all have; False as soon as `take` wants no more for now."""
        ...

    def cancel(self) -> None:
        """Nobody wants it any more. A `run` that is under way ends."""
        ...


class ShareableSource(PieceSource, Protocol):
    """One that several may have, and that may be kept."""

    def keeps(self) -> bool:
        """After its end: whether the answer is by whom the key names, and may be kept under it."""
        ...


class AnswerFacts(msgspec.Struct, frozen=True):
    """How an answer came about, for the ledger, the headers and the metrics. Final once it has been read or left."""

    role: Role
    pays: bool  # for the generation; of those that share one, exactly one does
    saved: TokenUsage  # what need not be computed for this one
    age_s: float = 0.0  # of a hit


class JoinTerms(msgspec.Struct, frozen=True):
    """When a request runs. A request joins only what runs on terms that are no worse than its own."""

    deadline: float | None = None  # on the monotonic clock
    surface: str = ""
    priority: int = 0
    whole: bool = False  # nobody is to hear of it before it is whole: what breaks is begun anew

    def as_good_as(self, other: JoinTerms, slack_s: float) -> bool:
        """`slack_s`: that these may be cut before the other's own deadline. They are never cut after it."""
        if self.surface != other.surface or self.priority < other.priority:
            return False
        if self.deadline is None or other.deadline is None:
            return self.deadline is other.deadline
        return self.deadline <= other.deadline <= self.deadline + slack_s


class FlightReader:
    """One request's way through a flight. To be left by `cancel` in the end, however it ends."""

    __slots__ = ("_at", "_flight", "_later", "_over", "_take", "gone", "role")

    def __init__(self, flight: Flight, role: Role) -> None:
        self.role: Role = role
        self.gone = False
        self._flight = flight
        self._at = 0  # the next piece
        self._take: TakeDelta | None = None
        self._over: asyncio.Future[bool] | None = None  # of the `run` that waits
        self._later: asyncio.Handle | None = None  # where it was a long way behind

    @property
    def source(self) -> ShareableSource:
        """What generates the answer, whoever began it."""
        return self._flight.source

    @property
    def pays(self) -> bool:
        """For the generation, as things stand."""
        return self._flight.payer is self

    @property
    def at(self) -> int:
        return self._at

    async def run(self, take: TakeDelta) -> bool:
        """As a Source's. The pieces are everybody's: nobody changes them."""
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
        """Called by the flight whenever something has come."""
        over, take, flight = self._over, self._take, self._flight
        if over is None or take is None or over.done() or self._later is not None:
            return
        try:
            for _ in range(_AT_ONCE):
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
                self._later = asyncio.get_running_loop().call_soon(self._go_on)
            elif flight.over:
                if flight.error is not None:
                    raise flight.error.with_traceback(None)
                over.set_result(True)
        except Exception as error:
            if not over.done():
                over.set_exception(error)

    def _go_on(self) -> None:
        self._later = None
        self.deliver()

    def cancel(self) -> None:
        """Leaves. The others go on."""
        if self.gone:
            return
        self.gone = True
        self._flight.leave(self)
        if self._over is not None and not self._over.done():
            self._over.set_result(True)

    def facts(self) -> AnswerFacts:
        flight, pays = self._flight, self.pays
        heard = flight.over and self._at >= flight.end
        return AnswerFacts(
            self.role, pays, total_usage(flight.usages, flight.n) if heard and not pays else TokenUsage()
        )


class Flight:
    """One generation and its readers."""

    def __init__(self, source: ShareableSource, terms: JoinTerms, *, n: int, most_bytes: int) -> None:
        self.terms = terms
        self.n = n  # choices of each prompt
        self.mark = 0  # the caller's own, of when it began
        self.pieces: list[ChoiceDelta] = []
        self.usages: dict[int, TokenUsage] = {}  # of the choices that have ended
        self.whole = True  # nothing of it was dropped, so that it can be read from its beginning
        self.over = False
        self.error: Exception | None = None
        self.readers: list[FlightReader] = []
        self.payer: FlightReader | None = None
        self.source = source
        self._most_bytes = most_bytes
        self._bytes = 0
        self._dropped = 0  # pieces before the first in the list

    @property
    def end(self) -> int:
        return self._dropped + len(self.pieces)

    @property
    def abandoned(self) -> bool:
        """Everybody left before its end."""
        return not self.readers and not self.over

    def piece(self, place: int) -> ChoiceDelta:
        return self.pieces[place - self._dropped]

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
            self.payer = self.readers[0]  # who has waited longest

    async def run(self) -> None:
        """To the end of the generation, which may be an error; raises none."""
        try:
            await self.source.run(self._append)
        except Exception as error:
            self.error = error
        self.over = True
        self._tell()

    def stop(self, error: Exception) -> None:
        """The server ends."""
        if not self.over:
            self.over, self.error = True, error
            self.source.cancel()
            self._tell()

    def _append(self, piece: ChoiceDelta) -> bool:
        self.pieces.append(piece)
        if piece.usage is not None:
            self.usages[piece.index] = piece.usage
        self._bytes += _bytes_of(piece)
        if self._bytes > self._most_bytes:
            self.whole = False
        self._tell()
        if not self.whole:
            self._trim()
        return True

    def _tell(self) -> None:
        for reader in tuple(self.readers):
            reader.deliver()

    def _trim(self) -> None:
        """Of what is too long to be shared or kept, what all have read goes. Who reads slowly holds back the rest, up
        to the length of one answer; whoever writes to clients cuts those that do not read at all."""
        read = min((reader.at for reader in self.readers), default=self.end) - self._dropped
        if read >= _TRIMMED:
            del self.pieces[:read]
            self._dropped += read


class Flights:
    """All generations that may be joined."""

    def __init__(
        self,
        *,
        most: int = 4096,  # that may be joined at once; further ones run alone
        readers: int = 1024,  # of one
        slack_s: float = 1.0,  # that an answer may be cut before a joiner's deadline, because its leader's is earlier
        most_bytes: int = 8 * 1024**2,  # 8 MiB of one answer; of a longer one not all is kept, so nobody can join
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
        """One that a request may join."""
        flight = self._open.get(key)
        if flight is None or not flight.whole or flight.abandoned or flight.error is not None:
            return None
        if len(flight.readers) >= self._readers or (flight.terms.whole and not terms.whole):
            return None
        # What has ended already is cut by no deadline any more.
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
        """Begins a generation, which the next may join in place of any before it. `ended` is called when it is over,
        and until that has returned it can be joined: so whatever it stores is there when the flight no longer is."""
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
            log.exception("what became of a shared answer could not be kept")
        finally:
            if self._open.get(key) is flight:
                del self._open[key]

    async def close(self, error: Exception) -> None:
        """Ends all; their readers are told the error."""
        self._open.clear()
        running = list(self._tasks.items())
        for task, flight in running:
            flight.stop(error)
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)


def total_usage(usages: Mapping[int, TokenUsage], n: int) -> TokenUsage:
    """What all choices together took: tokens, and the machine's time. A prompt counts once, however many choices it
    has."""
    found = combine_usages([usages[index] for index in sorted(usages)], n)
    found.drafted = found.accepted = 0
    found.queue_s = 0.0
    return found


def _without_times(piece: ChoiceDelta, usage: TokenUsage) -> ChoiceDelta:
    """For who waited for no engine. The tokens are the answer's own."""
    return replace(
        piece,
        usage=replace(usage, drafted=0, accepted=0, queue_s=0.0, prefill_s=0.0, decode_s=0.0),
    )


def _bytes_of(piece: ChoiceDelta) -> int:
    """About what it takes in memory."""
    size = 160 + len(piece.content) + len(piece.reasoning)
    for call in piece.calls:
        size += 120 + len(call.arguments)
    for token in piece.logprobs or ():
        size += 200 + 160 * len(token.top)
    return size
