"""The messages of headrace.proto, built from its compiled descriptor. Needs the extra `grpc`.

After a change of the proto, run in this folder (grpcio-tools): python -m grpc_tools.protoc -I.
--descriptor_set_out=headrace.binpb headrace.proto
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "headrace.v1"
SERVICE: Final = f"{PACKAGE}.Headrace"
PROTO: Final = Path(__file__).with_name("headrace.proto")
DESCRIPTOR: Final = PROTO.with_suffix(".binpb")

# protobuf has no types for classes that are built at run time.
_descriptor_pb2: Any = importlib.import_module("google.protobuf.descriptor_pb2")
_descriptor_pool: Any = importlib.import_module("google.protobuf.descriptor_pool")
_message_factory: Any = importlib.import_module("google.protobuf.message_factory")
_message: Any = importlib.import_module("google.protobuf.message")
_struct_pb2: Any = importlib.import_module("google.protobuf.struct_pb2")  # which ours import
_json_format: Any = importlib.import_module("google.protobuf.json_format")

# The default pool, where server reflection looks.
_pool: Any = _descriptor_pool.Default()
for _file in _descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR.read_bytes()).file:
    # Generated stubs leave these names out; a program that has such stubs too needs the same description.
    for _field in (field for message in _file.message_type for field in message.field):
        _field.ClearField("json_name")
    _pool.AddSerializedFile(_file.SerializeToString())


def _message_class(name: str) -> Any:
    return _message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


DecodeError: Any = _message.DecodeError
GenerateRequest: Any = _message_class("GenerateRequest")
GenerateResponse: Any = _message_class("GenerateResponse")
EmbedRequest: Any = _message_class("EmbedRequest")
EmbedResponse: Any = _message_class("EmbedResponse")
ListModelsResponse: Any = _message_class("ListModelsResponse")


def plain_struct(struct: Any) -> dict[str, Any]:
    """Return a Struct as JSON values. All its numbers are floats; whole ones become integers, as parameters need."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Any) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return plain_struct(value.struct_value)
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case "number_value":
            number: float = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def fill(message: Any, value: Any) -> None:
    """Fill a Struct or Value with JSON values."""
    _json_format.ParseDict(value, message)
