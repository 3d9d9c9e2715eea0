"""The worker process: one engine and the sockets of its clients, on one thread.

While a step runs on the executor's threads, this thread sends the previous step's outputs, reads incoming messages and
sleeps until there is something to do. The protocol is in `wire.py`.

    stdin   one line of JSON, a WorkerConfig; when it closes, the supervisor is gone: drain and exit
    stdout  lines of JSON: LoadProgress now and then, and finally StartReport
    stderr  the log, see worker_log
    SIGTERM drain and exit; twice: exit at once
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from headrace.engine.executors.adapter_table import AdapterMemoryError
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import AdapterRef, FinishReason, GenerationRequest
from headrace.engine.process import wire
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.engine.process.start_clock import StartClock, process_seconds
from headrace.engine.process.worker_log import configure_worker_log
from headrace.errors import HeadraceError, RequestError
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.engine.grammar.constraints import Compilation, GrammarState

log = logging.getLogger("headrace.engine.process.worker")  # the process runs this module as __main__

_READ: Final = 256 * 1024  # bytes per read
_MOST_UNREAD: Final = 64 * 1024 * 1024  # 64 MiB of unread output, after which a client is disconnected
_COMPILING: Final = 0.005  # seconds between checks of grammars that are being compiled
_STALLED: Final = 0.02  # seconds between checks of requests that wait for time to pass
_BACKLOG: Final = 128
_PROGRESS_SECONDS: Final = 0.2  # between progress reports while weights are packed
_MOST_WAITED: Final = 3600.0  # seconds that a request may have waited before its submission


class _Client(msgspec.Struct, eq=False):
    socket: socket.socket
    frames: wire.FrameDecoder[wire.ClientMessage]
    unsent: bytearray = msgspec.field(default_factory=bytearray)
    greeted: bool = False
    pings: bool = False  # it has sent one
    leaving: bool = False  # disconnect once everything is sent
    requests: set[str] = set()
    outputs: list[SequenceOutput] = []  # outputs of the step being delivered


class _Running(msgspec.Struct, eq=False):
    client: _Client
    open: int  # sequences that have not ended


class _Compiling(msgspec.Struct, eq=False):
    client: _Client
    message: wire.Submit
    compilation: Compilation | Future[None]  # of its grammar, or the load of its adapter


class Worker:
    def __init__(self, opened: OpenedVariant, config: wire.WorkerConfig) -> None:
        self.engine = opened.engine
        self._opened = opened
        self._config = config
        self._clients: set[_Client] = set()
        self._running: dict[str, _Running] = {}
        self._compiling: dict[str, _Compiling] = {}
        self._loads: list[tuple[_Client, int, Future[None]]] = []  # of adapters that clients asked for, by number
        self._drain_until: float | None = None
        self._stopped = False
        self.orphaned = False  # standard input closed: the supervisor is gone
        self.turns = 0  # times that the loop has polled
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        self._listener = listen(Path(config.socket))
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

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
        with contextlib.suppress(OSError):  # a full pipe means that it is awake already
            self._wake_writer.send(b"\0")

    def watch_standard_input(self) -> None:
        """Drain when standard input closes, because then the parent process is gone."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._on_standard_input)

    def watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)

    def drain(self) -> None:
        """Admit nothing more. The loop ends when all requests have finished, or when the drain time is over."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_seconds
            self.engine.drain()
            for client in list(self._clients):
                self._send(client, wire.Draining())

    def stop(self) -> None:
        """End the loop at its next turn. Safe to call from any thread."""
        self._stopped = True
        self.wake()

    @property
    def clients(self) -> int:
        return len(self._clients)

    def close(self, *, engine: bool = True) -> None:
        for client in list(self._clients):
            self._disconnect(client)
        self._listener.close()
        Path(self._config.socket).unlink(missing_ok=True)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
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
        for key, events in self._selector.select(timeout):
            key.data(key, events)
        if self._compiling:
            self._admit_compiled()
        if self._loads:
            self._report_loads()

    def _flush(self) -> None:
        """Give the clients a moment to read what is written for them."""
        until = time.monotonic() + 1.0
        while any(client.unsent for client in self._clients) and time.monotonic() < until:
            self._serve(0.05)

    # Events

    def _on_wake(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _on_signal(self, *_: object) -> None:
        if self._drain_until is not None:
            self._stopped = True
        self.drain()

    def _on_standard_input(self, key: selectors.SelectorKey, _: int) -> None:
        try:
            ended = not os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self.orphaned = True
            self._selector.unregister(0)
            self.drain()

    def _on_connection(self, *_: object) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return  # the peer left again, or no descriptors are left; it will retry
        connection.setblocking(False)
        client = _Client(connection, wire.from_clients())
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, _Handler(self, client))
        if len(self._clients) > self._config.most_clients:
            self._dismiss(client, f"{self._config.most_clients} clients are connected already")

    def on_client(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(client)
        if not events & selectors.EVENT_READ or client not in self._clients or client.leaving:
            return
        try:
            data = client.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(client)
            return
        try:
            for message in client.frames.feed(data):
                self._on_message(client, message)
                if client not in self._clients or client.leaving:
                    return
        except wire.WireError as error:
            self._dismiss(client, str(error))

    # Messages

    def _on_message(self, client: _Client, message: wire.ClientMessage) -> None:
        if not client.greeted:
            if not isinstance(message, wire.Hello):
                self._dismiss(client, "The first message must be Hello.")
                return
            client.greeted = True
            self._send(client, self._welcome())
            if message.version != wire.VERSION:
                self._dismiss(client, f"version {message.version} is not {wire.VERSION}")
            return
        match message:
            case wire.Submit():
                self._submit(client, message)
            case wire.Cancel(id):
                self._cancel(client, id)
            case wire.Ping(number):
                client.pings = True
                self._send(client, self._pong(number))
            case wire.AskStats(number):
                self._send(client, wire.Stats(number, msgspec.to_builtins(self.engine.stats())))
            case wire.LoadAdapter(number, adapter):
                loading = self._load_adapter(adapter)
                if loading is None:
                    self._send(client, wire.AdapterLoaded(number))
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

    def _submit(self, client: _Client, message: wire.Submit, grammar: GrammarState | None = None) -> None:
        id = message.request.id
        try:
            if self._drain_until is not None:
                self._send(client, wire.Rejected(id=id, reason="the worker is draining", draining=True))
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
            self._send(client, reason)
            return
        if not admission.accepted:
            self._send(
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
                self._send(waiting.client, wire.Rejected(id=id, reason=str(error), retry_after=1.0))
            except RequestError as error:
                refused = wire.Rejected(id=id, reason=str(error), parameter=error.parameter or "grammar")
                self._send(waiting.client, refused)
            except (HeadraceError, OSError) as error:
                self._send(waiting.client, wire.Rejected(id=id, reason=str(error), parameter="model"))
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
                self._send(client, wire.AdapterLoaded(number, reason))

    def _cancel(self, client: _Client, id: str) -> None:
        if id not in client.requests:
            return  # it ended in the meantime
        if self._compiling.pop(id, None) is not None:
            client.requests.discard(id)
        else:
            self.engine.cancel(id)

    def _pin(self, client: _Client, message: wire.Pin) -> None:
        def report(reason: str | None) -> None:
            if client in self._clients:
                self._send(client, wire.Pinned(message.number, reason))

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
        for client in list(self._clients):
            if client.pings:
                self._send(client, self._pong(0))

    def _pong(self, number: int) -> wire.Pong:
        return wire.Pong(number, self.engine.timing.steps, self.engine.busy)

    # Outputs

    def _deliver(self) -> None:
        """Send one frame to each client that has outputs."""
        receivers: list[_Client] = []
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

    def _send_outputs(self, client: _Client, outputs: list[SequenceOutput]) -> None:
        try:
            self._send(client, wire.Outputs(outputs))
        except wire.WireError as error:
            if len(outputs) > 1:
                for output in outputs:
                    self._send_outputs(client, [output])
            else:
                self._fail_oversized(client, outputs[0], str(error))

    def _fail_oversized(self, client: _Client, output: SequenceOutput, why: str) -> None:
        """Fail a sequence whose output is too large for a frame."""
        log.warning("an output of request %s is too large: %s", output.request, why)
        ending = output.ending
        if ending is None:
            self.engine.cancel(output.request)
            return
        ended = SequenceEnd(FinishReason.FAILED, ending.usage, why)
        self._send(client, wire.Outputs([SequenceOutput(output.request, output.index, [], "", ending=ended)]))

    def _send(self, client: _Client, message: wire.WorkerMessage) -> None:
        if client not in self._clients or client.leaving:
            return
        data = wire.encode_frame(message)
        if client.unsent:
            client.unsent += data
            if len(client.unsent) > _MOST_UNREAD:
                log.warning("a client left %d bytes unread and is cut off", len(client.unsent))
                self._disconnect(client)
            return
        client.unsent = data
        self._write(client)

    def _write(self, client: _Client) -> None:
        unsent = client.unsent
        try:
            while unsent:
                del unsent[: client.socket.send(unsent)]
        except BlockingIOError:
            self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, _Handler(self, client))
            return
        except OSError:
            self._disconnect(client)
            return
        if client.leaving:
            self._disconnect(client)
        else:
            self._stop_writing(client)

    def _stop_writing(self, client: _Client) -> None:
        key = self._selector.get_key(client.socket)
        if key.events & selectors.EVENT_WRITE:
            self._selector.modify(client.socket, selectors.EVENT_READ, key.data)

    def _dismiss(self, client: _Client, reason: str) -> None:
        """Send the reason, then close the connection."""
        self._send(client, wire.Bye(reason))
        if client in self._clients:
            client.leaving = True
            if not client.unsent:
                self._disconnect(client)

    def _disconnect(self, client: _Client) -> None:
        """Remove a client and cancel its requests."""
        if client not in self._clients:
            return
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
        for id in list(client.requests):
            self._cancel(client, id)


class _Handler:
    """The selector's callback for one client."""

    __slots__ = ("_client", "_worker")

    def __init__(self, worker: Worker, client: _Client) -> None:
        self._worker = worker
        self._client = client

    def __call__(self, _: object, events: int) -> None:
        self._worker.on_client(self._client, events)


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


