"""Services that `headrace doctor` calls and that answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.doctor.service_checks import check_services
from headrace.config import CacheConfig, Config, ExactConfig, LedgerConfig, LimitingConfig
from tests.support.programs import postgres_server, redis_server


@pytest.mark.skipif(redis_server.PROGRAM is None, reason=redis_server.MISSING)
def test_a_redis_that_answers_is_fine(tmp_path: Path) -> None:
    with redis_server.redis_server(tmp_path) as redis:
        config = Config(
            cache=CacheConfig(exact=ExactConfig(store="redis", redis_env="A")), limiting=LimitingConfig(redis_env="A")
        )
        found = check_services(config, {"A": redis.url}, 30.0)
    assert [(each.check, each.state) for each in found] == [("redis of cache.exact", "ok"), ("redis of limiting", "ok")]


@pytest.mark.skipif(postgres_server.why_not() is not None, reason=str(postgres_server.why_not()))
def test_a_postgres_that_answers_is_fine_and_a_frozen_one_is_given_up() -> None:
    config = Config(ledger=LedgerConfig(store="postgres", dsn_env="A"))
    with postgres_server.serving() as postgres:
        (well,) = check_services(config, {"A": postgres.dsn}, 30.0)
        with postgres.frozen():
            (frozen,) = check_services(config, {"A": postgres.dsn}, 0.2)
    assert (well.state, frozen.state) == ("ok", "fail")
    assert frozen.found == "no answer within 0.2 s"
