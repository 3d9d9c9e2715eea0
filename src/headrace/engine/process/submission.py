"""What a client knows of its replicas and of the requests it sent to them. Data only; the client acts on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from headrace.engine.interface.grammar_spec import GRAMMAR_KINDS
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import sequence_seed
from headrace.engine.process import wire
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.replica_choice import ReplicaRole
from headrace.engine.process.worker_address import WorkerAddress
from headrace.engine.process.worker_connection import WorkerConnection
from headrace.errors import HeadraceError, RequestError


class ClientTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a client, in seconds."""

    patience: float = 60.0  # to find a worker that can take a request
    suspicion: float = 2.0  # without an answer to a ping before new requests go elsewhere
    silence: float = (
        15.0  # without an answer before the worker's requests do; its supervisor usually replaces it sooner
    )
    ping: float = 0.5  # between pings
    longest_step: float = 60.0  # a longer step counts as stuck
    reconnect: float = 0.02  # first pause; it grows to `reconnect_most`, or for other hosts to `reconnect_most_remote`
    reconnect_most: float = 0.1
    reconnect_most_remote: float = 2.0


class Submission(msgspec.Struct, eq=False):
    """A stream, or some of its sequences, as sent to one worker."""

    id: str
    stream: OutputStream
    indices: tuple[int, ...]  # among the request's n, by the worker's index
    continues: bool = False
    replica: Replica | None = None
    load: float = 0.0
    refused_by: set[int] = set()
    give_up: float = 0.0  # when to give up waiting for a worker


class Replica(msgspec.Struct, eq=False):
    number: int
    address: WorkerAddress
    is_standby: bool = False  # takes requests only while others are missing
    discovered: bool = False  # a registry named it
    connection: WorkerConnection | None = None  # set once greeted
    welcome: wire.Welcome | None = None
    draining: bool = False
    retired: bool = False  # it is about to be removed, and stays without new requests
    submissions: dict[str, Submission] = {}
    greeting: asyncio.Future[wire.Welcome] | None = None
    task: asyncio.Task[None] | None = None
    unanswered: int = 0  # pings since the last message
    wrong: HeadraceError | None = None  # why the worker cannot be used

    @property
    def usable(self) -> bool:
        return self.connection is not None and not self.draining and not self.retired

    @property
    def role(self) -> ReplicaRole:
        return ReplicaRole(
            self.number,
            is_standby=self.is_standby,
            is_preemptible=self.welcome is not None and self.welcome.preemptible,
        )

    def state(self, *, is_responsive: bool) -> ReplicaState:
        if self.connection is None:
            state = "down" if self.wrong is None else "wrong"
        elif not self.usable:
            state = "draining"
        elif not is_responsive:
            state = "silent"
        else:
            state = "standby" if self.is_standby else "ready"
        return ReplicaState(
            address=str(self.address),
            state=state,
            preemptible=self.role.is_preemptible,
            requests=len(self.submissions),
            discovered=self.discovered,
            pid=None if self.welcome is None or self.connection is None else self.welcome.pid,
            reason=None if self.wrong is None else str(self.wrong),
        )


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as operators see it."""

    address: str
    state: str  # "ready", "standby", "draining", "silent", "wrong" or "down"
    preemptible: bool
    requests: int  # of this client
    discovered: bool = False  # a registry named it
    pid: int | None = None
    reason: str | None = None  # why the worker cannot be used


def submit_message(request: GenerationRequest, id: str, indices: Sequence[int], output: Sequence[int]) -> wire.Submit:
    """Return the wire message for a request: all of its sequences from the start, or one of them after `output`."""
    now = time.monotonic()
    if request.grammar is not None and request.grammar.kind not in GRAMMAR_KINDS:
        raise RequestError(f"Unknown grammar kind '{request.grammar.kind}'.", parameter="grammar")
    sampling = request.sampling
    if len(indices) == 1 and indices[0]:
        sampling = replace(sampling, seed=sequence_seed(sampling.seed, indices[0]))
    return wire.Submit(
        request=replace(
            request,
            id=id,
            n=len(indices),
            sampling=sampling,
            prompt_logprobs=None if output else request.prompt_logprobs,
            deadline=None,
            arrival=0.0,
        ),
        output=tuple(output),
        deadline_in_s=None if request.deadline is None else request.deadline - now,
        waited_s=max(0.0, now - request.arrival) if request.arrival else 0.0,
    )


def served_by(welcome: wire.Welcome) -> tuple[str, ...]:
    """Return what must be equal for a stream to continue, byte for byte, where another worker left it."""
    known = (welcome.arithmetic, welcome.release)
    return (welcome.fingerprint or welcome.model, welcome.variant, *(each for each in known if each))


def why_wrong(
    welcome: wire.Welcome, address: WorkerAddress, others: tuple[str, ...], fingerprint: str
) -> HeadraceError | None:
    """Return why a worker cannot be used beside workers that serve `others`; None if it can."""
    if welcome.version != wire.VERSION:
        return wire.WireError(
            f"The worker at {address} speaks version {welcome.version}, this client {wire.VERSION}. Use one release."
        )
    if fingerprint and welcome.fingerprint != fingerprint:
        return HeadraceError(
            f"The worker at {address} serves other files: {welcome.model} has the fingerprint "
            f"{welcome.fingerprint or 'unknown'}, expected {fingerprint}. Start it with the same model and options."
        )
    if (serves := served_by(welcome)) != others:
        return HeadraceError(
            f"The worker at {address} serves {', '.join(serves)}, the others {', '.join(others)}. A stream could not "
            'continue there byte for byte. Use one release, and arithmetic = "portable" on different processors.'
        )
    return None
