"""Pins of the configuration and of the admin API, as the engines keep them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import ModelConfig, PinConfig
from headrace.errors import RequestError
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.pinned_prompts import PinnedPrompt, PinnedPrompts
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.llm.prompting import prefix_tokens
from tests.support.running_server import FakeEngine, asynchronous, tokenizer, until

SYSTEM = "You answer questions about rivers, and about nothing else."
RED = PinConfig(name="rivers", system=SYSTEM, tenant="red")
PUBLIC = PinConfig(name="open", text="The water ran and ran.", public=True)


class PinningEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[tuple[str, tuple[int, ...]], bool] = {}  # salt and tokens -> public
        self.full = False

    async def pin(
        self, tokens: Sequence[int], salt: str = "", *, public: bool = False, keep: bool = True, owner: str = ""
    ) -> None:
        if self.full and keep:
            raise RequestError("no room", parameter="pin")
        if keep:
            self.pins[salt, tuple(tokens)] = public
        else:
            del self.pins[salt, tuple(tokens)]


def fleet_of(**engines: PinningEngine) -> Fleet:
    served = {
        name.replace("_", "@"): ServedVariant(
            name=name.replace("_", "@"), engine=engine, tokenizer=tokenizer(), context=2048
        )
        for name, engine in engines.items()
    }
    return Fleet(served, {}, "mini")


def states(prompts: PinnedPrompts) -> list[tuple[str, str, str]]:
    return [
        (pin["name"], variant["variant"], variant["status"]) for pin in prompts.listed() for variant in pin["variants"]
    ]


@asynchronous
async def test_declared_pins_are_computed_at_the_start_in_every_variant() -> None:
    plain, small, other = PinningEngine(), PinningEngine(), PinningEngine()
    fleet = fleet_of(mini=plain, mini_int4=small, draft=other)
    prompts = PinnedPrompts(fleet, {"mini": ModelConfig(pins=(RED, PUBLIC)), "draft": ModelConfig()})
    await prompts.start()
    system = prefix_tokens(tokenizer(), system=SYSTEM)
    text = prefix_tokens(tokenizer(), text=PUBLIC.text or "")
    assert plain.pins == small.pins == {("red", system): False, ("", text): True}
    assert other.pins == {}
    assert set(states(prompts)) == {
        (pin, variant, "pinned") for pin in ("rivers", "open") for variant in ("mini", "mini@int4")
    }
    (shown, _) = prompts.listed()
    assert shown["variants"][0]["tokens"] == len(system)
    assert SYSTEM not in str(shown)


@asynchronous
async def test_pins_of_the_admin_api_come_and_go_and_those_of_the_file_stay() -> None:
    engine = PinningEngine()
    prompts = PinnedPrompts(fleet_of(mini=engine), {"mini": ModelConfig(pins=(RED,))})
    await prompts.start()
    following = asyncio.create_task(prompts.run())
    same = PinnedPrompt("pin_1", "mini", msgspec.structs.replace(RED, name="twin"), "admin", 1)
    more = PinnedPrompt("pin_2", "mini", PUBLIC, "admin", 2)
    prompts.want([same, more])
    await until(lambda: len(engine.pins) == 2 and all(state == "pinned" for *_, state in states(prompts)))
    assert len(states(prompts)) == 3
    prompts.want([])
    await until(lambda: len(engine.pins) == 1)
    assert [salt for salt, _ in engine.pins] == ["red"]  # the file's pin has the same beginning as one that went
    assert states(prompts) == [("rivers", "mini", "pinned")]
    following.cancel()


@asynchronous
async def test_what_cannot_be_pinned_says_why_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headrace.gateway.serving.pinned_prompts._RETRY_S", 0.01)
    engine = PinningEngine()
    engine.full = True
    gone = tmp_path / "system.txt"
    pins = (RED, PinConfig(name="file", system_file=str(gone), tenant="red"))
    prompts = PinnedPrompts(fleet_of(mini=engine), {"mini": ModelConfig(pins=pins)})
    await prompts.start()
    reasons: list[Any] = [pin["variants"][0]["reason"] for pin in prompts.listed()]
    assert reasons[0] == "no room"
    assert "No such file" in reasons[1]
    following = asyncio.create_task(prompts.run())
    engine.full = False
    gone.write_text(SYSTEM * 2, encoding="utf-8")
    await until(lambda: {state for *_, state in states(prompts)} == {"pinned"})
    assert ("red", prefix_tokens(tokenizer(), system=SYSTEM * 2)) in engine.pins
    following.cancel()


@asynchronous
async def test_an_engine_without_pins_and_a_text_that_is_too_long_are_reported() -> None:
    fleet = fleet_of(mini=PinningEngine(), draft=PinningEngine())
    fleet.served["draft"].engine = FakeEngine()
    long = PinConfig(name="long", text="water " * 3000, public=True)
    models = {"mini": ModelConfig(pins=(long,)), "draft": ModelConfig(pins=(RED,))}
    prompts = PinnedPrompts(fleet, models)
    await prompts.start()
    found = {pin["name"]: pin["variants"][0]["reason"] for pin in prompts.listed()}
    assert "the context of 'mini' 2048" in found["long"]
    assert found["rivers"] == "This engine cannot pin prompts."
