"""Checks whether the services that a configuration names answer: Redis, Postgres and upstreams.

All are called at once, each within the same time. Writes nothing to them and prints no address that may hold a secret.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from headrace.cli.doctor.check_result import CheckResult, fail, ok
from headrace.config import Config, upstreams_of
from headrace.config.upstream_section import UpstreamConfig, health_path
from headrace.errors import HeadraceError
from headrace.gateway.postgres_pool import PostgresPool
from headrace.gateway.redis_client import connect
from headrace.gateway.upstreams.upstream_client import UpstreamClient
from headrace.gateway.upstreams.upstream_errors import UpstreamError

Call = Callable[[float], Awaitable[str]]  # returns what to print; given the seconds it may take


def check_services(config: Config, environ: Mapping[str, str], seconds: float) -> list[CheckResult]:
    return asyncio.run(_check_all(config, environ, seconds))


async def _check_all(config: Config, environ: Mapping[str, str], seconds: float) -> list[CheckResult]:
    calls = [*_stores(config, environ), *_upstreams(config, environ)]
    return await asyncio.gather(*(_bounded(name, call, advice, seconds) for name, call, advice in calls))


async def _bounded(name: str, call: Call, advice: str, seconds: float) -> CheckResult:
    started = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            found = await call(seconds)
    except TimeoutError:
        return fail(name, f"no answer within {seconds:g} s", advice)
    except (UpstreamError, HeadraceError) as error:
        return fail(name, str(error), advice)
    except Exception as error:  # a driver's own, such as a rejected password; its text may repeat the URL
        return fail(name, f"cannot be used: {type(error).__name__}", advice)
    return ok(name, f"{found} in {(time.monotonic() - started) * 1000:.0f} ms")


def _stores(config: Config, environ: Mapping[str, str]) -> Iterator[tuple[str, Call, str]]:
    exact = config.cache.exact
    for used, key, variable in (
        (exact.store == "redis", "cache.exact", exact.redis_env),
        (config.limiting.redis_env is not None, "limiting", config.limiting.redis_env or ""),
        (config.workers.redis_env is not None, "workers", config.workers.redis_env or ""),
    ):
        if used and environ.get(variable):
            yield f"redis of {key}", _redis(environ[variable]), _store_advice("Redis", variable)
    for section, key in ((config.ledger, "ledger"), (config.admin, "admin")):
        if section.store == "postgres" and environ.get(section.dsn_env):
            call = _postgres(environ[section.dsn_env], section.schema)
            yield f"postgres of {key}", call, _store_advice("Postgres", section.dsn_env)


def _store_advice(kind: str, variable: str) -> str:
    return f"Start {kind}, or correct address and password in {variable}."


def _redis(url: str) -> Call:
    async def call(seconds: float) -> str:
        client = connect(url, seconds=seconds)
        try:
            await client.mget(["headrace-doctor"])
        finally:
            await client.aclose()
        return "answers"

    return call


def _postgres(dsn: str, schema: str) -> Call:
    async def call(seconds: float) -> str:
        pool = PostgresPool(dsn, schema=schema, most=1)
        try:
            await pool.run(lambda connection: connection.fetchval("SELECT 1"), seconds)
        finally:
            pool.close()
        return "answers"

    return call


def _upstreams(config: Config, environ: Mapping[str, str]) -> Iterator[tuple[str, Call, str]]:
    for model_name, model in config.models.items():
        for full, upstream in upstreams_of(model_name, model).items():
            advice = "Start that server, or correct the upstream's url, key and ca_file."
            yield f"upstream {full}", _upstream(full, upstream, environ), advice


def _upstream(name: str, config: UpstreamConfig, environ: Mapping[str, str]) -> Call:
    async def call(seconds: float) -> str:
        key = config.key if config.key_env is None else environ.get(config.key_env)
        client = UpstreamClient(name, config, key, time.monotonic)
        path = health_path(config)
        try:
            status = await client.get(path or "/", time.monotonic() + seconds)
        finally:
            await client.close()
        if path and status >= 400:
            raise HeadraceError(f"status {status} from {path}")
        return f"answers {path} with {status}" if path else "answers (it has no health check)"

    return call
