"""Messages and frames: what goes in comes out, however the bytes are cut; nonsense and giants are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.interface.grammar_spec import Grammar, GrammarSchema, GrammarTrigger
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SampledToken, SamplingParams
from headrace.engine.process import wire
from headrace.errors import RequestError
from headrace.variant import Variant

SUBMIT = wire.Submit(
    request=GenerationRequest(
        id="a.1",
        prompt=tuple(range(40)),
        sampling=SamplingParams(temperature=0.5, logit_bias={7: -1.5}, seed=2**64 - 1, logprobs=3),
        stop_ids=frozenset({2, 3}),
        stop=("\n\n", "é"),
        grammar=Grammar(
            "lark",
            "start: a",
            schemas=(GrammarSchema("a", "{}", instead="true"),),
            trigger=GrammarTrigger(("<a>",), repeats=True, reasoning=("<b>", "</b>"), reasoning_begins="open"),
            best_effort=True,
        ),
    ),
    output=(5, 6),
    deadline_in_s=1.5,
)
USAGE = SequenceUsage(40, 3, 16, 4, 2, 0.1, 0.2, 0.3)
OUTPUT = SequenceOutput(
    "a.1",
    1,
    [9, 10],
    "wörd",
    [SampledToken(9, -0.5, ((9, -0.5), (4, -2.0))), SampledToken(10)],
    [SampledToken(3, -1.0)],
    b"\0\1",
    SequenceEnd(FinishReason.STOP, USAGE, "", "\n\n"),
)
TO_WORKER: list[wire.ClientMessage] = [
    SUBMIT,
    wire.Cancel("a.1"),
    wire.Ping(3),
    wire.Drain(),
    wire.AskStats(4),
    wire.Pin(number=5, tokens=(1, 2), salt="t", public=True),
    wire.Hello(wire.VERSION),
]
TO_CLIENT: list[wire.WorkerMessage] = [
    wire.Welcome(
        version=1,
        pid=7,
        model="m",
        kind="decoder",
        vocab_size=10,
        hidden_size=4,
        context=64,
        block_tokens=16,
        blocks=9,
        variant="int8/kv-bf16",
    ),
    wire.Outputs([OUTPUT, SequenceOutput("b", 0, [], "")]),
    wire.Rejected(id="a.1", reason="too many requests wait", retry_after=0.5),
    wire.Pong(3, 100, 0.25),
    wire.Draining(),
    wire.Stats(4, {"steps": 3, "nested": {"a": [1, 2.5, None, "x"]}}),
    wire.Pinned(5, "no room"),
    wire.Bye("nonsense"),
]


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_messages_arrive_however_their_bytes_are_cut(step: int) -> None:
    for messages, frames in ((TO_WORKER, wire.from_clients()), (TO_CLIENT, wire.from_worker())):
        data = b"".join(wire.encode_frame(message) for message in messages)
        found: list[object] = []
        for start in range(0, len(data), step):
            found += frames.feed(data[start : start + step])
        assert found == messages


def test_a_message_too_long_is_neither_sent_nor_read() -> None:
    with pytest.raises(wire.WireError, match="longer than 100"):
        wire.encode_frame(SUBMIT, most=100)
    with pytest.raises(wire.WireError, match="longer than 100"):
        list(wire.from_clients(most=100).feed(wire.encode_frame(SUBMIT)))


def test_a_giant_is_refused_by_its_length_before_it_comes() -> None:
    with pytest.raises(wire.WireError, match="4294967295"):
        list(wire.from_clients().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        msgspec.msgpack.encode({"type": "no such thing"}),
        msgspec.msgpack.encode({"type": "submit", "id": 3, "prompt": []}),
        msgspec.msgpack.encode({"type": "submit", "id": "a", "prompt": ["x"]}),
        msgspec.msgpack.encode({"type": "submit", "id": "a", "prompt": [2**70 % 2**63], "kind": "paint"}),
        msgspec.msgpack.encode({"type": "ping", "number": "3"}),
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\x91" * 5000,
        msgspec.msgpack.encode({"type": "pong", "number": 3, "steps": 3, "busy": 0.0}),  # of the other direction
    ],
)
def test_what_is_no_message_is_an_error_of_the_wire(content: bytes) -> None:
    with pytest.raises(wire.WireError, match="not a message"):
        list(wire.from_clients().feed(len(content).to_bytes(4, "little") + content))


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_no_bytes_bring_any_other_error(content: bytes, after: bytes) -> None:
    frames = wire.from_clients(most=1000)
    try:
        for _ in frames.feed(len(content).to_bytes(4, "little") + content + after):
            pass
    except wire.WireError:
        pass


def test_what_a_later_version_adds_is_passed_over() -> None:
    content = msgspec.msgpack.encode({"type": "cancel", "id": "a", "because": "of a later version"})
    assert list(wire.from_clients().feed(len(content).to_bytes(4, "little") + content)) == [wire.Cancel("a")]


def test_a_step_of_many_sequences_is_one_small_frame() -> None:
    outputs = wire.Outputs([SequenceOutput(f"0123456789ab.{n}", 0, [n], "word") for n in range(32)])
    assert len(wire.encode_frame(outputs)) < 32 * 40


def test_a_worker_is_configured_by_a_line_of_json() -> None:
    config = wire.WorkerConfig(variant=Variant(model="m", keep=("a=bf16",)), socket="s")
    line = msgspec.json.encode(config)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=wire.WorkerConfig) == config
    with pytest.raises(msgspec.ValidationError, match="wieghts"):
        msgspec.json.decode(b'{"variant": {"model": "m", "wieghts": "int8"}}', type=wire.WorkerConfig)


@pytest.mark.parametrize(("options", "named"), [({"wieghts": "int8"}, "wieghts"), ({"threads": "two"}, "threads")])
def test_an_unknown_or_wrong_option_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Variant.of("m", **options)


def test_variants_whose_bytes_differ_have_different_names() -> None:
    variants = [
        Variant(model="m"),
        Variant(model="m", weights="int8"),
        Variant(model="m", weights="int8", group=64),
        Variant(model="m", kv="int8"),
        Variant(model="m", isa="avx2"),
        Variant(model="m", keep=("layers.*=bf16",)),
    ]
    assert len({variant.name for variant in variants}) == len(variants)
    assert Variant(model="m", threads=1, speculation="none").name == Variant(model="m", threads=4).name
