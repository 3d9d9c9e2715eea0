"""A worker on a thread of the test's process, and a client of bare sockets that can misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process import wire
from headrace.engine.process.open_engine import OpenedVariant
from headrace.engine.process.worker import Worker
from headrace.variant import Variant

T = TypeVar("T")
PATIENCE = 120.0  # seconds, after which a test that waits has failed


@contextlib.contextmanager
def serving(opened: OpenedVariant, path: Path, **options: Any) -> Generator[Worker, None, None]:
    """A worker that runs until the block ends; its engine lives on."""
    config = wire.WorkerConfig(variant=Variant(model="unused"), socket=str(path), **options)
    worker = Worker(opened, config)

    def live() -> None:
        try:
            worker.run()
        finally:
            worker.close(engine=False)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


class Peer:
    """One connection, greeted unless told otherwise."""

    def __init__(self, path: Path, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._frames = wire.from_worker()
        self._waiting: list[wire.WorkerMessage] = []
        if greet:
            self.send(wire.Hello(wire.VERSION))
            self.expect(wire.Welcome)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *messages: wire.ClientMessage) -> None:
        self.socket.sendall(b"".join(wire.encode_frame(message) for message in messages))

    def receive(self) -> wire.WorkerMessage | None:
        """The next message; None at the connection's end."""
        while not self._waiting:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._waiting += self._frames.feed(data)
        return self._waiting.pop(0)

    def expect(self, kind: type[T]) -> T:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def until(self, wanted: Callable[[wire.WorkerMessage], bool]) -> wire.WorkerMessage:
        while (message := self.receive()) is not None:
            if wanted(message):
                return message
        raise AssertionError("the connection has ended")

    def answers(self, *ids: str) -> dict[str, SequenceResult]:
        """The whole answers of requests with one sequence, whatever else comes."""
        found = {id: SequenceResult(0) for id in ids}
        while any(answer.ending is None for answer in found.values()):
            message = self.receive()
            assert message is not None, "the connection has ended"
            assert not isinstance(message, wire.Rejected), message
            if isinstance(message, wire.Outputs):
                for output in message.items:
                    if output.request in found:
                        found[output.request].add(output)
        return found
