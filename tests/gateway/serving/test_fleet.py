"""Fleets with upstreams among their variants, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, ModelConfig, SurfaceConfig
from headrace.config.breaker_section import UpstreamBreakerConfig
from headrace.config.upstream_section import UpstreamConfig, UpstreamFeatures, UpstreamRetries
from headrace.engine.interface.request import GenerationRequest
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.upstreams.upstream import Upstream
from headrace.models.model_folder import BUNDLED
from tests.support.running_server import asynchronous

FAR = UpstreamConfig(url="http://127.0.0.1:9/v1", kind="openai")


def one(upstream: UpstreamConfig, **fields: Any) -> ServedVariant:
    """A fleet's only variant."""
    (served,) = Fleet.of(Config(models={"far": ModelConfig(upstream=upstream, **fields)})).served.values()
    return served


@asynchronous
async def test_a_fleet_of_upstreams_alone_has_no_engine_and_no_folder() -> None:
    models = {
        "far": ModelConfig(upstream=FAR, upstreams={"other": FAR}, aliases=("gpt",)),
        "also": ModelConfig(upstreams={"b": FAR}, upstream=FAR),
    }
    fleet = Fleet.of(Config(models=models))
    assert list(fleet.served) == ["far", "far@other", "also", "also@b"]
    assert all(served.upstream is not None for served in fleet.served.values())
    begun: list[str] = []
    await fleet.start(begun.append)
    assert begun == list(fleet.served)
    assert fleet.find("").name == fleet.find("gpt").name == "far"
    assert fleet.find("far", "other").name == "far@other"
    await fleet.close()


@asynchronous
async def test_engines_and_upstreams_stand_in_the_order_of_the_configuration() -> None:
    model = ModelConfig(path="draft", upstream=FAR, variants={"int8": {"weights": "int8"}}, upstreams={"b": FAR})
    fleet = Fleet.of(Config(models={"mixed": model}))
    assert list(fleet.served) == ["mixed", "mixed@int8", "mixed@b"]
    assert [served.upstream is None for served in fleet.served.values()] == [False, True, False]
    near = fleet.served["mixed@int8"]
    assert near.own_tokenizer is near.tokenizer
    assert near.described()["served_by"] == "engine"
    assert near.described()["max_model_len"] == near.context
    assert near.idle is False  # nothing of it runs
    await fleet.close()


@asynchronous
async def test_one_that_cannot_be_closed_leaves_no_other_open() -> None:
    fleet = Fleet.of(Config(models={name: ModelConfig(upstream=FAR) for name in ("a", "b", "c")}))
    closed: list[str] = []

    def close(name: str) -> Any:
        async def it() -> None:
            closed.append(name)
            if name == "b":
                raise OSError("no")

        return it

    for name, served in fleet.served.items():
        assert served.upstream is not None
        served.upstream.close = close(name)
    with pytest.raises(OSError, match="no"):
        await fleet.close()
    assert sorted(closed) == ["a", "b", "c"]


@asynchronous
async def test_what_only_an_engine_can_do_is_refused_in_clear_words() -> None:
    served = one(FAR)
    with pytest.raises(ApiError, match="served by an upstream") as refused:
        served.engine.stream(GenerationRequest(id="", prompt=(1,)))
    assert (refused.value.status, refused.value.parameter) == (400, "model")
    assert await served.engine.stats() == []
    assert served.own_tokenizer is None
    for use in (
        lambda: served.tokenizer.encode("a"),
        lambda: served.tokenizer.decode([1]),
        lambda: served.tokenizer.apply_template([]),
        lambda: served.tokenizer.longest_piece,
        lambda: served.tokenizer.vocab_size,
    ):
        with pytest.raises(ApiError, match="are unknown") as unknown:
            use()
        assert (unknown.value.status, unknown.value.code) == (400, "unsupported_parameter")


def test_a_variant_of_an_upstream_is_as_configured() -> None:
    assert one(FAR).described() | {"created": 0} == {
        "id": "far",
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "max_model_len": None,
        "kind": "decoder",
        "served_by": "upstream",
    }
    known = UpstreamConfig(
        url=FAR.url, tokenizer="draft", context=4096, takes=UpstreamFeatures(chat=False, embeddings=True)
    )
    model = ModelConfig(upstream=known, max_tokens=9, surface="voice")
    surfaces = {"voice": SurfaceConfig(deadline_ms=500.0)}
    served = Fleet.of(Config(models={"far": model}, surfaces=surfaces)).served["far"]
    assert (served.context, served.known_context, served.kind) == (4096, 4096, "encoder")
    assert (served.max_tokens, served.surface, served.deadlines) == (9, "voice", {"voice": 0.5})
    assert served.own_tokenizer is not None
    assert served.tokenizer.encode("Hello")


def test_a_key_comes_from_the_environment_and_must_be_there() -> None:
    config = Config(models={"far": ModelConfig(upstream=UpstreamConfig(url=FAR.url, key_env="FAR_KEY"))})
    served = Fleet.of(config, environ={"FAR_KEY": "geheim"}).served["far"]
    assert served.upstream is not None
    assert served.upstream.secret == "geheim"
    assert "geheim" not in str(served.described())
    with pytest.raises(HeadraceError, match="FAR_KEY"):
        Fleet.of(config, environ={})


def test_a_tokenizer_needs_neither_weights_nor_a_family_that_runs_here(tmp_path: Path) -> None:
    source = one(UpstreamConfig(url=FAR.url, tokenizer="draft")).tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED / "draft" / name).read_bytes())
    for config in (None, '{"model_type": "of_tomorrow", "vocab_size": 5000}', '{"text_config": {"vocab_size": 9}}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        found = one(UpstreamConfig(url=FAR.url, tokenizer=str(tmp_path))).tokenizer
        assert found.encode("Hello there") == source.encode("Hello there")


def test_a_fingerprint_is_of_the_server_and_not_of_how_long_it_is_waited_for() -> None:
    same = [
        FAR,
        UpstreamConfig(url=f"{FAR.url}/", kind="openai"),
        UpstreamConfig(
            url=FAR.url,
            kind="openai",
            key="geheim",
            retries=UpstreamRetries(most=0),
            breaker=UpstreamBreakerConfig(least_calls=1),
        ),
    ]
    assert len({one(config).fingerprint for config in same}) == 1
    others = [
        UpstreamConfig(url="http://127.0.0.1:10/v1", kind="openai"),
        UpstreamConfig(url="http://127.0.0.1:9/v2", kind="openai"),
        UpstreamConfig(url=FAR.url, kind="vllm"),
        UpstreamConfig(url=FAR.url, kind="openai", model="gpt"),
        UpstreamConfig(url=FAR.url, kind="openai", takes=UpstreamFeatures(seed=False)),
        UpstreamConfig(url=FAR.url, kind="openai", headers={"x-organisation": "ours"}),
    ]
    assert len({one(config).fingerprint for config in (FAR, *others)}) == 7


@asynchronous
async def test_an_upstream_idles_while_half_of_its_places_are_free() -> None:
    upstream = Upstream("far", UpstreamConfig(url=FAR.url, connections=4))
    for expected in (True, True, True, False):
        assert upstream.idle is expected
        await upstream.slots.acquire(0, 1.0)
    for _ in range(4):
        upstream.slots.release()
    upstream.healthy = False
    assert upstream.idle is False
    await upstream.close()
