"""Worker: one engine and the requests of its clients, on one thread.

While a step runs on the executor's threads, this thread sends the previous step's outputs, reads incoming messages and
sleeps until there is something to do. The protocol is in `wire.py`, the process in `worker_program.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from headrace.engine.executors.adapter_table import AdapterMemoryError
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import AdapterRef, FinishReason, GenerationRequest
from headrace.engine.process import wire
from headrace.engine.process.image_memory import ImageMemory
from headrace.engine.process.open_engine import OpenedVariant
from headrace.engine.process.worker_clients import ConnectedClient, WorkerClients
from headrace.errors import HeadraceError, RequestError
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.engine.grammar.constraints import Compilation, GrammarState

log = logging.getLogger(__name__)

_COMPILING: Final = 0.005  # seconds between checks of grammars that are being compiled
_STALLED: Final = 0.02  # seconds between checks of requests that wait for time to pass
_MOST_WAITED: Final = 3600.0  # seconds that a request may have waited before its submission


class _Running(msgspec.Struct, eq=False):
    client: ConnectedClient
    open: int  # sequences that have not ended


class _Compiling(msgspec.Struct, eq=False):
    client: ConnectedClient
    message: wire.Submit
    compilation: Compilation | Future[None]  # of its grammar, or the load of its adapter


class Worker:
    def __init__(self, opened: OpenedVariant, config: wire.WorkerConfig) -> None:
        self.engine = opened.engine
        self._opened = opened
        self._config = config
        self._running: dict[str, _Running] = {}
        self._compiling: dict[str, _Compiling] = {}
        self._loads: list[tuple[ConnectedClient, int, Future[None]]] = []  # of adapters, by number
        self._drain_until: float | None = None
        self._stopped = False
        self.orphaned = False  # standard input closed: the supervisor is gone
        self._images = ImageMemory(opened.variant.image_memory_bytes)
        self.turns = 0  # times that the loop has polled
        self._clients = WorkerClients(
            Path(config.socket), most=config.most_clients, take=self._on_message, left=self._cancel_all
        )

    # The loop

    def run(self) -> None:
        """Run until told to stop and all requests have finished."""
        engine = self.engine
        while not self._over():
            self._serve(0.0)
            if pause := engine.gather():
                self._deliver()
                self._serve(pause)
                continue
            ticket = engine.begin()
            if ticket is None:
                self._deliver()
                if self._over():
                    break
                engine.check()
                self._serve(0.0 if engine.rest() else self._pause())
                continue
            ticket.add_done_callback(self.wake)
            self._deliver()
            self._serve(0.0)
            engine.prepare()
            while not ticket.done():
                self._serve(None if not self._compiling else _COMPILING)
            engine.finish()
            if engine.timing.steps == 1:
                self._tell_first_step()
        self._flush()

    def wake(self, *_: object) -> None:
        """Wake the loop. Safe to call from any thread."""
        self._clients.wake()

    def watch_standard_input(self) -> None:
        """Drain when standard input closes, because then the parent process is gone."""
        os.set_blocking(0, False)
        self._clients.watch(0, self._on_standard_input)

    def watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._clients.wake_descriptor, warn_on_full_buffer=False)

    def drain(self) -> None:
        """Admit nothing more. The loop ends when all requests have finished, or when the drain time is over."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_seconds
            self.engine.drain()
            self._clients.send_all(wire.Draining())

    def stop(self) -> None:
        """End the loop at its next turn. Safe to call from any thread."""
        self._stopped = True
        self.wake()

    @property
    def clients(self) -> int:
        return len(self._clients)

    def close(self, *, engine: bool = True) -> None:
        self._clients.close()
        if engine:
            self.engine.close()

    def _over(self) -> bool:
        if self._stopped:
            return True
        if self._drain_until is None:
            return False
        return time.monotonic() >= self._drain_until or (self.engine.idle and not self._compiling)

    def _pause(self) -> float | None:
        """Return how long the loop may sleep when there is nothing to compute."""
        if self._compiling:
            return _COMPILING
        if not self.engine.idle:
            return _STALLED
        return None

    def _serve(self, timeout: float | None) -> None:
        """Handle socket events, waiting up to `timeout` seconds for them."""
        self.turns += 1
        self._clients.wait(timeout)
        if self._compiling:
            self._admit_compiled()
        if self._loads:
            self._report_loads()

    def _flush(self) -> None:
        """Give the clients a moment to read what is written for them."""
        until = time.monotonic() + 1.0
        while self._clients.have_unsent and time.monotonic() < until:
            self._serve(0.05)

    # Events

    def _on_signal(self, *_: object) -> None:
        if self._drain_until is not None:
            self._stopped = True
        self.drain()

    def _on_standard_input(self) -> None:
        try:
            ended = not os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self.orphaned = True
            self._clients.unwatch(0)
            self.drain()

    # Messages

    def _on_message(self, client: ConnectedClient, message: wire.ClientMessage) -> None:
        if not client.greeted:
            if not isinstance(message, wire.Hello):
                self._clients.dismiss(client, "The first message must be Hello.")
                return
            client.greeted = True
            self._clients.send(client, self._welcome())
            if message.version != wire.VERSION:
                self._clients.dismiss(client, f"version {message.version} is not {wire.VERSION}")
            return
        match message:
            case wire.Submit():
                self._submit_images(client, message)
            case wire.Cancel(id):
                self._cancel(client, id)
            case wire.Ping(number):
                client.pings = True
                self._clients.send(client, self._pong(number))
            case wire.AskStats(number):
                self._clients.send(client, wire.Stats(number, msgspec.to_builtins(self.engine.stats())))
            case wire.LoadAdapter(number, adapter):
                loading = self._load_adapter(adapter)
                if loading is None:
                    self._clients.send(client, wire.AdapterLoaded(number))
                else:
                    self._loads.append((client, number, loading))
                    loading.add_done_callback(self.wake)
            case wire.DropAdapter(digest):
                if self.engine.adapters is not None:
                    self.engine.adapters.drop(digest)
            case wire.Pin():
                self._pin(client, message)
            case wire.Drain():
                self.drain()
            case wire.Hello():
                pass

    def _welcome(self) -> wire.Welcome:
        executor = self._opened.executor
        spec, capacity = executor.spec, executor.capacity
        return wire.Welcome(
            version=wire.VERSION,
            pid=os.getpid(),
            model=self._opened.variant.model,
            kind=spec.kind,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            context=capacity.context,
            block_tokens=capacity.block_tokens,
            blocks=capacity.blocks,
            variant=self._opened.variant.name,
            draining=self._drain_until is not None,
            fingerprint=self._config.fingerprint,
            arithmetic=executor.arithmetic,
            release=__version__,
            preemptible=self._config.preemptible,
        )

    def _submit_images(self, client: ConnectedClient, message: wire.Submit) -> None:
        """Submit a request with the features that other requests hold already in place of its own copies."""
        request = message.request
        if request.images:
            images = self._images.shared(request.images)
            if images is None:
                reason = "The features of other requests' images fill image_memory_bytes. Try again later."
                self._clients.send(client, wire.Rejected(id=request.id, reason=reason, retry_after=1.0))
                return
            message = replace(message, request=replace(request, images=images))
        self._submit(client, message)

    def _submit(self, client: ConnectedClient, message: wire.Submit, grammar: GrammarState | None = None) -> None:
        id = message.request.id
        try:
            if self._drain_until is not None:
                self._clients.send(client, wire.Rejected(id=id, reason="the worker is draining", draining=True))
                return
            if id in self._running or id in self._compiling:
                raise RequestError(f"a request '{id[:80]}' runs already", parameter="id")
            request = request_of(message, time.monotonic())
            if request.adapter is not None and (loading := self._load_adapter(request.adapter)) is not None:
                self._compiling[id] = _Compiling(client, message, loading)
                client.requests.add(id)
                return
            if request.grammar is not None and grammar is None:
                compilation = self.engine.grammars.prepare(request.grammar, salt=request.salt)
                if not compilation.done():
                    self._compiling[id] = _Compiling(client, message, compilation)
                    client.requests.add(id)
                    return
                grammar = compilation.result()
            admission = self.engine.submit(request, output=message.output, grammar=grammar)
        except RequestError as error:
            reason = wire.Rejected(id=id, reason=str(error), parameter=error.parameter or "request")
            self._clients.send(client, reason)
            return
        if not admission.accepted:
            self._clients.send(
                client,
                wire.Rejected(
                    id=id, reason=admission.why, retry_after=admission.retry_after, predicted=admission.predicted
                ),
            )
            return
        self._running[id] = _Running(client, request.n)
        client.requests.add(id)

    def _admit_compiled(self) -> None:
        for id, waiting in list(self._compiling.items()):
            if not waiting.compilation.done():
                continue
            del self._compiling[id]
            waiting.client.requests.discard(id)
            try:
                grammar = waiting.compilation.result()
            except AdapterMemoryError as error:
                self._clients.send(waiting.client, wire.Rejected(id=id, reason=str(error), retry_after=1.0))
            except RequestError as error:
                refused = wire.Rejected(id=id, reason=str(error), parameter=error.parameter or "grammar")
                self._clients.send(waiting.client, refused)
            except (HeadraceError, OSError) as error:
                self._clients.send(waiting.client, wire.Rejected(id=id, reason=str(error), parameter="model"))
            else:
                self._submit(waiting.client, waiting.message, grammar)

    def _load_adapter(self, ref: AdapterRef) -> Future[None] | None:
        """Load an adapter beside the running steps. Return None if it is there, or cannot be there."""
        adapters = self.engine.adapters
        return None if adapters is None or adapters.has(ref) else adapters.load(ref)

    def _report_loads(self) -> None:
        waiting, self._loads = self._loads, []
        for client, number, loading in waiting:
            if not loading.done():
                self._loads.append((client, number, loading))
                continue
            failure = loading.exception()
            reason = None if failure is None or isinstance(failure, AdapterMemoryError) else str(failure)
            if client in self._clients:
                self._clients.send(client, wire.AdapterLoaded(number, reason))

    def _cancel(self, client: ConnectedClient, id: str) -> None:
        if id not in client.requests:
            return  # it ended in the meantime
        if self._compiling.pop(id, None) is not None:
            client.requests.discard(id)
        else:
            self.engine.cancel(id)

    def _cancel_all(self, client: ConnectedClient) -> None:
        """Cancel the requests of a client that has left."""
        for id in list(client.requests):
            self._cancel(client, id)

    def _pin(self, client: ConnectedClient, message: wire.Pin) -> None:
        def report(reason: str | None) -> None:
            if client in self._clients:
                self._clients.send(client, wire.Pinned(message.number, reason))

        try:
            if message.keep:
                self._opened.pins.pin(message.tokens, message.salt, report, public=message.public)
            else:
                self._opened.pins.unpin(message.tokens, message.salt)
                report(None)
        except (HeadraceError, OSError) as error:
            report(str(error))

    def _tell_first_step(self) -> None:
        """Tell the clients that ping. A supervisor then knows that this worker served, even if it ends before the
        next ping."""
        for client in self._clients.pinging:
            self._clients.send(client, self._pong(0))

    def _pong(self, number: int) -> wire.Pong:
        return wire.Pong(number, self.engine.timing.steps, self.engine.busy)

    # Outputs

    def _deliver(self) -> None:
        """Send one frame to each client that has outputs."""
        receivers: list[ConnectedClient] = []
        for output in self.engine.deliver():
            running = self._running.get(output.request)
            if running is None:
                self._opened.pins.takes(output)
                continue
            client = running.client
            if output.ending is not None:
                running.open -= 1
                if not running.open:
                    del self._running[output.request]
                    client.requests.discard(output.request)
            if client.leaving or client not in self._clients:
                continue
            if not client.outputs:
                receivers.append(client)
            client.outputs.append(output)
        for client in receivers:
            outputs, client.outputs = client.outputs, []
            self._send_outputs(client, outputs)

    def _send_outputs(self, client: ConnectedClient, outputs: list[SequenceOutput]) -> None:
        try:
            self._clients.send(client, wire.Outputs(outputs))
        except wire.WireError as error:
            if len(outputs) > 1:
                for output in outputs:
                    self._send_outputs(client, [output])
            else:
                self._fail_oversized(client, outputs[0], str(error))

    def _fail_oversized(self, client: ConnectedClient, output: SequenceOutput, why: str) -> None:
        """Fail a sequence whose output is too large for a frame."""
        log.warning("an output of request %s is too large: %s", output.request, why)
        ending = output.ending
        if ending is None:
            self.engine.cancel(output.request)
            return
        ended = SequenceEnd(FinishReason.FAILED, ending.usage, why)
        self._clients.send(client, wire.Outputs([SequenceOutput(output.request, output.index, [], "", ending=ended)]))


def request_of(message: wire.Submit, now: float) -> GenerationRequest:
    """Return the submitted request with its times on this process's clock."""
    request = message.request
    if message.output and (request.kind != "generate" or request.n != 1):
        raise RequestError("Only one sequence of a generation can go on after earlier output.", parameter="output")
    return replace(
        request,
        deadline=None if message.deadline_in_s is None else now + message.deadline_in_s,
        arrival=now - min(max(0.0, message.waited_s), _MOST_WAITED),
    )
