"""The compiled descriptor of the proto, and the statuses of errors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.server.grpc.frames import error_frame, message_frame, read_error, split_frames
from headrace.server.grpc.rpc_cycle import RpcCycle
from headrace.server.grpc.status_codes import rpc_status

FOLDER = Path(__file__).parents[3] / "src/headrace/server/grpc"


def test_the_descriptor_is_that_of_the_proto() -> None:
    protoc: Any = pytest.importorskip("grpc_tools.protoc")
    descriptor: Any = pytest.importorskip("google.protobuf.descriptor_pb2")
    included = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.binpb"
        arguments = [f"-I{FOLDER}", f"-I{included}", f"--descriptor_set_out={made}", "headrace.proto"]
        assert protoc.main(["protoc", *arguments]) == 0
        compiled = descriptor.FileDescriptorSet.FromString(made.read_bytes())
    committed = descriptor.FileDescriptorSet.FromString((FOLDER / "headrace.binpb").read_bytes())
    assert committed == compiled, "run the command in src/headrace/server/grpc/messages.py"


def test_numbers_of_parameters_that_are_whole_become_integers() -> None:
    struct: Any = pytest.importorskip("google.protobuf.struct_pb2").Struct()
    from headrace.server.grpc.messages import plain_struct

    given = {"n": 2, "share": 0.5, "list": [1, {"a": None}], "on": True, "text": "1"}
    struct.update(given)
    assert plain_struct(struct) == given
    assert isinstance(plain_struct(struct)["n"], int)


def test_frames_are_split_as_they_were_written() -> None:
    data = message_frame(b"") + message_frame(b"one") + error_frame(503, b"{}")
    kinds = list(split_frames(data))
    assert kinds[:2] == [(0, b""), (0, b"one")]
    assert read_error(kinds[2][1]) == (503, b"{}")


def test_a_status_has_a_code_whatever_the_body_is() -> None:
    assert rpc_status(418, b"", {}).code == "FAILED_PRECONDITION"
    assert rpc_status(599, b"[]", {}).code == "INTERNAL"
    unreachable = rpc_status(503, b'{"error": {"message": "no", "code": "deadline_unreachable"}}', {})
    assert (unreachable.code, unreachable.details) == ("DEADLINE_EXCEEDED", "deadline_unreachable: no")
    strange = rpc_status(400, '{"error": {"message": "ü", "param": "ü\\n"}}'.encode(), {})
    assert dict(strange.metadata)["error-param"] == "\\xfc?"


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:[fe80::1%25eth0]:80", ("fe80::1", 80)),
        ("unix:/tmp/socket", None),
        ("ipv4:999.1.1.1:5", None),
    ],
)
def test_the_address_of_a_peer_is_read(peer: str, client: tuple[str, int] | None) -> None:
    assert RpcCycle("/", b"", (), peer).scope["client"] == client
