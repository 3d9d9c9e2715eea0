"""A surface has a default output length for requests that set none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.config import SurfaceConfig
from tests.support.running_server import Running, asynchronous, config_of, serving, words


async def length_of(running: Running, **request: Any) -> tuple[int | None, dict[str, Any]]:
    """The output tokens that the engine may generate, and the answer's own field."""
    before = len(running.engine.streams)
    client = await running.client()
    answer = await client.chat(**request)
    assert answer.status == 200
    return running.engine.streams[before].request.max_tokens, answer.json["headrace"]


@asynchronous
async def test_a_surface_has_a_default_output_length(tmp_path: Path) -> None:
    surfaces = {"voice": SurfaceConfig(max_tokens=48), "chat": SurfaceConfig(max_tokens=64)}
    async with serving(config=replace(config_of(tmp_path), surfaces=surfaces)) as running:
        running.engine.answer = words("one ", "two")
        length, own = await length_of(running, surface="voice")
        assert length == 48
        assert "shaped" not in own  # a default is no reduction
        assert (await length_of(running))[0] == 64
        assert (await length_of(running, surface="agent"))[0] not in (48, 64)
        assert (await length_of(running, surface="voice", max_tokens=7))[0] == 7
        assert (await length_of(running, surface="voice", max_tokens=200))[0] == 200
        assert (await length_of(running, surface="voice", profile="fast"))[0] == 48


@asynchronous
async def test_the_default_cuts_no_output_of_a_fixed_format(tmp_path: Path) -> None:
    surfaces = {"chat": SurfaceConfig(max_tokens=4)}
    async with serving(config=replace(config_of(tmp_path), surfaces=surfaces)) as running:
        running.engine.answer = words("{}")
        assert (await length_of(running, response_format={"type": "json_object"}))[0] != 4
