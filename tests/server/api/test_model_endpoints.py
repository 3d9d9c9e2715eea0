"""`/v1/models` in both dialects, with aliases, and as far as a key may see."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.config import KeyConfig
from tests.support.running_server import Running, asynchronous, config_of, serving

SPEAKS_ANTHROPIC = {"anthropic-version": "2023-06-01"}


@contextlib.asynccontextmanager
async def serving_several(**server: Any) -> AsyncIterator[Running]:
    """A server of mini and mini@int4, and of other; mini has two aliases."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(config=config_of(Path(folder), **server)) as running:
            mini = running.fleet.served["mini"]
            for name in ("mini@int4", "other"):
                running.fleet.served[name] = replace(mini, name=name)
            running.fleet.aliases |= {"gpt-4o": "mini", "claude": "mini"}
            yield running


@asynchronous
async def test_aliases_are_listed_as_models() -> None:
    async with serving_several() as running:
        data = (await running.ask("GET", "/v1/models")).json["data"]
        assert [each["id"] for each in data] == ["mini", "mini@int4", "other", "gpt-4o", "claude"]
        assert [each.get("alias_of") for each in data] == [None, None, None, "mini", "mini"]
        alias = (await running.ask("GET", "/v1/models/gpt-4o")).json
        assert alias == data[3]
        assert (alias["object"], alias["max_model_len"]) == ("model", 2048)
        variant = (await running.ask("GET", "/v1/models/claude@int4")).json
        assert (variant["id"], variant["alias_of"]) == ("claude@int4", "mini@int4")


@asynchronous
async def test_a_client_of_anthropic_gets_its_own_shape() -> None:
    async with serving_several() as running:
        listed = (await running.ask("GET", "/v1/models", **SPEAKS_ANTHROPIC)).json
        assert [each["id"] for each in listed["data"]] == ["mini", "mini@int4", "other", "gpt-4o", "claude"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("mini", "claude", False)
        one = (await running.ask("GET", "/v1/models/gpt-4o", **SPEAKS_ANTHROPIC)).json
        assert one == listed["data"][3]
        assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", "gpt-4o (mini)", 2048)
        unknown = await running.ask("GET", "/v1/models/nothing", **SPEAKS_ANTHROPIC)
        assert unknown.status == 404
        assert unknown.json["type"] == "error"
        assert unknown.error["type"] == "not_found_error"


@asynchronous
async def test_pages_in_anthropics_shape_go_both_ways() -> None:
    async with serving_several() as running:

        async def page(query: str) -> tuple[list[str], bool]:
            listed = (await running.ask("GET", f"/v1/models?{query}", **SPEAKS_ANTHROPIC)).json
            return [each["id"] for each in listed["data"]], listed["has_more"]

        assert await page("limit=2") == (["mini", "mini@int4"], True)
        assert await page("limit=2&after_id=mini@int4") == (["other", "gpt-4o"], True)
        assert await page("after_id=gpt-4o") == (["claude"], False)
        assert await page("limit=2&before_id=claude") == (["other", "gpt-4o"], True)
        assert await page("before_id=mini") == ([], False)
        for query in ("limit=0", "limit=1001", "limit=x", "after_id=nothing", "before_id=nothing", "after=mini"):
            refused = await running.ask("GET", f"/v1/models?{query}", **SPEAKS_ANTHROPIC)
            assert (refused.status, refused.json["type"]) == (400, "error"), query


@asynchronous
async def test_a_key_sees_the_aliases_of_its_own_models_alone() -> None:
    keys = (KeyConfig(name="narrow", key="k" * 20, models=("other",)),)
    async with serving_several(keys=keys) as running:
        bearer = {"authorization": f"Bearer {'k' * 20}"}
        assert [each["id"] for each in (await running.ask("GET", "/v1/models", **bearer)).json["data"]] == ["other"]
        assert (await running.ask("GET", "/v1/models/gpt-4o", **bearer)).status == 404