def listen(path: Path) -> socket.socket:
    """Return a listening socket that only this user can connect to."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left behind by a worker that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def read_config() -> wire.WorkerConfig | None:
    """Read one line from standard input, byte by byte so that nothing after it is consumed. Return None if there is
    none: the process was started early and is not needed."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return msgspec.json.decode(line, type=wire.WorkerConfig) if line else None


class SupervisorGoneError(Exception):
    """The process that started the worker no longer reads its standard output."""


def main(report: Callable[[bytes], Any] | None = None) -> int:
    imported = process_seconds()
    configure_worker_log()
    try:
        config = read_config()
    except (msgspec.MsgspecError, OSError) as error:
        _tell(msgspec.json.encode(wire.StartReport(error=str(error))))
        return 2
    if config is None:
        return 0
    try:
        code, orphaned = _serve(config, report, StartClock(imported))
    except SupervisorGoneError:
        code, orphaned = 1, True
    if orphaned:
        with contextlib.suppress(OSError):  # it has another worker's socket; that worker removes the folder
            Path(config.socket).parent.rmdir()
    return code


def _serve(config: wire.WorkerConfig, report: Callable[[bytes], Any] | None, clock: StartClock) -> tuple[int, bool]:
    """Load and serve. Return the exit code, and whether the supervisor is gone."""
    tell = report or _tell
    try:
        opened = open_variant(config.variant, progress=throttled_progress(tell), cuts_texts=False, clock=clock)
        worker = Worker(opened, config)
    except (HeadraceError, OSError, MemoryError) as error:
        tell(msgspec.json.encode(wire.StartReport(error=str(error) or type(error).__name__)))
        return 2, False
    worker.watch_signals()
    if config.watched:
        worker.watch_standard_input()
    # The loaded objects live for ever, so keep the garbage collector from scanning them.
    gc.collect()
    gc.freeze()
    # The thread that waits for the core needs the interpreter when a step is done; the default of 5 ms is too long.
    sys.setswitchinterval(0.0005)
    clock.end("prepare")
    loaded, capacity = opened.executor.load_report, opened.executor.capacity
    log.info("started: %s", clock.describe())
    started = wire.StartReport(
        load_s=loaded.seconds,
        mapped=loaded.mapped,
        weight_bytes=loaded.weight_bytes,
        context=capacity.context,
        blocks=capacity.blocks,
        restored_tokens=opened.pins.restored_tokens,
    )
    try:
        tell(msgspec.json.encode(started))
        if report is None:
            os.dup2(2, 1)  # the reader of the pipe reads no further
        worker.run()
    finally:
        worker.close()
    return 0, worker.orphaned


def _tell(line: bytes) -> None:
    """Write a whole line to standard output."""
    try:
        sys.stdout.flush()
        os.write(1, line + b"\n")
    except BrokenPipeError:
        raise SupervisorGoneError from None


def throttled_progress(tell: Callable[[bytes], Any]) -> Callable[[int, int], None]:
    """Return a callback that reports progress at most every `_PROGRESS_SECONDS`."""
    reported_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported_at
        now = time.monotonic()
        if now - reported_at >= _PROGRESS_SECONDS:
            reported_at = now
            tell(msgspec.json.encode(wire.LoadProgress(done, total)))

    return progress


if __name__ == "__main__":
    sys.exit(main())
