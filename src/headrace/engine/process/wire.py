"""What passes between an engine's process and its clients: messages, and the frames that carry them.

Owns the messages' shapes, their version, the framing (a length of 4 bytes, little end first, then msgpack) and the
bounds on both. Knows neither sockets nor engines. One encode_frame of outputs leaves per step and client, however many
sequences ran. Durations and budgets pass as seconds from now: clocks of two processes are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import GenerationRequest
from headrace.errors import HeadraceError
from headrace.variant import Variant

VERSION: Final = 2  # of the messages; a client and a worker of different versions part at once
MOST_FRAME: Final = 64 * 1024 * 1024  # 64 MiB; the prompt's log-probabilities of a long text are the largest
_LENGTH: Final = 4  # bytes before each encode_frame


class WireError(HeadraceError):
    """A encode_frame that is too long, is no message, or comes from another version."""


class Submit(msgspec.Struct, tag="submit", kw_only=True, omit_defaults=True, frozen=True):
    """A request. Its `id` is unique among all clients of a worker; its `deadline` and `arrival` are left out, because
    clocks of two processes are never compared."""

    request: GenerationRequest
    output: tuple[int, ...] = ()  # tokens already generated and delivered by another worker; `max_tokens` counts them
    deadline_in_s: float | None = None  # from now
    waited_s: float = 0.0  # since the request arrived


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    id: str


class Ping(msgspec.Struct, tag="ping", frozen=True):
    number: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Admit nothing more, finish what runs, end."""


class AskStats(msgspec.Struct, tag="ask_stats", frozen=True):
    number: int


class Pin(msgspec.Struct, tag="pin", frozen=True, kw_only=True):
    """Compute a prefix if need be, and keep it under pressure and, where the worker saves prefixes, over restarts."""

    number: int
    tokens: tuple[int, ...]
    salt: str = ""
    public: bool = False  # every tenant may share it
    keep: bool = True  # False: it is pinned no more


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A client's first message."""

    version: int


ClientMessage = Submit | Cancel | Ping | Drain | AskStats | Pin | Hello


class Welcome(msgspec.Struct, tag="welcome", frozen=True, kw_only=True):
    """A worker's answer to Hello: what it serves."""

    version: int
    pid: int
    model: str
    kind: str  # "decoder" or "encoder"
    vocab_size: int
    hidden_size: int
    context: int
    block_tokens: int
    blocks: int
    variant: str  # weights and KV type: streams continue only among workers of one variant
    draining: bool = False


class Outputs(msgspec.Struct, tag="outputs"):
    items: list[SequenceOutput]


class Rejected(msgspec.Struct, tag="refused", frozen=True, kw_only=True, omit_defaults=True):
    """A request that was not admitted; nothing of it runs."""

    id: str
    reason: str
    parameter: str | None = None  # the request itself is wrong, there
    retry_after: float | None = None  # seconds; None where another time is no better
    predicted: float | None = None  # seconds until it would have been done
    draining: bool = False


class Pong(msgspec.Struct, tag="pong", frozen=True):
    number: int
    steps: int  # run so far
    busy: float  # seconds that the step under way has run; 0 when idle


class Draining(msgspec.Struct, tag="draining", frozen=True):
    """The worker admits nothing more and will end."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    number: int
    values: dict[str, Any]


class Pinned(msgspec.Struct, tag="pinned", frozen=True):
    number: int
    reason: str | None = None  # why it could not be done


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The worker closes the connection because of what came over it."""

    reason: str


WorkerMessage = Welcome | Outputs | Rejected | Pong | Draining | Stats | Pinned | Bye


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told when it starts: one line of JSON on its standard input, which then stays open."""

    variant: Variant
    socket: str = ""  # path; the supervisor chooses it
    drain_seconds: float = 30.0  # that running requests have once the worker is to end
    most_clients: int = 64
    watched: bool = True  # end, when standard input does


class LoadProgress(msgspec.Struct, tag="loading", frozen=True):
    """How far a worker is with its weights: lines of JSON on its standard output, before StartReport."""

    done: int  # bytes that are packed
    total: int


class StartReport(msgspec.Struct, tag="started", frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of its start: the last line of JSON on its standard output."""

    error: str | None = None  # it did not start; the text is fit to show
    load_s: float = 0.0
    mapped: bool = False  # packed weights were there and only had to be mapped
    weight_bytes: int = 0
    context: int = 0
    blocks: int = 0
    restored_tokens: int = 0  # of saved prefixes


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ClientMessage | WorkerMessage, most: int = MOST_FRAME) -> bytearray:
    """A message as it goes over the socket."""
    buffer = bytearray(_LENGTH)
    _encoder.encode_into(message, buffer, _LENGTH)
    length = len(buffer) - _LENGTH
    if length > most:
        raise WireError(f"a message of {length} bytes is longer than {most}")
    buffer[:_LENGTH] = length.to_bytes(_LENGTH, "little")
    return buffer


T = TypeVar("T")


class FrameDecoder(Generic[T]):
    """Cuts the bytes that a socket gives into messages; a encode_frame that came in part waits for the rest."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], most: int = MOST_FRAME) -> None:
        self._decoder = decoder
        self._most = most
        self._waiting = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[T]:
        """The messages that `data` completes. To be iterated to its end; WireError ends the connection."""
        waiting = self._waiting
        waiting += data
        at = 0
        try:
            while len(waiting) - at >= _LENGTH:
                end = at + _LENGTH
                length = int.from_bytes(waiting[at:end], "little")
                if length > self._most:
                    raise WireError(f"a encode_frame of {length} bytes is longer than {self._most}")
                if len(waiting) - end < length:
                    return
                at = end + length
                yield self._decode(bytes(waiting[end:at]))
        finally:
            del waiting[:at]

    def _decode(self, content: bytes) -> T:
        try:
            return self._decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise WireError(f"not a message: {error}") from None


def from_clients(most: int = MOST_FRAME) -> FrameDecoder[ClientMessage]:
    return FrameDecoder(msgspec.msgpack.Decoder(ClientMessage), most)


def from_worker(most: int = MOST_FRAME) -> FrameDecoder[WorkerMessage]:
    return FrameDecoder(msgspec.msgpack.Decoder(WorkerMessage), most)
