"""The protocol between a worker and its clients: message types, and frames of a 4-byte little-endian length and
msgpack.

One frame of outputs leaves per step and client, however many sequences ran. Times travel as durations from now, because
clocks of two processes are never compared. Does not know sockets or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.interface.request import AdapterRef, GenerationRequest
from headrace.errors import HeadraceError
from headrace.variant import Variant

VERSION: Final = 6  # of the protocol; peers with different versions disconnect at once
MOST_FRAME: Final = 256 * 1024 * 1024  # 256 MiB; features of images are the largest messages
_LENGTH: Final = 4  # bytes before each frame


class WireError(HeadraceError):
    """A frame that is too long, is not a message, or has another protocol version."""


class Submit(msgspec.Struct, tag="submit", kw_only=True, omit_defaults=True, frozen=True):
    """Runs a request. Its `id` is unique among all clients of a worker. Its `deadline` and `arrival` stay unset: the
    message carries them as durations."""

    request: GenerationRequest
    output: tuple[int, ...] = ()  # tokens already generated and delivered by another worker; `max_tokens` counts them
    deadline_in_s: float | None = None  # from now
    waited_s: float = 0.0  # since the request arrived


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    id: str


class Ping(msgspec.Struct, tag="ping", frozen=True):
    number: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Asks the worker to admit nothing more, finish what runs, and exit."""


class AskStats(msgspec.Struct, tag="ask_stats", frozen=True):
    number: int


class Pin(msgspec.Struct, tag="pin", frozen=True, kw_only=True):
    """Asks the worker to compute a prefix, keep it in memory and, if the worker saves prefixes, over restarts."""

    number: int
    tokens: tuple[int, ...]
    salt: str = ""
    public: bool = False  # share it among all tenants
    keep: bool = True  # False: unpin it


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Asks the worker to read an adapter into memory, before a request has it."""

    number: int
    adapter: AdapterRef


class DropAdapter(msgspec.Struct, tag="drop_adapter", frozen=True):
    """Asks the worker to free an adapter that no request uses. A request that has it loads it again."""

    digest: str


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A client's first message."""

    version: int


ClientMessage = Submit | Cancel | Ping | Drain | AskStats | Pin | LoadAdapter | DropAdapter | Hello


class Welcome(msgspec.Struct, tag="welcome", frozen=True, kw_only=True):
    """The worker's answer to Hello: what it serves."""

    version: int
    pid: int
    model: str
    kind: str  # "decoder" or "encoder"
    vocab_size: int
    hidden_size: int
    context: int
    block_tokens: int
    blocks: int
    variant: str  # weights and KV type; streams continue only on workers of one variant
    draining: bool = False
    fingerprint: str = ""  # of the model's files, if the worker was told it
    arithmetic: str = ""  # instruction sets of another one round differently
    release: str = ""  # of Headrace; the order of additions may change with it
    preemptible: bool = False  # its host may be taken away at any time


class Outputs(msgspec.Struct, tag="outputs"):
    items: list[SequenceOutput]


class Rejected(msgspec.Struct, tag="refused", frozen=True, kw_only=True, omit_defaults=True):
    """The request was not admitted; nothing of it runs."""

    id: str
    reason: str
    parameter: str | None = None  # the parameter that is wrong; None: a matter of load
    retry_after: float | None = None  # seconds; None if a retry cannot help
    predicted: float | None = None  # seconds until it would have finished
    draining: bool = False


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """The answer to Ping. After its first step, a worker also sends one to every client that has
    sent a Ping, with number 0."""

    number: int
    steps: int  # run so far
    busy: float  # seconds that the step under way has run; 0 when idle


class Draining(msgspec.Struct, tag="draining", frozen=True):
    """The worker admits nothing more and will exit."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    number: int
    values: dict[str, Any]


class Pinned(msgspec.Struct, tag="pinned", frozen=True):
    number: int
    reason: str | None = None  # why it failed; None on success


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", frozen=True):
    number: int
    reason: str | None = None  # why it cannot be loaded; None on success, and if memory for it is lacking now


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The worker closes the connection because of what came over it."""

    reason: str


WorkerMessage = Welcome | Outputs | Rejected | Pong | Draining | Stats | Pinned | AdapterLoaded | Bye


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's configuration: one line of JSON on its standard input, which then stays open."""

    variant: Variant
    socket: str = ""  # path, set by the supervisor
    drain_seconds: float = 30.0  # for running requests to finish during shutdown
    most_clients: int = 64
    fingerprint: str = ""  # of the model's files, which clients on other hosts compare
    preemptible: bool = False
    watched: bool = True  # exit when standard input closes


class LoadProgress(msgspec.Struct, tag="loading", frozen=True):
    """Progress of packing the weights: lines of JSON on the worker's standard output, before StartReport."""

    done: int  # bytes packed
    total: int


class StartReport(msgspec.Struct, tag="started", frozen=True, kw_only=True, omit_defaults=True):
    """The result of a worker's start: the last line of JSON on its standard output."""

    error: str | None = None  # why it did not start, as shown to users
    load_s: float = 0.0
    mapped: bool = False  # packed weights were in the cache and only had to be mapped
    weight_bytes: int = 0
    context: int = 0
    blocks: int = 0
    restored_tokens: int = 0  # of saved prefixes


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ClientMessage | WorkerMessage, most: int = MOST_FRAME) -> bytearray:
    """Return a message as a frame. Raise WireError if it is too long."""
    buffer = bytearray(_LENGTH)
    _encoder.encode_into(message, buffer, _LENGTH)
    length = len(buffer) - _LENGTH
    if length > most:
        raise WireError(f"A message of {length} bytes is longer than {most}.")
    buffer[:_LENGTH] = length.to_bytes(_LENGTH, "little")
    return buffer


T = TypeVar("T")


class FrameDecoder(Generic[T]):
    """Splits the bytes of a socket into messages. A partial frame waits for the rest."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], most: int = MOST_FRAME) -> None:
        self._decoder = decoder
        self._most = most
        self._waiting = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[T]:
        """Yield the messages that `data` completes. Iterate to the end. A WireError ends the connection."""
        waiting = self._waiting
        waiting += data
        at = 0
        try:
            while len(waiting) - at >= _LENGTH:
                end = at + _LENGTH
                length = int.from_bytes(waiting[at:end], "little")
                if length > self._most:
                    raise WireError(f"A frame of {length} bytes is longer than {self._most}.")
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
            raise WireError(f"A frame is not a message: {error}") from None


def from_clients(most: int = MOST_FRAME) -> FrameDecoder[ClientMessage]:
    return FrameDecoder(msgspec.msgpack.Decoder(ClientMessage), most)


def from_worker(most: int = MOST_FRAME) -> FrameDecoder[WorkerMessage]:
    return FrameDecoder(msgspec.msgpack.Decoder(WorkerMessage), most)
