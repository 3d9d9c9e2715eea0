"""The features of images in a worker: one copy of each, within a bound, for as long as a request has it."""

from __future__ import annotations

import msgspec

from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process import wire
from headrace.engine.process.image_memory import ImageMemory


def received(*images: tuple[bytes, bytes]) -> tuple[ImageRows, ...]:
    """Return images as they come over the wire, with bytes of their own."""
    rows = tuple(ImageRows(place, 1, digest, data) for place, (digest, data) in enumerate(images))
    request = GenerationRequest(id="a", prompt=(0,) * 9, images=rows)
    decoded = msgspec.msgpack.decode(wire.encode_frame(wire.Submit(request=request))[4:], type=wire.ClientMessage)
    assert isinstance(decoded, wire.Submit)
    return decoded.request.images


A, B = (b"a" * 32, b"x" * 100), (b"b" * 32, b"y" * 100)


def test_requests_with_the_same_image_share_its_features() -> None:
    memory = ImageMemory(1000)
    held = [memory.shared(received(A)) for _ in range(8)]
    assert memory.bytes == 100
    assert len({id(images[0].data) for images in held if images is not None}) == 1
    while held:
        assert memory.bytes == 100
        held.pop()
    assert memory.bytes == 0


def test_an_image_that_comes_twice_in_a_request_is_held_once() -> None:
    memory = ImageMemory(1000)
    held = memory.shared(received(A, B, A))
    assert held is not None
    assert [each.start for each in held] == [0, 1, 2]
    assert held[2].data is held[0].data
    assert memory.bytes == 200
    del held
    assert memory.bytes == 0


def test_the_features_of_all_requests_are_bounded() -> None:
    memory = ImageMemory(199)
    one = memory.shared(received(A))
    assert memory.shared(received(B)) is None
    assert memory.shared(received(A, B)) is None
    assert memory.bytes == 100
    again = memory.shared(received(A))
    del one
    assert memory.bytes == 100
    del again
    assert memory.bytes == 0
    assert memory.shared(received(B)) is not None


def test_one_request_has_room_if_no_other_has_images() -> None:
    memory = ImageMemory(10)
    held = memory.shared(received(A, B))
    assert held is not None
    assert memory.bytes == 200
    assert [each.data for each in held] == [A[1], B[1]]


def test_other_features_of_the_same_image_are_kept_apart() -> None:
    memory = ImageMemory(1000)
    other = (A[0], b"z" * 100)
    held = memory.shared(received(A))
    changed = memory.shared(received(other))
    assert held is not None
    assert changed is not None
    assert (held[0].data, changed[0].data, memory.bytes) == (A[1], other[1], 200)
    del held
    assert memory.bytes == 100
    del changed
    assert memory.bytes == 0
