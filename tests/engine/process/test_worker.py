"""The worker's side of its sockets: clients that behave, that do not, that vanish; draining; sleeping."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.executors.runner import greedy
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SamplingParams
from headrace.engine.process import wire
from headrace.engine.process.image_memory import ImageMemory
from headrace.engine.process.open_engine import OpenedVariant
from headrace.engine.process.worker import Worker
from tests.support.tiny_engine import PROMPT, open_tiny
from tests.support.worker_sockets import PATIENCE, Peer, serving


@pytest.fixture(scope="module")
def opened(tiny_folder: Path) -> OpenedVariant:
    return open_tiny(tiny_folder, context=512, kv_tokens=8192)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "socket"


@pytest.fixture
def worker(opened: OpenedVariant, path: Path) -> Iterator[Worker]:
    with serving(opened, path) as worker:
        yield worker


def submit(
    id: str = "a", *, output: tuple[int, ...] = (), deadline_in_s: float | None = None, **changes: Any
) -> wire.Submit:
    request = GenerationRequest(**({"id": id, "prompt": PROMPT, "max_tokens": 16} | changes))
    return wire.Submit(request=request, output=output, deadline_in_s=deadline_in_s)


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_requests_of_several_clients_are_answered_at_once(worker: Worker, path: Path, opened: OpenedVariant) -> None:
    with Peer(path) as first, Peer(path) as second:
        first.send(submit("a"), submit("b", prompt=PROMPT[:9]))
        second.send(submit("c"))
        found = first.answers("a", "b") | second.answers("c")
    expected = greedy(opened.executor, [PROMPT, PROMPT[:9]], 16)
    assert [found[id].tokens for id in "abc"] == [expected[0], expected[1], expected[0]]
    assert found["a"].text == opened.tokenizer.decode(expected[0])


def test_a_greeting_says_what_is_served(worker: Worker, path: Path) -> None:
    with Peer(path, greet=False) as peer:
        peer.send(wire.Hello(wire.VERSION))
        welcome = peer.expect(wire.Welcome)
    assert (welcome.pid, welcome.version, welcome.vocab_size, welcome.context) == (os.getpid(), wire.VERSION, 4096, 512)
    assert welcome.variant == "int8/kv-bf16"


def test_only_this_user_can_reach_the_socket(worker: Worker, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_another_version_is_told_and_parted_with(worker: Worker, path: Path) -> None:
    with Peer(path, greet=False) as peer:
        peer.send(wire.Hello(wire.VERSION + 1))
        assert peer.expect(wire.Welcome).version == wire.VERSION
        assert str(wire.VERSION + 1) in peer.expect(wire.Bye).reason
        assert peer.receive() is None


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"GET / HTTP/1.1\r\n\r\n", wire.encode_frame(wire.Ping(1))],
    ids=["giant", "nonsense", "http", "no-greeting"],
)
def test_a_client_that_makes_no_sense_is_dismissed_and_the_others_go_on(
    data: bytes, worker: Worker, path: Path
) -> None:
    with Peer(path) as good, Peer(path, greet=False) as bad:
        good.send(submit("a", max_tokens=100))
        bad.socket.sendall(data)
        assert bad.expect(wire.Bye).reason
        assert bad.receive() is None
        assert len(good.answers("a")["a"].tokens) == 100


def test_a_wrong_request_is_refused_with_its_parameter(worker: Worker, path: Path) -> None:
    with Peer(path) as peer:
        for changes, parameter in (
            ({"prompt": (10**6,)}, "prompt"),
            ({"max_tokens": 10**6}, "max_tokens"),
            ({"grammar": Grammar("json_schema", "[")}, "grammar"),
            ({"grammar": Grammar("regex", "(")}, "grammar"),  # found out by the compiler
            ({"output": (1, 2), "n": 2}, "output"),
            ({"deadline_in_s": float("inf")}, "deadline"),
        ):
            peer.send(submit(**changes))
            assert peer.expect(wire.Rejected).parameter == parameter
        peer.send(submit("twice", max_tokens=400), submit("twice"))
        refused = peer.until(lambda message: isinstance(message, wire.Rejected))
        assert isinstance(refused, wire.Rejected)
        assert (refused.id, refused.parameter) == ("twice", "id")


def test_new_images_are_refused_while_others_fill_the_memory(
    worker: Worker, path: Path, opened: OpenedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_images", ImageMemory(1))
    size = opened.executor.spec.feature_size * 4
    one, other = (ImageRows(0, 1, bytes([number]) * 32, bytes(size)) for number in (1, 2))
    with Peer(path) as peer:
        peer.send(submit("a", images=(one,), max_tokens=400), submit("b", images=(other,)))
        refused = peer.until(lambda message: isinstance(message, wire.Rejected))
        assert isinstance(refused, wire.Rejected)
        assert (refused.id, refused.parameter, refused.retry_after) == ("b", None, 1.0)
        assert "image_memory_bytes" in refused.reason


def test_a_grammar_is_compiled_while_others_run(worker: Worker, path: Path) -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"enum": ["water"]}}, "required": ["x"]})
    with Peer(path) as peer:
        peer.send(submit("free", max_tokens=64), submit("held", grammar=Grammar("json_schema", schema), max_tokens=200))
        found = peer.answers("free", "held")
    assert len(found["free"].tokens) == 64
    assert found["held"].text.lstrip().startswith("{")


def test_a_cancelled_request_ends_and_its_id_is_free_again(worker: Worker, path: Path, opened: OpenedVariant) -> None:
    with Peer(path) as peer:
        peer.send(submit("a", max_tokens=400))
        peer.expect(wire.Outputs)
        peer.send(wire.Cancel("a"), wire.Cancel("unknown"))
        ending = peer.answers("a")["a"].ending
        assert ending is not None
        assert ending.finish is FinishReason.CANCELLED
        peer.send(submit("a"))
        assert len(peer.answers("a")["a"].tokens) == 16
    assert opened.engine.blocks.stats().used == 0


def test_what_a_client_asked_for_ends_when_it_goes_away(worker: Worker, path: Path, opened: OpenedVariant) -> None:
    before = opened.engine.scheduler.stats().cancelled
    with Peer(path) as peer:
        peer.send(*(submit(str(n), max_tokens=400) for n in range(5)))
        peer.expect(wire.Outputs)
    eventually(lambda: opened.engine.scheduler.stats().cancelled == before + 5)
    eventually(lambda: opened.engine.idle)
    assert opened.engine.blocks.stats().used == 0


def test_a_client_cannot_cancel_what_is_anothers(worker: Worker, path: Path) -> None:
    with Peer(path) as owner, Peer(path) as other:
        owner.send(submit("mine", max_tokens=200))
        owner.expect(wire.Outputs)
        other.send(wire.Cancel("mine"), wire.Ping(1))
        other.expect(wire.Pong)
        ending = owner.answers("mine")["mine"].ending
        assert ending is not None
        assert ending.finish is FinishReason.LENGTH


def test_a_client_that_reads_nothing_is_cut_off(
    worker: Worker, path: Path, monkeypatch: pytest.MonkeyPatch, opened: OpenedVariant
) -> None:
    monkeypatch.setattr("headrace.engine.process.worker_clients._MOST_UNREAD", 20_000)
    with Peer(path) as deaf, Peer(path) as good:
        for n in range(40):
            deaf.send(submit(f"d{n}", max_tokens=400, sampling=SamplingParams(logprobs=100)))
        eventually(lambda: worker.clients == 1)
        good.send(submit("a"))
        assert len(good.answers("a")["a"].tokens) == 16
    eventually(lambda: opened.engine.idle)


def test_more_clients_than_allowed_are_turned_away(opened: OpenedVariant, path: Path) -> None:
    with serving(opened, path, most_clients=2), Peer(path), Peer(path) as second, Peer(path, greet=False) as third:
        assert "2 clients" in third.expect(wire.Bye).reason
        assert third.receive() is None
        second.send(wire.Ping(1))
        second.expect(wire.Pong)


def test_a_ping_is_answered_while_steps_run(worker: Worker, path: Path) -> None:
    with Peer(path) as peer:
        peer.send(submit("a", max_tokens=400), wire.Ping(1))
        first = peer.until(lambda message: isinstance(message, wire.Pong))
        peer.answers("a")
        peer.send(wire.Ping(2))
        second = peer.expect(wire.Pong)
    assert isinstance(first, wire.Pong)
    assert (first.number, second.number, second.busy) == (1, 2, 0.0)
    assert second.steps >= first.steps + 399


def test_a_step_that_gathers_waits_for_what_comes(
    worker: Worker, path: Path, opened: OpenedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened.engine
    monkeypatch.setattr(engine, "gather", lambda: 1e-3 if engine.scheduler.stats().waiting == 1 else 0.0)
    before = engine.timing.steps
    with Peer(path) as peer:
        peer.send(submit("a"), wire.Ping(1))
        pong = peer.expect(wire.Pong)  # the worker is not asleep while it gathers
        peer.send(submit("b", prompt=PROMPT[::-1]))
        peer.answers("a", "b")
    assert pong.steps == before
    assert engine.timing.steps == before + 16  # all of them together


def test_an_idle_worker_sleeps(worker: Worker, path: Path) -> None:
    with Peer(path) as peer:
        peer.send(submit("a"))
        peer.answers("a")
        peer.send(wire.Ping(1))
        peer.expect(wire.Pong)
        time.sleep(0.05)
        turns = worker.turns
        time.sleep(0.2)
        assert worker.turns == turns


def test_draining_finishes_what_runs_and_takes_nothing_new(tiny_folder: Path, path: Path) -> None:
    with serving(open_tiny(tiny_folder, context=512), path), Peer(path) as peer:
        peer.send(submit("a", max_tokens=300))
        peer.expect(wire.Outputs)
        peer.send(wire.Drain(), submit("b"))
        peer.until(lambda message: isinstance(message, wire.Draining))
        refused = peer.until(lambda message: isinstance(message, wire.Rejected))
        assert isinstance(refused, wire.Rejected)
        assert (refused.id, refused.draining) == ("b", True)
        made = 0
        while (message := peer.receive()) is not None:  # the worker ends by itself
            if isinstance(message, wire.Outputs):
                made += len(message.items)
                if message.items[-1].ending is not None:
                    assert message.items[-1].ending.finish is FinishReason.LENGTH
        assert made > 200
    assert not path.exists()


def test_statistics_tell_what_ran(worker: Worker, path: Path) -> None:
    with Peer(path) as peer:
        peer.send(submit("a"), wire.AskStats(1))
        peer.until(lambda message: isinstance(message, wire.Stats))
        peer.send(submit("b"))
        peer.answers("b")
        peer.send(wire.AskStats(2))
        stats = peer.until(lambda message: isinstance(message, wire.Stats))
    assert isinstance(stats, wire.Stats)
    assert stats.number == 2
    assert stats.values["tokens"] >= 16
    assert stats.values["scheduler"]["admitted"] >= 2
    assert stats.values["blocks"]["total"] == 512


def test_a_pinned_prefix_is_computed_and_kept(worker: Worker, path: Path, opened: OpenedVariant) -> None:
    prefix = tuple(range(700, 764))
    with Peer(path) as peer:
        peer.send(wire.Pin(number=1, tokens=prefix, salt="t"))
        assert peer.expect(wire.Pinned).reason is None
        assert opened.engine.blocks.stats().pinned == 4
        peer.send(submit("a", prompt=(*prefix, 5, 6), salt="t"))
        ending = peer.answers("a")["a"].ending
        assert ending is not None
        assert ending.usage.cached_tokens == 64
        peer.send(wire.Pin(number=2, tokens=prefix, salt="t", keep=False))
        assert peer.expect(wire.Pinned).reason is None
        peer.send(wire.Pin(number=3, tokens=prefix, salt="t", keep=False))
        assert "not pinned" in (peer.expect(wire.Pinned).reason or "")
        peer.send(wire.Pin(number=4, tokens=(1, 2)))
        assert "2 tokens" in (peer.expect(wire.Pinned).reason or "")
    assert opened.engine.blocks.stats().pinned == 0


def test_saved_prefixes_are_there_after_a_restart(tiny_folder: Path, tmp_path: Path, path: Path) -> None:
    prefix = tuple(range(700, 764))
    folder = tmp_path / "prefixes"
    first = open_tiny(tiny_folder, saved_prefixes=str(folder))
    with serving(first, path), Peer(path) as peer:
        peer.send(wire.Pin(number=1, tokens=prefix))
        assert peer.expect(wire.Pinned).reason is None
        peer.send(submit("a", prompt=(*prefix, 5, 6)))
        expected = peer.answers("a")["a"].tokens
    second = open_tiny(tiny_folder, saved_prefixes=str(folder))
    assert second.pins.restored_tokens == 64
    with serving(second, path), Peer(path) as peer:
        peer.send(submit("a", prompt=(*prefix, 5, 6)))
        answer = peer.answers("a")["a"]
    assert answer.tokens == expected
    assert answer.ending is not None
    assert answer.ending.usage.cached_tokens == 64
    third = open_tiny(tiny_folder, saved_prefixes=str(folder), weights="int4")
    assert third.pins.restored_tokens == 0
