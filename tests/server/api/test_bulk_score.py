"""Many continuations of one prompt are scored by a real engine: the prompt is computed once, also in a batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from headrace.server.server import Server
from tests.support.running_server import Answer, Running, config_of, living

PROMPT = "The reader liked: " + ", ".join(f"a history of town number {number}" for number in range(12)) + ". Next:"
ITEMS = [f" the river {number}" for number in range(24)]


class Idle:
    """Says that no request is left: this server has an engine of its own."""

    open: tuple[()] = ()


def test_the_shared_prompt_of_many_items_is_computed_once(tmp_path: Path) -> None:
    async def scored(server: Running, body: dict[str, Any]) -> Answer:
        answer = await server.ask("POST", "/v1/score", body)
        assert answer.status == 200, answer.json
        return answer

    async def batch(server: Running, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that a batch runs."""
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/score", "body": body})
        parts = (
            '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{line}\r\n--b--\r\n'
        )
        type = "multipart/form-data; boundary=b"
        file = (await server.ask("POST", "/v1/files", parts.encode(), content_type=type)).json["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/score", "completion_window": "24h"}
        made = (await server.ask("POST", "/v1/batches", wanted)).json
        while (found := (await server.ask("GET", f"/v1/batches/{made['id']}")).json)["status"] != "completed":
            assert found["status"] in ("validating", "in_progress", "finalizing"), found
            await asyncio.sleep(0.01)
        content = await server.ask("GET", f"/v1/files/{found['output_file_id']}/content")
        return json.loads(content.body)["response"]["body"]

    async def it() -> None:
        made = Server(config_of(tmp_path))
        async with living(made, lambda task: Running(made, Idle(), made.fleet, task)) as server:  # type: ignore[arg-type]
            together = (await scored(server, {"prompt": PROMPT, "continuations": ITEMS})).json
            usage = together["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 0.8 * usage["prompt_tokens"]
            alone = (await scored(server, {"prompt": PROMPT, "continuations": ITEMS[7:8]})).json
            assert alone["data"][0]["logprob"] == together["data"][7]["logprob"]  # the same bytes
            in_batch = await batch(server, {"prompt": PROMPT, "continuations": ITEMS})
            assert in_batch["data"] == together["data"]

    asyncio.run(asyncio.wait_for(it(), 120))
