"""KV tiers behind a real engine: the same tokens with and without them, and after a worker was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.open_engine import OpenedVariant
from headrace.errors import RequestError
from tests.support.tiny_engine import one, open_tiny

CONVERSATIONS = [tuple(range(start, start + 150)) for start in (3, 200, 40, 120)]
OPTIONS: dict[str, Any] = {"weights": "int8", "context": 256, "kv_tokens": 512, "threads": 2, "cache": False}


def conversation(opened: OpenedVariant, number: int, turn: int) -> tuple[list[int], int]:
    """Answer one turn. Return its tokens, and the tokens of the prompt that were not computed."""
    prompt = (*CONVERSATIONS[number], *range(7, 7 + 8 * turn))
    request = GenerationRequest(id=f"{number}.{turn}", prompt=prompt, max_tokens=6, salt="red")
    answer = one(opened.engine, request)
    assert answer.ending is not None
    return answer.tokens, answer.ending.usage.cached_tokens


@pytest.mark.parametrize("kv", ["bf16", "int8", "f32"])
def test_answers_are_the_same_whatever_tier_their_kv_came_from(tiny_folder: Path, tmp_path: Path, kv: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "none": {"prefix_cache": False},
        "memory": {"kv_memory_bytes": 64 << 20},
        "disk": {"kv_disk_bytes": 64 << 20, "kv_disk_folder": str(tmp_path)},
    }
    answers: dict[str, list[list[int]]] = {}
    cached: dict[str, int] = {}
    for kind, options in kinds.items():
        opened = open_tiny(tiny_folder, kv=kv, kv_tokens=256, **options)
        answers[kind], cached[kind] = [], 0
        for turn in range(3):
            for number in range(len(CONVERSATIONS)):
                tokens, hit = conversation(opened, number, turn)
                answers[kind].append(tokens)
                cached[kind] += hit
                while opened.engine.rest():
                    pass
        opened.engine.close()
    assert answers["none"] == answers["memory"] == answers["disk"]
    assert cached["none"] == 0
    # All turns but the first find the conversation, which has left the block memory: nine blocks each.
    assert min(cached["memory"], cached["disk"]) >= 2 * len(CONVERSATIONS) * 144


def test_an_engine_of_another_kind_does_not_find_what_a_folder_has(tiny_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_disk_bytes": 64 << 20, "kv_disk_folder": str(tmp_path)}
    for changes, expected in (({}, 0), ({}, 144), ({"kv": "int8"}, 0), ({"kv_block": 32}, 0), ({"kv_block": 32}, 128)):
        opened = open_tiny(tiny_folder, **(options | changes))
        assert conversation(opened, 0, 1)[1] == expected, changes
        opened.engine.close()


def test_a_killed_worker_finds_its_conversations_again(tiny_folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        options = OPTIONS | {"kv_disk_bytes": 64 << 20, "kv_disk_folder": str(tmp_path)}
        async with AsyncLLM(str(tiny_folder), **options) as llm:
            prompt = list(CONVERSATIONS[0])
            (before,) = await llm.generate([prompt], max_tokens=4)
            assert before.completions[0].usage.cached_tokens == 0
            while (await llm.client.stats())[0]["tiers"]["disk"]["written"] < 9:
                await asyncio.sleep(0.01)
            (pid,) = llm.supervisor.pids
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            (after,) = await llm.generate([prompt], max_tokens=4)
            assert after.completions[0].tokens == before.completions[0].tokens
            assert after.completions[0].usage.cached_tokens == 144

    asyncio.run(asyncio.wait_for(run(), 120.0))


def test_memory_reserved_and_not_used_is_shown_beside_a_contiguous_allocation(tiny_folder: Path) -> None:
    opened = open_tiny(tiny_folder)
    opened.engine.submit(GenerationRequest(id="a", prompt=CONVERSATIONS[0], max_tokens=90))
    opened.engine.step()
    stats = opened.engine.stats()
    assert stats["contiguous_tokens"] == 240
    held = stats["blocks"].used * 16
    assert stats["blocks"].unfilled == held - 151 or stats["blocks"].unfilled < 16
    assert held <= 176
    opened.engine.cancel("a")
    opened.engine.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_disk_bytes": 1}, "'kv_disk_bytes' requires 'kv_disk_folder'"),
        ({"kv_disk_folder": "x"}, "'kv_disk_folder' requires 'kv_disk_bytes'"),
        ({"kv_memory_bytes": -1}, "'kv_memory_bytes' must be at least 0"),
        ({"kv_disk_key_env": "X"}, "'kv_disk_key_env' requires 'kv_disk_bytes'"),
        ({"kv_disk_bytes": 9, "kv_disk_folder": "/dev/null/x"}, "Cannot use the folder"),
    ],
)
def test_options_that_do_not_fit_are_rejected(tiny_folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        LLM(str(tiny_folder), **OPTIONS, **options)
