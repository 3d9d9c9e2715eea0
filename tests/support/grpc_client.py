"""A client of the gRPC interface with stubs that grpcio-tools makes of headrace.proto, as users make them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.server.server import Server

PROTO = Path(__file__).parents[2] / "src/headrace/server/grpc/headrace.proto"


@functools.cache
def stubs() -> tuple[Any, Any]:
    """The generated modules: messages, and services."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    included = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"-I{PROTO.parent}", f"-I{included}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        assert protoc.main(["protoc", *arguments, PROTO.name]) == 0
        sys.path.insert(0, folder)
        try:
            return importlib.import_module("headrace_pb2"), importlib.import_module("headrace_pb2_grpc")
        finally:
            sys.path.remove(folder)


class GrpcClient(NamedTuple):
    channel: Any
    stub: Any
    messages: Any

    def chat(self, text: str = "Hello", **fields: Any) -> Any:
        message = self.messages.Message(role="user", content=text)
        return self.messages.GenerateRequest(messages=[message], **fields)


@contextlib.asynccontextmanager
async def grpc_client(server: Server, options: Sequence[tuple[str, Any]] = ()) -> AsyncIterator[GrpcClient]:
    aio: Any = pytest.importorskip("grpc.aio")
    messages, services = stubs()
    assert server.grpc is not None
    async with aio.insecure_channel(f"127.0.0.1:{server.grpc.port}", options) as channel:
        yield GrpcClient(channel, services.HeadraceStub(channel), messages)
