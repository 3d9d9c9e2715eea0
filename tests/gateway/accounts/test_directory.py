"""Who calls and for whom: keys of the configuration and keys that were made, their scopes, rotation and end."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from headrace.config import ConfigError
from headrace.config.tenant_section import AdminConfig, CachesConfig, KeyConfig, TenantConfig
from headrace.gateway.accounts.account_records import KeyScope
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.admin_operations import NewKey
from headrace.gateway.accounts.directory import ANONYMOUS, AccountDirectory
from headrace.gateway.api_errors import ApiError
from headrace.gateway.limits.limit_scopes import LimitSet
from tests.support.accounts import WHO, bearer, declared, gateways
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous, refused


def denied(directory: AccountDirectory, headers: dict[str, str]) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as raised:
        directory.identify(headers)
    return raised.value.status, raised.value.code


async def made(gateway: AccountServices, tenant: str = "red", **fields: object) -> dict[str, str]:
    new = NewKey(**{"name": "app", "tenant": tenant, "scope": KeyScope(), **fields})  # type: ignore[arg-type]
    return await gateway.operations.create_key(WHO, new)


# Keys of the configuration


def test_without_any_key_everybody_may_call() -> None:
    directory = AccountDirectory((), {}, {})
    assert not directory.needed
    assert not directory.administered
    assert directory.identify(bearer("whatever")) is ANONYMOUS


def test_a_key_is_found_by_each_way_of_giving_it() -> None:
    digest = hashlib.sha256(b"hashed-secret").hexdigest().upper()
    keys = (
        KeyConfig(name="plain", key="plain-secret", tenant="red", weight=2.0, surface="voice"),
        KeyConfig(name="hashed", key_sha256=digest),
        KeyConfig(name="env", key_env="THE_KEY"),
        KeyConfig(name="wide", key="schlüssel-☃"),
    )
    directory = AccountDirectory(keys, {}, {"THE_KEY": "env-secret"})
    assert directory.needed
    found = directory.identify(bearer("plain-secret"))
    assert (found.key, found.tenant, found.weight, found.surface) == ("plain", "red", 2.0, "voice")
    assert directory.identify({"authorization": "bearer   hashed-secret"}).tenant == "hashed"
    assert directory.identify({"x-api-key": "env-secret"}).key == "env"
    assert directory.identify(bearer("schlüssel-☃".encode().decode("latin-1"))).key == "wide"
    # Both headers: the first of them counts, whatever the second says.
    assert directory.identify({**bearer("plain-secret"), "x-api-key": "hashed-secret"}).key == "plain"
    assert denied(directory, {**bearer("wrong"), "x-api-key": "hashed-secret"}) == (401, "invalid_api_key")
    assert directory.identify({"authorization": "Basic Zm9v", "x-api-key": "hashed-secret"}).key == "hashed"
    for nothing in ({}, {"authorization": "Bearer "}, {"authorization": "Basic Zm9v"}, {"x-api-key": ""}):
        assert denied(directory, nothing) == (401, "missing_api_key")
    for wrong in ("plain-secre", "plain-secret2", digest, "PLAIN-SECRET"):
        assert denied(directory, bearer(wrong)) == (401, "invalid_api_key")


def test_a_key_whose_variable_is_missing_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="NOT_THERE"):
        AccountDirectory((KeyConfig(name="a", key_env="NOT_THERE"),), {}, {})


def test_the_digest_that_is_found_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    directory = AccountDirectory([KeyConfig(name=str(n), key=f"secret-{n}") for n in range(5)], {}, {})
    assert directory.identify({"x-api-key": "secret-3"}).key == "3"
    digest = hashlib.sha256(b"secret-3").digest()
    assert compared == [(digest, digest)]


def test_a_tenants_settings_hold_for_its_keys() -> None:
    tenants = {"red": TenantConfig(weight=4.0, models=("mini",), surfaces=("chat", "voice"), suspended=False)}
    keys = (
        declared("one", "one-secret", tenant="red", weight=0.5, surfaces=("voice", "batch"), profiles=("fast",)),
        declared("two", "two-secret", tenant="red", models=("mini@int4", "draft"), limits=LimitSet(concurrent=3)),
        declared("three", "three-secret", tenant="blue"),
    )
    directory = AccountDirectory(keys, tenants, {})
    one, two, three = (directory.identify(bearer(f"{name}-secret")) for name in ("one", "two", "three"))
    assert (one.weight, one.models, one.surfaces) == (2.0, (frozenset({"mini"}),), ("voice",))
    assert one.profiles == frozenset({"fast"})
    assert two.models == (frozenset({"mini"}), frozenset({"mini@int4", "draft"}))
    assert (two.surfaces, two.limits, two.settings) == (("chat", "voice"), LimitSet(concurrent=3), tenants["red"])
    assert (three.models, three.surfaces, three.profiles, three.settings) == ((), None, None, TenantConfig())
    assert directory.tenants() == {"red", "blue"}


def test_weights_stay_what_the_engine_takes() -> None:
    tenants = {"red": TenantConfig(weight=1000.0), "blue": TenantConfig(weight=0.001)}
    keys = (
        declared("a", "a-secret", tenant="red", weight=1000.0),
        declared("b", "b-secret", tenant="blue", weight=0.001),
    )
    directory = AccountDirectory(keys, tenants, {})
    assert directory.identify(bearer("a-secret")).weight == 1000.0
    assert directory.identify(bearer("b-secret")).weight == 0.001


def test_a_suspended_tenant_is_refused() -> None:
    directory = AccountDirectory((declared(tenant="red"),), {"red": TenantConfig(suspended=True)}, {})
    assert denied(directory, bearer("root-secret")) == (403, "tenant_suspended")
    with pytest.raises(ApiError):
        directory.on_behalf("red")


# Keys that were made


def test_a_key_lives_from_its_making_to_its_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            directory, now = gateway.directory, standing.clock
            await gateway.operations.create_tenant(WHO, "red", TenantConfig(weight=2.0))
            key = await made(gateway, expires=int(now.now) + 100, surface="voice", weight=0.5)
            found = directory.identify(bearer(key["secret"]))
            assert (found.key, found.tenant, found.weight, found.surface) == (key["id"], "red", 1.0, "voice")
            now.now += 99
            assert directory.identify(bearer(key["secret"])).tenant == "red"
            now.now += 1
            assert denied(directory, bearer(key["secret"])) == (401, "expired_api_key")
            now.now -= 50  # the machine's clock is set back
            assert denied(directory, bearer(key["secret"])) == (401, "expired_api_key")
            assert [each["status"] for each in await _keys(gateway) if each["id"] == key["id"]] == ["expired"]
            now.now += 50
            other = await made(gateway)
            await gateway.operations.revoke_key(WHO, other["id"])
            assert denied(directory, bearer(other["secret"])) == (401, "invalid_api_key")
            assert (await gateway.operations.revoke_key(WHO, other["id"]))["status"] == "revoked"
            shown = {each["id"]: each["status"] for each in (await _keys(gateway))}
            assert shown == {"root": "live", key["id"]: "expired", other["id"]: "revoked"}

    asynchronous(test)


async def _keys(gateway: AccountServices) -> list[dict[str, str]]:
    return (await gateway.operations.keys(tenant=None, after=None, limit=1000)).data


def test_a_rotated_key_has_two_secrets_until_the_overlap_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            old = await made(gateway)
            new = await gateway.operations.rotate_key(WHO, old["id"], 60.0)
            identify = gateway.directory.identify
            assert new["secret"] != old["secret"]
            assert identify(bearer(old["secret"])) is identify(bearer(new["secret"]))
            assert [each["expires_at"] for each in new["secrets"]] == [int(standing.clock.now) + 60, None]
            standing.clock.now += 60
            assert denied(gateway.directory, bearer(old["secret"])) == (401, "expired_api_key")
            assert identify(bearer(new["secret"])).key == old["id"]
            at_once = await gateway.operations.rotate_key(WHO, old["id"], 0.0)
            assert denied(gateway.directory, bearer(new["secret"])) == (401, "invalid_api_key")
            assert identify(bearer(at_once["secret"])).key == old["id"]
            for _ in range(3):
                at_once = await gateway.operations.rotate_key(WHO, old["id"], 600.0)
            error = await refused(gateway.operations.rotate_key(WHO, old["id"], 600.0))
            assert (error.status, error.code) == (409, "too_many_secrets")
            await gateway.operations.revoke_key(WHO, old["id"])
            assert denied(gateway.directory, bearer(at_once["secret"])) == (401, "invalid_api_key")
            assert (await refused(gateway.operations.rotate_key(WHO, old["id"], 0.0))).code == "key_ended"

    asynchronous(test)


def test_a_rotation_never_makes_a_secret_last_longer(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            key = await made(gateway, expires=int(standing.clock.now) + 50)
            first = await gateway.operations.rotate_key(WHO, key["id"], 20.0)
            second = await gateway.operations.rotate_key(WHO, key["id"], 1000.0)
            standing.clock.now += 20
            assert denied(gateway.directory, bearer(key["secret"])) == (401, "expired_api_key")
            assert gateway.directory.identify(bearer(first["secret"]))
            standing.clock.now += 30  # the key's own end
            for each in (first, second):
                assert denied(gateway.directory, bearer(each["secret"])) == (401, "expired_api_key")

    asynchronous(test)


def test_a_tenant_that_is_deleted_takes_its_keys_along_and_its_name_stays_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            other = await standing.gateway(keys=(declared(),))
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            key = await made(gateway)
            await gateway.operations.delete_tenant(WHO, "red")
            assert denied(gateway.directory, bearer(key["secret"])) == (401, "invalid_api_key")
            assert "red" not in gateway.directory.tenants()
            assert (await refused(gateway.operations.create_tenant(WHO, "red", TenantConfig()))).status == 409
            assert (await refused(gateway.operations.delete_tenant(WHO, "red"))).status == 404
            with pytest.raises(ApiError):
                gateway.directory.on_behalf("red")
            # A key that somebody makes at the same time, unaware of it, is not made.
            await other.shared.refresh()
            assert (await refused(made(other))).code == "tenant_not_found"

    asynchronous(test)


def test_a_key_made_while_its_tenant_is_deleted_does_not_live(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one, other = [await standing.gateway(keys=(declared(),)) for _ in range(2)]
            await one.operations.create_tenant(WHO, "red", TenantConfig())
            await other.shared.refresh()
            key = await made(other)  # the first gateway has not heard of it when it deletes the tenant
            await one.operations.delete_tenant(WHO, "red")
            await one.shared.refresh()
            await other.shared.refresh()
            for each in (one, other):
                assert denied(each.directory, bearer(key["secret"])) == (401, "invalid_api_key")

    asynchronous(test)


def test_what_the_configuration_declares_is_not_changed_through_the_api(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(
                keys=(declared(), declared("named", "named-secret", tenant="implied")), tenants={"red": TenantConfig()}
            )
            operations = gateway.operations
            for work in (
                operations.create_tenant(WHO, "red", TenantConfig()),
                operations.change_tenant(WHO, "red", lambda _: TenantConfig(weight=2.0)),
                operations.delete_tenant(WHO, "red"),
                operations.change_tenant(WHO, "implied", lambda _: TenantConfig(weight=2.0)),
                operations.revoke_key(WHO, "root"),
                operations.rotate_key(WHO, "root", 0.0),
            ):
                error = await refused(work)
                assert (error.status, error.code) == (409, "declared_in_config")
            # Keys may be made for it; and a tenant that only a key names may be described.
            assert gateway.directory.identify(bearer((await made(gateway))["secret"])).tenant == "red"
            await operations.create_tenant(WHO, "implied", TenantConfig(weight=3.0))
            assert gateway.directory.identify(bearer("named-secret")).weight == 3.0
            assert (await refused(operations.delete_tenant(WHO, "implied"))).code == "declared_in_config"
            again = await standing.gateway(keys=(declared("named", "named-secret", tenant="implied"),))
            assert again.directory.identify(bearer("named-secret")).weight == 3.0

    asynchronous(test)


def test_tenants_and_keys_have_their_bounds(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),), admin=AdminConfig(tenants=2, keys=3, poll_s=3600.0))
            for name in ("red", "blue"):
                await gateway.operations.create_tenant(WHO, name, TenantConfig())
            await gateway.operations.delete_tenant(WHO, "blue")
            assert (await refused(gateway.operations.create_tenant(WHO, "green", TenantConfig()))).code == (
                "too_many_tenants"
            )
            keys = [await made(gateway) for _ in range(3)]
            assert (await refused(made(gateway))).code == "too_many_keys"
            await gateway.operations.revoke_key(WHO, keys[0]["id"])
            await made(gateway)  # in the place of the revoked one
            assert keys[0]["id"] not in [each["id"] for each in await _keys(gateway)]
            assert (await refused(made(gateway))).code == "too_many_keys"
            assert len(await _keys(gateway)) == 4

    asynchronous(test)


def test_work_on_behalf_of_a_tenant_may_what_its_key_may(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(
                keys=(declared(tenant="red", models=("mini",), weight=0.5),), tenants={"red": TenantConfig(weight=4.0)}
            )
            directory = gateway.directory
            key = await made(gateway, scope=KeyScope(models=("draft",)))
            caller = directory.on_behalf("red", surface="batch")
            assert (caller.tenant, caller.weight, caller.surface, caller.models) == ("red", 2.0, "batch", ())
            assert directory.on_behalf("red", key="root").models == (frozenset({"mini"}),)
            assert directory.on_behalf("red", key=key["id"], surface="batch").models == (frozenset({"draft"}),)
            brief = await made(gateway, expires=int(standing.clock.now) + 60)
            assert directory.on_behalf("red", key=brief["id"]).key == brief["id"]
            standing.clock.now += 60
            await gateway.operations.revoke_key(WHO, key["id"])
            for tenant, id, code in (
                ("red", key["id"], "key_ended"),
                ("red", brief["id"], "key_ended"),
                ("red", "nobody", "key_ended"),
                ("blue", "root", "key_ended"),
                ("blue", None, "tenant_ended"),
            ):
                with pytest.raises(ApiError) as raised:
                    directory.on_behalf(tenant, key=id)
                assert (raised.value.status, raised.value.code) == (403, code)

    asynchronous(test)


def test_a_record_that_this_version_cannot_read_allows_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            await gateway.operations.create_tenant(WHO, "red", TenantConfig(weight=2.0))
            key = await made(gateway)
            await standing.database.run(
                lambda connection: (
                    connection.execute(
                        "UPDATE shared_records SET body = replace(body, 'weight', 'heaviness') WHERE kind = 'tenant'"
                    ).rowcount
                )
            )
            again = await standing.gateway(keys=(declared(),))
            assert denied(again.directory, bearer(key["secret"])) == (401, "invalid_api_key")

    asynchronous(test)


def test_settings_stay_what_they_were_given_as(tmp_path: Path) -> None:
    settings = TenantConfig(
        weight=0.25,
        models=(),
        limits=LimitSet(concurrent=2),
        model_limits={"mini": LimitSet(input_tokens_per_s=5)},
        caches=CachesConfig(exact="record"),
        ladder=False,
        metadata={"a": "ü"},
    )

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one = await standing.gateway(keys=(declared(),))
            # A cache that is nowhere would be silently none.
            error = await refused(one.operations.create_tenant(WHO, "red", settings))
            assert (error.status, error.parameter) == (400, "caches.exact")
            one = await standing.gateway(keys=(declared(),), caches={"exact": object()})
            await one.operations.create_tenant(WHO, "red", settings)
            other = await standing.gateway(keys=(declared(),))
            assert other.directory.settings_of("red") == settings
            assert other.directory.settings_of("nobody") == TenantConfig()

    asynchronous(test)


def test_the_secrets_of_keys_are_known_in_what_clients_say(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared("a", "schlüssel", tenant="red"),))
            directory, secret = gateway.directory, (await made(gateway))["secret"]
            assert directory.is_secret("schlüssel".encode().decode("latin-1"))
            assert directory.is_secret(secret)
            assert directory.is_secret(f"key={secret}")
            assert not any(map(directory.is_secret, ("", "red", "schlüssel ", secret[:-1], "\ud800")))
            text = f"/v1/files/{secret}/schlüssel/it={secret}".encode().decode("latin-1")
            assert directory.hidden(text) == "/v1/files/mr-***/mr-***/it=mr-***"
            assert directory.hidden("/v1//files/") == "/v1//files/"

    asynchronous(test)


def test_a_directory_of_its_own_needs_no_shared_state() -> None:
    clock = Clock()
    directory = AccountDirectory((KeyConfig(name="a", key="secret", admin="read"),), {}, {}, clock=clock)
    assert directory.administered
    assert directory.identify(bearer("secret")).admin == "read"
    assert directory.on_behalf("a").tenant == "a"
    assert directory.taken_uses() == {}
